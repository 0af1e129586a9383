"""Whatever a file of a checkpoint, an adapter or an artifact holds, it is taken, or refused by one line: seeded."""

import contextlib
import json
import random
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from manifests import rewrite
from models import Random
from mutations import Outcomes, cases, changed, check, damaged, of, written
from places import ROOT
from safetensors.torch import save_file

from smollm3_neuron.artifact import build, manifest, tokenizer
from smollm3_neuron.artifact import folder as artifact_folder
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.generate.sampling import Sampling
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config, resolve_config, token_ids
from smollm3_neuron.vllm.serving import serve_command
from smollm3_neuron.weights.adapter import CONFIG, WEIGHTS, Adapter, _check_served
from smollm3_neuron.weights.checkpoint import check_checkpoint, expected_shapes
from smollm3_neuron.weights.files import INDEX_FILE, SINGLE_FILE
from smollm3_neuron.weights.shard_writer import write_shards

SETTINGS = Settings(tp_degree=1, seq_len=32, torch_dtype="float32")
SHAPE = dict(
    model_type="smollm3", hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=11, max_position_embeddings=32, rms_norm_eps=1e-6, hidden_act="silu",
    rope_theta=1e4,
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module", autouse=True)
def quiet():
    import logging
    import warnings

    ensure_neuronx()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


class Fuzz:
    """Mutations of one file: `content(rng)` draws one, `use(content)` does what the commands do with it."""

    name = ""

    def __init__(self, scratch):
        self.scratch = scratch

    def run(self, count: int, seed: str) -> Outcomes:
        outcomes = Outcomes(self.name)
        for rng in cases(f"{self.name} {seed}", count):
            content = self.content(rng)
            if rng.random() < 0.15:
                content = damaged(rng, content)
            outcomes.of(partial(self.use, content), content[:1500])
        return outcomes

    def content(self, rng: random.Random) -> bytes:
        raise NotImplementedError

    def use(self, content: bytes) -> None:
        raise NotImplementedError


def later(work, *arguments, **keywords):
    """What the product took must not be refused when it is used."""
    try:
        return work(*arguments, **keywords)
    except SmolLM3Error as error:
        raise AssertionError(f"taken, and refused later: {error}") from None


class GenerationConfig(Fuzz):
    """Checked when a checkpoint is compiled; read when its artifact generates."""

    name = "generation_config.json"
    vocab_size = 11
    pools = {
        "temperature": of(0.6, 1, 1e-45, 1e-3, 0, 5, 1e6, None), "top_k": of(5, 0, 1, 100, None, "5"),
        "top_p": of(0.9, 1, 1.0, 0, None), "do_sample": of(True, False, None, 1), "min_p": of(0.1, 0, 1, 2),
        "repetition_penalty": of(1.2, 1, 0, -1.0), "no_repeat_ngram_size": of(0, 1, 2, -1, 1.5),
        "suppress_tokens": of([3], [], [11], None, list(range(11)), [[3]]),
        "begin_suppress_tokens": of([1], [12], [-1]), "stop_strings": of("a", ["a"], [], [""], 5),
        "bad_words_ids": of([[1]], [[1, 2]], [], [[]], [[11]]), "eos_token_id": of(3, [3, 4], [], 50, None, -1),
        "sequence_bias": of([[[1], 2.0]], {}, [[[1, 2], -1.0]], [[[11], 1.0]]),
        "min_length": of(0, 3, -1), "min_new_tokens": of(0, 2, -1, None), "num_beams": of(1, 4, None),
        "typical_p": of(0.5, 1, 2), "epsilon_cutoff": of(1e-3, 0, 1), "eta_cutoff": of(1e-3, 2),
        "exponential_decay_length_penalty": of([1, 1.5], [1], "x", [1, 0]), "forced_bos_token_id": of(1, 50, "x"),
        "forced_eos_token_id": of(1, [1, 2], 50), "encoder_repetition_penalty": of(1.0, 1.5),
        "max_new_tokens": of(5, "x"), "cache_implementation": of("static", 5), "renormalize_logits": of(True, 5),
        "remove_invalid_values": of(True), "guidance_scale": of(1, 2.0, None), "watermarking_config": of({}, None),
    }  # fmt: skip
    base = {
        "bos_token_id": 0,
        "do_sample": True,
        "eos_token_id": 3,
        "pad_token_id": 1,
        "temperature": 0.6,
        "top_p": 0.95,
    }

    def content(self, rng):
        return written(changed(rng, self.base, tuple(self.pools), self.pools))

    def use(self, content):
        from generate import sampling_parameters

        (self.scratch / self.name).write_bytes(content)
        tokenizer.check_generation_config(self.scratch, self.vocab_size)
        fields = later(tokenizer.read_object, self.scratch / self.name)
        for is_chat in (True, False):
            args = SimpleNamespace(chat=is_chat, temperature=None, top_k=None, top_p=None)
            asked = SimpleNamespace(settings=SETTINGS, generation_config=lambda: dict(fields))
            sampling = later(Sampling.of, sampling_parameters(args, asked))
            eos = later(token_ids, "eos_token_id", fields.get("eos_token_id"))
            if not sampling.further.get("stop_strings"):
                later(generate, Random(self.vocab_size), [[1, 2]], 4, eos_token_ids=eos, sampling=sampling)


class TokenizerConfig(Fuzz):
    """Loaded, and its template rendered, when a checkpoint is compiled; read from the artifact when it generates."""

    name = "tokenizer_config.json"
    pools = {
        "tokenizer_class": of("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "Foo", "int", None),
        "chat_template": of("{{ messages[0].content }}", "{{ 1 / 0 }}", "{% x", 5, [], {"default": "a"}, None),
        "extra_special_tokens": of({}, ["<a>"], {"a": "<a>"}, [5], None, "x"),
        "additional_special_tokens": of(["<a>"], [5], None, [{"content": "<a>"}], "x"),
        "auto_map": of({"AutoTokenizer": ["mod.Tok", None]}, {"AutoTokenizer": "mod.Tok"}, 5, []),
        "model_max_length": of(10, -1, 1e30, "x", None), "pad_token": of("x", None, 5, {"content": "x"}, ["x"]),
        "eos_token": of("x", None, {"__type": "AddedToken", "content": "x"}, {"__type": "x"}),
        "added_tokens_decoder": of({}, {"0": {}}, {"x": {"content": "y"}}, {"-1": {"content": "y"}}, None, []),
        "padding_side": of("left", "right", "x", 5), "truncation_side": of("left", 5),
        "clean_up_tokenization_spaces": of(True, "x", None), "add_bos_token": of(True, "x"),
        "model_input_names": of(["input_ids"], "x", 5, []), "name_or_path": of("x", 5), "processor_class": of("x", 5),
        "tokenizer_file": of("x", "/etc/hostname", 5), "trust_remote_code": of(True), "legacy": of(True, 5),
        "from_slow": of(True), "split_special_tokens": of(True), "vocab_file": of("x", 5),
        "fast_tokenizer_files": of(["x"], 5, ["tokenizer.9.json"]),
        "use_fast": of(False), "add_prefix_space": of(True, 5), "special_tokens_map_file": of("x"),
        "tokenizer_object": of(5), "gguf_file": of("x"), "_commit_hash": of("x", 5), "cache_dir": of("x", 5),
    }  # fmt: skip

    def __init__(self, scratch):
        super().__init__(scratch)
        self.source = scratch / "checkpoint"
        self.source.mkdir()
        for file in tokenizer.TOKENIZER_FILES:
            if (tiny_folder() / file).is_file():
                shutil.copyfile(tiny_folder() / file, self.source / file)
        self.base = json.loads((self.source / self.name).read_text())

    def content(self, rng):
        return written(changed(rng, self.base, tuple(self.pools), self.pools))

    def use(self, content):
        (self.source / self.name).write_bytes(content)
        output = self.scratch / "output"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        tokenizer.write_tokenizer(self.source, output)
        loaded = later(tokenizer.load_tokenizer, output)
        tokens = later(chat.encode, loaded, ["1+1="])
        loaded.decode(tokens[0], skip_special_tokens=True)
        if loaded.chat_template is not None:
            later(chat.render, loaded, MESSAGES)


class AdapterConfig(Fuzz):
    """Read when an adapter is merged, or is to be served."""

    name = CONFIG
    base = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {},
        "target_modules": ["q_proj", "k_proj"], "use_rslora": False, "init_lora_weights": True, "bias": "none",
        "modules_to_save": None, "task_type": "CAUSAL_LM", "inference_mode": True,
    }  # fmt: skip
    pools = {
        "lora_alpha": of(1, 2.5, 0, -1, 10**400, None), "r": of(2, 2.0, 0, 3, None, 2**40),
        "use_rslora": of(True, 1, "x"), "peft_type": of("IA3", None, 5),
        "rank_pattern": of({".*": 2}, {"q_proj": 3}, {"(": 2}, {"q_proj": "x"}, [], None, {"": 2}, {"(a+)+$": 2}),
        "alpha_pattern": of({".*": 2}, {"k_proj": None}, {"q_proj": 10**400}, 5, "x", {"q": {}}),
        "use_dora": of(True), "init_lora_weights": of("pissa", "gaussian", [], {}),
        "target_modules": of("all-linear", None, 5, ["x"], {}), "megatron_config": of({}, {"a": 1}),
        "layers_to_transform": of([0], 5), "lora_bias": of(True), "modules_to_save": of(["x"], 5),
    }  # fmt: skip

    def __init__(self, scratch):
        super().__init__(scratch)
        self.config = resolve_config(SHAPE)
        prefix = "base_model.model.model.layers.0.self_attn"
        tensors = {}
        for projection, rows in (("q_proj", 8), ("k_proj", 4)):
            tensors[f"{prefix}.{projection}.lora_A.weight"] = torch.randn(2, 8)
            tensors[f"{prefix}.{projection}.lora_B.weight"] = torch.randn(rows, 2)
        save_file(tensors, scratch / WEIGHTS)

    def content(self, rng):
        return written(changed(rng, self.base, tuple(self.pools), self.pools))

    def use(self, content):
        (self.scratch / CONFIG).write_bytes(content)
        adapter = Adapter(self.scratch, self.config)
        for name in adapter.roles:
            shape = expected_shapes(self.config)[name]
            assert later(adapter.merged, name, torch.zeros(shape), torch.float32)[:].isfinite().all()
        _check_served(adapter, 16)


class Manifest(Fuzz):
    """Read by every command: most here with the digest that whoever makes an artifact writes."""

    name = manifest.MANIFEST

    def __init__(self, scratch):
        super().__init__(scratch)
        self.path = build.compile_artifact(tiny_folder(), scratch / "tiny", SETTINGS, "cpu").path
        self.file = self.path / self.name
        rewrite(self.path)
        self.base = json.loads(self.file.read_text())
        self.made_of = build._made_of(tiny_folder(), SETTINGS, "cpu", "tiny", None, None, {}, None)

    def content(self, rng):
        of_model = ("model", "folder", "adapter", "draft")
        keys = ("settings", *of_model, "files", "versions", "place", "format", "seconds", "header")
        value = changed(rng, self.base, keys)
        if isinstance(value, dict) and rng.random() < 0.9:
            signature = value.pop("signature", None)
            value.pop("sha256", None)
            value = {**value, "sha256": manifest.manifest_digest(value), "signature": signature}
        return written(value)

    def use(self, content):
        self.file.write_bytes(content)
        with contextlib.suppress(SmolLM3Error):
            manifest.check_replaceable(self.path)
        with contextlib.suppress(SmolLM3Error):
            build._standing(self.path, "cpu", self.made_of, True)
        build._standing(self.path, "cpu", self.made_of, False)
        artifact = artifact_folder.open_artifact(self.path, "cpu")
        artifact.generation_config(), artifact.graph_files(), artifact.adapter, artifact.exported_because
        serve_command(artifact)
        later(artifact.eos_token_ids)
        assert artifact.manifest["seconds"]["compile"] + 1 and artifact.manifest["model"]["name"] + ""
        artifact.settings.checked(read_config(tiny_folder()))


class Header(Fuzz):
    """Of a safetensors file, in front of its tensors."""

    name = "safetensors headers"

    def __init__(self, scratch):
        super().__init__(scratch)
        self.config = resolve_config(SHAPE)
        self.neuron_config = build_config_of(scratch)
        shapes = expected_shapes(self.config)
        save_file(
            {
                name if name == "lm_head.weight" else f"model.{name}": torch.randn(shape)
                for name, shape in shapes.items()
            },
            scratch / SINGLE_FILE,
            {"format": "pt"},
        )
        content = (scratch / SINGLE_FILE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        self.base, self.data = json.loads(content[8:end]), content[end:]

    def content(self, rng):
        header = written(changed(rng, self.base, ("__metadata__", "model.x", "dtype", "shape", "data_offsets")))
        size = rng.choice((0, 0, 0, 0, 0, 1, 8, 2**40, 2**63)) + len(header)
        return size.to_bytes(8, "little") + header + self.data

    def use(self, content):
        (self.scratch / SINGLE_FILE).write_bytes(content)
        check_checkpoint(self.scratch, self.config)
        write_shards(self.scratch, self.config, self.neuron_config, self.scratch / "weights")


class Index(Header):
    """The file that says which file holds which tensor."""

    name = INDEX_FILE

    def __init__(self, scratch):
        super().__init__(scratch)
        names = [name for name in self.base if name != "__metadata__"]
        shutil.copyfile(scratch / SINGLE_FILE, scratch / "other.safetensors")
        files = [SINGLE_FILE, "other.safetensors"]
        self.index = {"metadata": {"total_size": 1}, "weight_map": {n: files[i % 2] for i, n in enumerate(names)}}

    def content(self, rng):
        pools = {"weight_map": of(None, [], {}, 5, "x", {"a": None}, {"a": 5}, {"a": ".."}, {"a": "config.json"})}
        return written(changed(rng, self.index, ("weight_map", "x"), pools if rng.random() < 0.2 else None))

    def use(self, content):
        (self.scratch / INDEX_FILE).write_bytes(content)
        check_checkpoint(self.scratch, self.config)
        write_shards(self.scratch, self.config, self.neuron_config, self.scratch / "weights")


def build_config_of(scratch):
    (scratch / "config.json").write_text(json.dumps(SHAPE))
    return build.build_config(scratch, SETTINGS).neuron_config


FUZZES = {fuzz.name: fuzz for fuzz in (GenerationConfig, TokenizerConfig, AdapterConfig, Manifest, Header, Index)}
ORDINARY = {"tokenizer_config.json": 60, "artifact.json": 150}


@pytest.fixture
def fuzz(request, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")
    return FUZZES[request.param](tmp_path)


@pytest.mark.parametrize("fuzz", FUZZES, indirect=True)
def test_any_content_is_taken_or_one_line(fuzz, capsys):
    check(fuzz.run(ORDINARY.get(fuzz.name, 400), "ordinary"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", FUZZES, indirect=True)
def test_any_of_5000_contents_is_taken_or_one_line(fuzz, capsys):
    check(fuzz.run(5000, "slow"), capsys)
