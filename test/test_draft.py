"""A draft beside the model, as far as no device is needed: what is refused, and the shards.

test_speculation.py has what `generate` makes of its graphs, test/emulator/test_draft_on_device.py runs the real ones.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run
from places import ROOT, TINY
from reference import make_checkpoint
from safetensors.torch import load_file

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import DRAFT_TYPES, read_config
from smollm3_neuron.model.draft import check_with_draft, other_added_tokens, read_draft
from smollm3_neuron.weights.shard_writer import Model, shard_bytes, write_shards

COMPILE = ROOT / "scripts/compile.py"


# ---- what a draft may be ----


@pytest.fixture
def draft(tmp_path):
    """A copy of `tiny`, to be changed."""
    return Path(shutil.copytree(TINY, tmp_path / "draft"))


def change(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def renamed_token(folder: Path) -> None:
    """One token of the text is another; the first one that differs is to be named."""
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"] for token in content["added_tokens"]}
    vocabulary = {token: id_ for token, id_ in content["model"]["vocab"].items() if id_ not in added}
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    content["model"]["vocab"] |= {first: vocabulary[second], second: vocabulary[first]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json there; pass the folder of a checkpoint"),
        (lambda folder: change(folder / "config.json", vocab_size=999), "its vocab_size is 999 and the model's 512"),
        (lambda folder: change(folder / "config.json", model_type="qwen3"), "'qwen3', .* 'smollm3' or 'llama'"),
        (
            lambda folder: change(folder / "config.json", use_sliding_window=True, sliding_window=16),
            "it has a sliding_window of 16",
        ),
        (lambda folder: change(folder / "config.json", max_position_embeddings=64), "it has 64 positions and seq_len"),
        (renamed_token, r"token \d+ is '.+' in its tokenizer.json and '.+' in the model's"),
        (lambda folder: change(folder / "tokenizer.json", model=None), "not a tokenizer with a vocabulary"),
    ],
)
def test_drafts_that_do_not_fit(spoil, named, draft):
    read_draft(draft, TINY, 128)
    spoil(draft)
    with pytest.raises(SmolLM3Error, match=f"^[^\n]*{named}[^\n]*$"):
        read_draft(draft, TINY, 128)


def test_added_tokens_may_differ_and_are_told(draft):
    """A Llama's chat has other tokens than SmolLM3's; a file that is missing cannot be compared."""
    content = json.loads((draft / "tokenizer.json").read_text())
    token = content["added_tokens"][0]
    token["content"] = "<|eot_id|>"
    (draft / "tokenizer.json").write_text(json.dumps(content))
    read_draft(draft, TINY, 128)
    assert other_added_tokens(draft, TINY) == [token["id"]] and other_added_tokens(TINY, TINY) == []
    (draft / "tokenizer.json").unlink()
    read_draft(draft, TINY, 128)
    assert other_added_tokens(draft, TINY) == []


def test_a_llama_is_read_as_a_model_without_nope_layers(draft):
    fields = json.loads((draft / "config.json").read_text())
    for name in ("no_rope_layers", "no_rope_layer_interval", "layer_types", "tie_word_embeddings"):
        fields.pop(name, None)
    (draft / "config.json").write_text(json.dumps({**fields, "model_type": "llama"}))
    config = read_config(draft, DRAFT_TYPES)
    assert config.no_rope_layers == [1] * config.num_hidden_layers
    assert not config.tie_word_embeddings  # transformers' default of a Llama, and not of a SmolLM3
    with pytest.raises(SmolLM3Error, match="model_type is 'llama', this package runs 'smollm3' and no other"):
        read_config(draft)


def test_a_config_without_its_draft():
    neuron_config = SimpleNamespace(enable_fused_speculation=True)
    with pytest.raises(SmolLM3Error, match="without a fused_spec_config, which names the draft"):
        check_with_draft(SimpleNamespace(neuron_config=neuron_config, fused_spec_config=None))
    fused = SimpleNamespace(draft_config=SimpleNamespace(vocab_size=5), draft_model_path="small")
    config = SimpleNamespace(neuron_config=neuron_config, fused_spec_config=fused, vocab_size=6)
    with pytest.raises(SmolLM3Error, match="^draft small: its vocab_size is 5 and the model's 6"):
        check_with_draft(config)
    neuron_config.enable_fused_speculation = False
    check_with_draft(config)


@pytest.mark.parametrize(
    "args, named",
    [
        ([], "--draft guesses what a step verifies: give --speculation-length"),
        (["--speculation-length", 4], "the CPU runtime has no such graph, leave the draft out"),
        (["--speculation-length", 64], "speculation_length is 64, allowed is 0"),
        (["--speculation-length", 4, "--quantized"], "enable_fused_speculation is on with quantized"),
        (["--speculation-length", 4, "--max-context-length", 4], "speculation_length is 4, as long as a context"),
        (
            ["--speculation-length", 4, "--on-device-sampling-config", '{"dynamic": true}'],
            "on_device_sampling_config has dynamic, but a device that verifies tokens is greedy",
        ),
    ],
)
def test_compile_refuses_in_one_line(args, named, tmp_path):
    shape = ["--model", "tiny", "--tp", 1, "--seq-len", 64, "--dtype", "float32", "--device", "cpu"]
    done = run(COMPILE, *shape, "--draft", TINY, *args, "--output", tmp_path / "artifact")
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "artifact").exists()


# ---- its weights ----


@pytest.mark.parametrize("fused_qkv", [False, True])
def test_a_rank_holds_the_weights_of_both(fused_qkv, random_checkpoints, tmp_path):
    """Each tensor as alone, with the library's prefix before its name, and as many bytes as were counted before."""
    small = make_checkpoint(tmp_path / "small", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    folders = {"target_model": random_checkpoints["plain"], "draft_model": small}
    neuron_config = SimpleNamespace(
        **{name: getattr(Settings(), name) for name in Settings.__dataclass_fields__ if name != "torch_dtype"}
    )
    neuron_config.torch_dtype, neuron_config.fused_qkv = torch.float32, fused_qkv
    models = {name: Model(folder, read_config(folder), neuron_config) for name, folder in folders.items()}
    for name, model in models.items():
        write_shards(model.folder, model.config, neuron_config, tmp_path / name)
    model, draft = models["target_model"], models["draft_model"]
    written = []
    write_shards(model.folder, model.config, neuron_config, tmp_path / "both", written.append, draft=draft)
    headers = 0
    for rank in range(2):
        file = f"tp{rank}_sharded_checkpoint.safetensors"
        alone = {f"{name}.{key}": t for name in models for key, t in load_file(tmp_path / name / file).items()}
        both = load_file(tmp_path / "both" / file)
        assert both.keys() == alone.keys() and all(torch.equal(both[key], alone[key]) for key in alone)
        headers += 8 + int.from_bytes((tmp_path / "both" / file).read_bytes()[:8], "little")
    assert sum(written) - headers == shard_bytes(model.config, neuron_config, draft)
