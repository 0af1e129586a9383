"""The first wrong layer from models of the first layers alone, and the checkpoints that these are compiled from."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_faults import copy, flip, replace, swap, tokens, weight
from places import ROOT, TINY
from reference import make_checkpoint
from uncompiled import load

from smollm3_neuron.check.bisection import first_wrong_layer
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.checkpoint import check_checkpoint, checkpoint_files
from smollm3_neuron.weights.derived import cut_checkpoint

LAYERS = 30
DEEP = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4)
FAULTS = {
    "flipped NoPE flag": lambda layer: (flip(layer), None),
    "swapped K and V": lambda layer: (
        None, swap((weight(layer, "self_attn.k_proj"), weight(layer, "self_attn.v_proj")))
    ),
    "scaled norm": lambda layer: (None, replace(weight(layer, "input_layernorm"), lambda w: w * 1.1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return Path(make_checkpoint(tmp_path_factory.mktemp("deep") / "deep", **DEEP, num_hidden_layers=LAYERS))


@pytest.mark.parametrize("wrong", range(LAYERS))
def test_any_layer_is_found_in_6_models_at_most(wrong):
    asked = []
    found = first_wrong_layer(LAYERS, lambda count: asked.append(count) or count > wrong)
    assert found == wrong and len(asked) <= 6 and len(set(asked)) == len(asked)


def test_where_no_part_is_wrong_no_layer_is():
    assert first_wrong_layer(LAYERS, lambda count: False) is None


QUICK = 17, "swapped K and V"  # the others are slow
CELLS = [
    pytest.param(layer, fault, marks=[] if (layer, fault) == QUICK else pytest.mark.slow)
    for layer in (0, 3, 17, 29)
    for fault in FAULTS
]


@pytest.mark.parametrize("layer, fault", CELLS)
def test_a_fault_is_found_by_judging_the_first_layers(layer, fault, deep, tmp_path):
    from smollm3_neuron.check.validation import WRONG, Case, Reference, validate

    folder = copy(deep, tmp_path / "wrong", *FAULTS[fault](layer))
    cases = [Case("prompt", "", tokens(11, 1)), Case("prompt", "", tokens(20, 3))]

    def is_wrong(count: int) -> bool:
        cut = cut_checkpoint(folder, count, tmp_path / f"cut-{count}")
        app, _ = load(cut, tmp_path / f"weights-{count}", batch_size=2)
        reference = Reference(cut_checkpoint(deep, count, tmp_path / f"reference-{count}"), torch.float32)
        return validate(app, reference, cases, 1).verdict == WRONG

    assert first_wrong_layer(LAYERS, is_wrong) == layer


def test_a_cut_checkpoint_is_one(deep, tmp_path):
    cut = cut_checkpoint(deep, 7, tmp_path / "cut")
    config, whole = read_config(cut), read_config(deep)
    assert config.num_hidden_layers == 7 and config.no_rope_layers == whole.no_rope_layers[:7]
    assert len(check_checkpoint(cut, config)) == 7 * 9 + 2 < len(checkpoint_files(deep))
    assert cut_checkpoint(deep, 7, tmp_path / "cut") == cut
    with pytest.raises(SmolLM3Error, match="something else is there"):
        cut_checkpoint(deep, 8, tmp_path / "cut")
    for count in (0, 31):
        with pytest.raises(SmolLM3Error, match=f"num_layers is {count}, allowed is a whole number from 1 to 30"):
            cut_checkpoint(deep, count, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_command_names_the_layer(tmp_path):
    """Also where the artifact's files are wrong and its checkpoint is not."""

    def run(script, *args):
        command = [sys.executable, ROOT / f"scripts/{script}.py", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=900)

    wrong = shutil.copytree(TINY, tmp_path / "wrong")
    (wrong / "config.json").write_text(json.dumps(_flipped(json.loads((TINY / "config.json").read_text()), 5)))
    shape = ["--tp", 2, "--seq-len", 64, "--dtype", "float32", "--batch-size", 4, "--output", tmp_path / "artifact"]
    assert run("compile", "--model", wrong, *shape).returncode == 0
    done = run("inspect_layers", tmp_path / "artifact", "--bisect", "--model", TINY, "--json", tmp_path / "found.json")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "layer 5 is the first wrong one"
    assert json.loads((tmp_path / "found.json").read_text())["layer"] == 5
    done = run("inspect_layers", tmp_path / "artifact", "--bisect")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "nothing is wrong", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "found.json", "wrong"]
    done = run("compile", "--model", "tiny", "--num-layers", 2, *shape[:-1], tmp_path / "cut")
    assert done.returncode == 0 and (tmp_path / "cut-checkpoint/config.json").is_file(), done.stderr
    done = run("validate", tmp_path / "cut", "--max-new-tokens", 2)
    assert done.returncode == 0 and "verdict: identical" in done.stdout, done.stdout + done.stderr


def _flipped(config, layer):
    config["no_rope_layers"][layer] = 1 - config["no_rope_layers"][layer]
    return config
