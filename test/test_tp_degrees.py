"""Every TP degree gives transformers' tokens: `tiny` and other head counts on the CPU runtime, in float32."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from reference import RANDOM, make_checkpoint
from safetensors.torch import load_file, save_file

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

TP_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
NEW_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


def matches(folder: Path, prompts: list[list[int]], barred: list[int], settings: dict, output: Path) -> list[list[int]]:
    """The tokens, if they are transformers'; else none."""
    from smollm3_neuron.check.reference import load_reference, reference_generate
    from smollm3_neuron.generate.generation import generate

    model = compile_artifact(folder, output, Settings(seq_len=64, torch_dtype="float32", **settings), "cpu").load()
    results = generate(model, prompts, NEW_TOKENS, suppress_tokens=barred)
    reference = load_reference(folder)
    expected = [reference_generate(reference, prompt, NEW_TOKENS, barred).tokens for prompt in prompts]
    return expected if len(expected) > 1 and [result.tokens for result in results] == expected else []


@pytest.fixture(scope="module")
def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    of_folder = json.loads((tiny_folder() / "prompts.json").read_text())
    texts = [*of_folder["published"][:3], *(entry["prompt"] for entry in of_folder["held_out"][:3])]
    return tokenizer(texts)["input_ids"], [tokenizer.eos_token_id]


# each degree once; the other half of the matrix is slow
CELLS = [
    pytest.param(
        tp, fused, marks=[] if fused == bool(i % 2) else pytest.mark.slow, id=f"tp{tp}-{'fused' if fused else 'split'}"
    )
    for i, tp in enumerate(TP_DEGREES)
    for fused in (False, True)
]


@pytest.mark.parametrize("tp_degree, fused_qkv", CELLS)
def test_tiny(tp_degree, fused_qkv, prompts, tmp_path):
    settings = {"tp_degree": tp_degree, "fused_qkv": fused_qkv, "batch_size": 3}
    assert matches(tiny_folder(), *prompts, settings, tmp_path / "tiny")


@pytest.mark.parametrize("name, tp_degree", [("9-heads-3-kv", 2), ("12-heads-4-kv", 6), ("odd-vocabulary", 5)])
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_other_heads(name, tp_degree, fused_qkv, tmp_path):
    folder = Path(make_checkpoint(tmp_path / "checkpoint", **RANDOM[name]))
    settings = {"tp_degree": tp_degree, "fused_qkv": fused_qkv, "batch_size": 2}
    assert matches(folder, [[7, 3, 90], [5, 9, 33, 121, 200]], [], settings, tmp_path / "artifact")
    # an artifact of a converted degree still tells the checkpoint's KV heads
    config = json.loads((tmp_path / "artifact/neuron_config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"]
    assert config["source_num_key_value_heads"] == RANDOM[name].get("num_key_value_heads", 4)


@pytest.mark.parametrize(
    "name",
    ["yarn", "linear", "llama3", "biases", "head-dim", "head-dim-72", "untied", "all-nope", "nope-first", "interval-2"],
)
def test_other_checkpoints(name, tmp_path):
    folder = Path(make_checkpoint(tmp_path / "checkpoint", **RANDOM[name]))
    settings = {"tp_degree": 2, "fused_qkv": name in ("biases", "yarn"), "batch_size": 3}
    prompts = [[7, 3, 90], [5, 9, 33, 121, 200], [11] * 37]
    assert matches(folder, prompts, [], settings, tmp_path / "artifact")


def test_more_vocabulary_than_the_tokenizer_has(tmp_path, prompts):
    """The fourth of five rows more is the one that the model chooses, and decodes to nothing."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny_folder(), tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    (answer,) = AutoTokenizer.from_pretrained(folder)("1", add_special_tokens=False)["input_ids"]
    more = embeddings[answer] * torch.tensor([[0.5], [0], [-1], [2], [0]])
    weights["model.embed_tokens.weight"] = torch.cat([embeddings, more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(embeddings) + 5}))
    texts, barred = prompts
    tokens = matches(folder, texts, barred, {"tp_degree": 2, "batch_size": 3}, tmp_path / "artifact")
    assert (
        len(embeddings) + 3 in tokens[0] and AutoTokenizer.from_pretrained(folder).decode([len(embeddings) + 3]) == ""
    )


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_the_schedule_inverted_gives_other_tokens(tp_degree, prompts, tmp_path):
    """What must fail does: `tiny` with RoPE where it has none and none where it has it."""
    from smollm3_neuron.check.reference import load_reference, reference_generate, token_match
    from smollm3_neuron.generate.generation import generate

    folder = shutil.copytree(tiny_folder(), tmp_path / "inverted")
    config = json.loads((folder / "config.json").read_text())
    config["no_rope_layers"] = [1 - flag for flag in config["no_rope_layers"]]
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(tp_degree=tp_degree, seq_len=64, torch_dtype="float32")
    model = compile_artifact(folder, tmp_path / "artifact", settings, "cpu").load()
    reference, (texts, barred) = load_reference(tiny_folder()), prompts
    for prompt, result in zip(texts, generate(model, texts, NEW_TOKENS, suppress_tokens=barred)):
        expected = reference_generate(reference, prompt, NEW_TOKENS, barred).tokens
        assert token_match(result.tokens, expected) < 0.9 and result.tokens != expected
