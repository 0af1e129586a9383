# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint, in the form that an artifact carries and transformers 4 and 5 both load. No torch.

transformers 5 names a class that 4 has not and writes its further special tokens as a list; a checkpoint whose
config.json names the model may leave the tokenizer's class out. The artifact has no config.json, so its
tokenizer_config.json says it all.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from ..generate import chat
from ..model.json_files import read_json

GENERATION_CONFIG = "generation_config.json"
CONFIG = "tokenizer_config.json"
TEMPLATES = "additional_chat_templates"  # a folder
TOKENIZER_FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
)
SMOLLM3S = "PreTrainedTokenizerFast"  # what transformers takes for this model where no class is named
OF_ANOTHER_VERSION = ("TokenizersBackend", "TokenizersBackendFast")


def write_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Writes the tokenizer's files, generation_config.json and vLLM's template into `folder`; loads and renders once.

    A checkpoint without tokenizer.json gives what there is. Raises SmolLM3Error for a file that is no JSON, a tokenizer
    that does not load, and a chat template that does not render.
    """
    for file in TOKENIZER_FILES:
        if _is_file(checkpoint / file):
            if file.endswith(".json"):
                read_object(checkpoint / file)
            shutil.copyfile(checkpoint / file, folder / file)
    if (checkpoint / TEMPLATES).is_dir():
        shutil.copytree(checkpoint / TEMPLATES, folder / TEMPLATES)
    if not (folder / "tokenizer.json").is_file():
        return
    given = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if (fields := tokenizer_fields(given)) != given:
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(folder, named=checkpoint)
    if tokenizer.chat_template is not None:
        try:
            chat.render(tokenizer, [{"role": "user", "content": "1+1="}])
        except SmolLM3Error as error:
            raise SmolLM3Error(f"{checkpoint}: its chat template does not render ({error})") from None
        if template := chat.vllm_template(tokenizer):
            (folder / chat.VLLM_TEMPLATE).write_text(template, encoding="utf-8")


def check_generation_config(checkpoint: Path, vocab_size: int) -> None:
    """Raises SmolLM3Error for a generation_config.json of the checkpoint that `generate` would refuse later."""
    from ..generate import generation

    path = checkpoint / GENERATION_CONFIG
    if _is_file(path):
        try:
            generation.check_generation_config(read_object(path), vocab_size)
        except SmolLM3Error as error:
            line = str(error)
            raise SmolLM3Error(line if line.startswith(str(path)) else f"{path}: {line}") from None


def tokenizer_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a tokenizer_config.json as transformers 4 and 5 both read them."""
    fields = dict(fields)
    if fields.get("tokenizer_class") in (None, *OF_ANOTHER_VERSION):
        fields["tokenizer_class"] = SMOLLM3S
    further = fields.get("extra_special_tokens")
    if isinstance(further, list):
        del fields["extra_special_tokens"]
        known = fields.get("additional_special_tokens") or []
        fields["additional_special_tokens"] = [*known, *(token for token in further if token not in known)]
    return fields


def load_tokenizer(folder: Path, named: Path | None = None):
    """Returns the tokenizer in `folder`; code that comes with it does not run.

    Raises SmolLM3Error, which says `named`, where transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer("1+1=")["input_ids"])  # some settings are read only now
        return tokenizer
    except Exception as error:  # of many kinds: tokenizers raises Exception itself
        reason = " ".join(str(error).replace(str(folder), str(named or folder)).split())
        raise SmolLM3Error(
            f"{named or folder}: its tokenizer does not load ({type(error).__name__}: {reason[:300]}); take the "
            "tokenizer's files from the model that it was trained from"
        ) from None


def _is_file(path: Path) -> bool:
    """Returns whether the file is there. Raises SmolLM3Error for a folder or a broken link of its name."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        what = "a folder" if path.is_dir() else "a link to nothing" if path.is_symlink() else "no file"
        raise SmolLM3Error(f"{path}: {what}, a file is expected; download it again, or remove it")
    return False


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises SmolLM3Error where it holds none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise SmolLM3Error(f"{path}: a JSON object is expected, found {type(value).__name__}; download it again")
    return value
