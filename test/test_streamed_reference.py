"""transformers layer by layer gives the whole model's logits to the bit, in the memory of a layer or of the head."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT
from reference import make_adapter

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.altered_reference import load_altered_reference
from smollm3_neuron.check.reference import load_reference, reference_generate
from smollm3_neuron.check.streamed_reference import Reference, StreamedModel
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B
from smollm3_neuron.weights.derived import cut_checkpoint

sys.path.append(str(ROOT / "scripts"))
from common import make_checkpoint

GB = 10**9
INPUTS = [
    [(31 * row + 7 * place * place) % 250 for place in range(length)] for row, length in enumerate((1, 3, 17, 40))
]
KEEP = [1, torch.tensor([1]), 17, 8]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KINDS = ("plain", "untied", "biases", "listed", "yarn", "llama3", "window", "head-dim-72", "odd-intermediate-biases")


def assert_equal_to_the_whole(folder, dtype, **altered):
    whole = load_altered_reference(folder, dtype, **altered)
    with torch.no_grad():
        expected = [whole(torch.tensor([ids]), logits_to_keep=kept).logits[0] for ids, kept in zip(INPUTS, KEEP)]
    logits = list(StreamedModel(folder, dtype, **altered).logits(INPUTS, KEEP))
    assert [one.shape for one in logits] == [one.shape for one in expected]
    assert all(torch.equal(one, other) for one, other in zip(logits, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_whole_models_to_the_bit(kind, random_checkpoints):
    for dtype in DTYPES:
        assert_equal_to_the_whole(random_checkpoints[kind], dtype)


@pytest.mark.parametrize("kind", ["plain", "untied"])
def test_so_they_are_with_an_adapter_merged_and_with_8_bit_values(kind, random_checkpoints, tmp_path):
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    adapter = make_adapter(random_checkpoints[kind], tmp_path / "adapter", target_modules=targets)
    settings = Settings(quantized=True, quantization_type="per_channel_symmetric")
    for altered in ({"adapter": adapter}, {"quantized": settings}, {"adapter": adapter, "quantized": settings}):
        for dtype in (torch.float32, torch.bfloat16):
            assert_equal_to_the_whole(random_checkpoints[kind], dtype, **altered)


def test_greedy_answers_take_a_pass_more_for_each_place_where_a_draft_parts(random_checkpoints):
    """What parts in one place is found in two passes by a draft that goes on right, and a second time in one."""
    folder, prompts = random_checkpoints["plain"], INPUTS[1:]
    whole = load_reference(folder)
    expected = [reference_generate(whole, prompt, 12, suppress_tokens=[5]).tokens for prompt in prompts]
    tokens = [list(answer) for answer in expected]
    tokens[0][4], tokens[1][0], tokens[2][11] = (answer[at] + 1 for answer, at in zip(expected, (4, 0, 11)))
    asked = []

    def draft(longer, begun):
        asked.append([len(one) for one in begun])
        return [reference_generate(whole, [*ids, *new], 12, [5]).tokens for ids, new in zip(longer, begun)]

    reference = Reference(folder, torch.float32)
    answers = reference.answers(prompts, tokens, [5], draft)
    assert [answer for answer, _ in answers] == expected
    assert asked == [[5, 1]] and reference.passes == {torch.float32: 2, torch.float64: 0}
    for (answer, logits), prompt in zip(answers, prompts):
        (alone,) = reference.logits(torch.float32, [prompt], [answer])
        assert torch.equal(logits, alone)
    assert [answer for answer, _ in reference.answers(prompts, tokens, [5])] == expected
    assert reference.passes[torch.float32] == 2 + len(prompts) + 1


def test_without_a_draft_the_answers_are_found_too_and_fixed_ones_stay(random_checkpoints):
    folder, prompts = random_checkpoints["plain"], INPUTS[1:]
    expected = [reference_generate(load_reference(folder), prompt, 6).tokens for prompt in prompts]
    reference = Reference(folder, torch.float32)
    answers = reference.answers(prompts, [[0] * 6] * 3, fixed=[1])
    assert [answer for answer, _ in answers] == [expected[0], [0] * 6, expected[2]]
    assert 2 <= reference.passes[torch.float32] <= 7


def test_a_checkpoint_that_is_damaged_is_one_line(random_checkpoints, tmp_path):
    (tmp_path / "config.json").write_bytes((Path(random_checkpoints["plain"]) / "config.json").read_bytes())
    whole = (Path(random_checkpoints["plain"]) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for load in (load_reference, lambda folder: StreamedModel(folder, torch.float32)):
        with pytest.raises(SmolLM3Error, match=r"model.safetensors: not a whole safetensors file .*download it again"):
            load(tmp_path)


# prints seconds, anonymous memory over the imports in bytes, and a digest of all logits of cases like validate.py's
MEASURED = """
import hashlib, json, sys, threading, time, torch
import transformers.models.smollm3.modeling_smollm3
from smollm3_neuron.check.reference import load_reference
from smollm3_neuron.check.streamed_reference import StreamedModel
from bench_sharding import Anonymous

folder, dtype, how = sys.argv[1:]
dtype = getattr(torch, dtype)
lengths = [10] * 12 + [170] * 6 + [1]
new = [32] * 18 + [127]
inputs = [[(7 + 31 * at * at + 17 * row) % 128000 for at in range(length + count - 1)]
          for row, (length, count) in enumerate(zip(lengths, new))]
digest = hashlib.sha256()
began = time.perf_counter()
with torch.no_grad(), Anonymous() as memory:
    if how == "whole":
        model = load_reference(folder, dtype)
        found = [model(torch.tensor([ids]), logits_to_keep=kept).logits[0] for ids, kept in zip(inputs, new)]
    else:
        found = list(StreamedModel(folder, dtype).logits(inputs, new))
seconds = time.perf_counter() - began
for logits in found:
    digest.update(logits.view(torch.uint8).numpy())
print(json.dumps([seconds, memory.peak - memory.first, digest.hexdigest()]))
"""


def measured(folder: Path, dtype: str, how: str) -> tuple[float, int, str]:
    environment = {"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEASURED, folder, dtype, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seconds, peak, digest = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name}, {dtype}, {how}: {seconds:.1f} s, {peak / GB:.2f} GB")
    return seconds, peak, digest


@pytest.mark.slow
def test_the_3bs_shape_takes_3_gb_and_half_as_much_time_again(tmp_path):
    """Memory does not depend on the depth: float64, whose whole model has no room here, is held with 2 layers."""
    whole, part = tmp_path / "3b", tmp_path / "2-layers"
    whole.mkdir()
    make_checkpoint(whole, SMOLLM3_3B)
    cut_checkpoint(whole, 2, part)
    for folder, dtype in ((part, "float64"), (part, "float32"), (whole, "bfloat16"), (whole, "float32")):
        seconds, peak, digest = measured(folder, dtype, "streamed")
        whole_seconds, _, whole_digest = measured(folder, dtype, "whole")
        assert digest == whole_digest and seconds <= 1.5 * whole_seconds and peak <= 3 * GB
