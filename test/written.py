"""The files of a checkpoint and of an adapter as other versions than the installed ones write them.

The tests run with transformers 4.57 and PEFT 0.21, whose own `save_pretrained` writes the one form. The other is made
here from that, as transformers 5.24 and PEFT 0.7, 0.10, 0.17 and 0.18 wrote it when they were run.
"""

import json
import shutil
from pathlib import Path

# fields of adapter_config.json by the release of PEFT that began to write them
SINCE_PEFT = {
    "0.10": ("layer_replication", "use_dora", "use_rslora"),
    "0.17": ("corda_config", "eva_config", "exclude_modules", "lora_bias", "qalora_group_size", "target_parameters",
             "trainable_token_indices", "use_qalora"),
    "0.18": ("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "peft_version"),
    "0.21": ("kasa_config", "lora_ga_config", "monteclora_config", "use_bdlora", "velora_config"),
}  # fmt: skip


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def config_of_5(fields: dict) -> dict:
    """config.json: one object for RoPE and its theta, `dtype`, and the tie said."""
    fields = dict(fields)
    scaling = fields.pop("rope_scaling", None) or {"rope_type": "default"}
    dtype = fields.pop("torch_dtype", fields.pop("dtype", None))
    fields["rope_parameters"] = {"rope_theta": fields.pop("rope_theta"), **scaling}
    tied = fields.get("tie_word_embeddings", True)
    return {**fields, "dtype": dtype, "tie_word_embeddings": tied, "transformers_version": "5.24.0"}


def tokenizer_config_of_5(fields: dict) -> dict:
    """tokenizer_config.json: no table of the added tokens, the further special ones as a list, another class."""
    fields = dict(fields)
    further = fields.pop("additional_special_tokens", None)
    for name in ("added_tokens_decoder", "extra_special_tokens"):
        fields.pop(name, None)
    listed = {"extra_special_tokens": further} if further else {}
    ours = {"backend": "tokenizers", "is_local": True, "local_files_only": False}
    return {**fields, **ours, **listed, "tokenizer_class": "TokenizersBackend"}


def generation_config_of_5(fields: dict) -> dict:
    """generation_config.json, with what one that is made of a model's config brings along."""
    more = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}
    return {**fields, **more, "transformers_version": "5.24.0"}


def checkpoint_of_5(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with each file in transformers 5's form; special_tokens_map.json is no more."""
    shutil.copytree(source, folder)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    forms = {
        "config.json": config_of_5,
        "tokenizer_config.json": tokenizer_config_of_5,
        "generation_config.json": generation_config_of_5,
        "tokenizer.json": tokenizer_of_5,
    }
    for file, form in forms.items():
        if (folder / file).is_file():
            (folder / file).write_text(json.dumps(form(read(folder / file)), ensure_ascii=False), encoding="utf-8")
    return folder


def tokenizer_of_5(fields: dict) -> dict:
    """tokenizer.json: a post-processor also where there is nothing to do after."""
    one, other = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    nothing = {"type": "TemplateProcessing", "single": [one], "pair": [one, other], "special_tokens": {}}
    return {**fields, "post_processor": fields["post_processor"] or nothing}


def adapter_config_of(version: str, fields: dict) -> dict:
    """adapter_config.json as a release of PEFT wrote it, "0.7" to "0.18"."""
    later = {name for since, names in SINCE_PEFT.items() if _number(since) > _number(version) for name in names}
    return {name: value for name, value in fields.items() if name not in later}


def _number(version: str) -> int:
    return int(version.split(".")[1])
