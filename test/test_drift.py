"""The mean error in 16 bits: what it finds that the largest error does not, and that no right model is called wrong.

With -m slow all seeded faults and 200 runs of right models, on `tiny` and on `tiny` with its layers four times.
"""

import json
import random
from collections import Counter
from pathlib import Path

import checkpoint_faults
import pytest
import torch
from checkpoint_faults import BASES, FAULTS, copy, flip
from places import TINY
from transformers import AutoTokenizer
from uncompiled import load

SEQ_LEN, NEW_TOKENS = 160, 32
# in bfloat16 what these change is less than rounding, or rounded away; of more layers each one's part is smaller
ON_TINY = {"theta 1% off", "down projection 1% larger", "one weight changed", "embedding scaled"}
NOT_FOUND = {"tiny": ON_TINY, "widened": ON_TINY | {"norms of two layers swapped"}}
RUNS, CASES = 10, 21  # of each setting, and how many cases of all in each
RIGHT = [
    *({"tp_degree": tp, "fused_qkv": fused} for tp in (1, 2, 4, 8) for fused in (False, True)),
    {"tp_degree": 3},
    {"tp_degree": 2, "enable_bucketing": True, "context_encoding_buckets": [32, 64, SEQ_LEN],
     "token_generation_buckets": [40, SEQ_LEN]},
]  # fmt: skip


def widened(folder: Path, out: Path, times: int = 4) -> Path:
    """A checkpoint with all layers `times` times in a row, each of which adds that part of what it added before."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]

    def of_config(config):
        config["num_hidden_layers"] *= times
        config["no_rope_layers"] *= times
        config["layer_types"] *= times

    def of_weights(weights):
        for layer in range(layers):
            begin = f"model.layers.{layer}."
            for name in [name for name in weights if name.startswith(begin)]:
                tensor, rest = weights[name], name.removeprefix(begin)
                tensor = tensor / times if "o_proj" in name or "down_proj" in name else tensor
                names = [f"model.layers.{layer + layers * time}.{rest}" for time in range(times)]
                weights.update({new: tensor.clone() for new in names})

    return copy(folder, out, of_config, of_weights)


def in_bfloat16(weights):
    weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})


def base_of(folder: Path, name: str, out: Path) -> Path:
    """`folder` as one of BASES, which brings weights of its own where `tiny` has none; all of it in bfloat16."""
    generator = torch.Generator().manual_seed(5)

    def of_config(config):
        config.update(BASES[name])
        if name == "window":
            del config["layer_types"]

    def of_weights(weights):
        if name == "biases":
            for weight in [one for one in weights if "_proj." in one]:
                bias = torch.randn(len(weights[weight]), generator=generator) * 0.1
                weights[weight.replace("weight", "bias")] = bias
        if name == "untied":
            tied = weights["model.embed_tokens.weight"].float()
            weights["lm_head.weight"] = tied + torch.randn(tied.shape, generator=generator) * 0.005
        in_bfloat16(weights)

    return copy(folder, out, of_config, of_weights)


@pytest.fixture(scope="module")
def cases():
    """All of `tiny`: published and held-out prompts, chats, and a text."""
    from smollm3_neuron.check.validation import make_cases, prompts_and_text

    return make_cases(AutoTokenizer.from_pretrained(TINY), *prompts_and_text(TINY), SEQ_LEN, SEQ_LEN)[0]


@pytest.fixture(scope="module")
def judge(cases, tmp_path_factory):
    """judge(checkpoint, base, fault or None, cases, new tokens, settings) -> Report, in bfloat16"""
    from smollm3_neuron.check.validation import Reference, validate

    folders, references = {"tiny": TINY}, {}

    def get(checkpoint, base, fault=None, chosen=cases, new_tokens=NEW_TOKENS, **settings):
        if checkpoint not in folders:
            folders[checkpoint] = widened(TINY, tmp_path_factory.mktemp("checkpoint") / "widened")
        if (checkpoint, base) not in references:
            folder = base_of(folders[checkpoint], base, tmp_path_factory.mktemp("base") / base)
            references[checkpoint, base] = folder, Reference(folder, torch.bfloat16)
        folder, reference = references[checkpoint, base]
        scratch = tmp_path_factory.mktemp("judged")
        if fault:
            change_config, change_weights = fault
            both = [change for change in (change_weights, in_bfloat16) if change]
            folder = copy(folder, scratch / "copy", change_config, lambda weights: [change(weights) for change in both])
        app, _ = load(folder, scratch / "weights", "bfloat16", SEQ_LEN, **{"batch_size": 8, **settings})
        return validate(app, reference, chosen, new_tokens)

    return get


def test_a_layer_whose_rope_is_wrong_is_found_below_the_largest_error(judge, cases):
    """RoPE on the NoPE layer 3 of `tiny`: every logit is within what bfloat16 explains, and all together are not."""
    from smollm3_neuron.check.validation import WRONG

    some = [case for case in cases if case.kind == "text"] + cases[::4]
    report = judge("tiny", "plain", (flip(3), None), some, 16)
    assert report.verdict == WRONG and WRONG not in {one.verdict for one in report.cases}
    assert report.drift.ratio > 1.3 and report.as_dict()["drift"]["cases"] == len(some)
    right = judge("tiny", "plain", None, some, 16, tp_degree=2)
    assert right.verdict != WRONG and 0.9 < right.drift.ratio < 1.1


def test_the_mean_is_judged_by_the_scatter_of_whole_cases():
    from smollm3_neuron.check.drift import drift_of

    even, few = [[0.2] * 10] * 8, [[0.2] * 10] * 7
    assert drift_of(few) is None
    found = drift_of(even)
    assert found.is_wrong and (found.cases, found.positions) == (8, 80)
    assert [found.ratio, found.at_least] == pytest.approx([1.2214] * 2, abs=1e-4)
    assert not drift_of([[0.09] * 10] * 8).is_wrong
    # the same mean: by the scatter of single positions it would be at least 1.10, by that of whole cases it is 0.87
    scattered = drift_of([[0.5] * 10, [-0.1] * 10] * 4)
    assert scattered.ratio == pytest.approx(found.ratio) and not scattered.is_wrong
    assert scattered.at_least == pytest.approx(0.8692, abs=1e-4)
    # a longer case has more weight
    assert drift_of([[0.0] * 30] + [[0.2] * 10] * 7).ratio == pytest.approx(1.1503, abs=1e-4)


def test_the_ratio_of_errors_is_of_each_position():
    from smollm3_neuron.check.drift import log_ratios

    theirs = torch.tensor([[3.0, 4.0], [1.0, -1.0], [0.0, 0.0]])
    assert log_ratios(theirs * torch.tensor([[2.0], [0.5], [1.0]]), theirs) == pytest.approx(
        [0.6931, -0.6931, 0.0], abs=1e-4
    )
    # no error at all is as if it were float32's smallest number, 2**-126, here beside 5 / sqrt(2)
    assert log_ratios(theirs[:1] * 0, theirs[:1]) == pytest.approx([-126 * 0.69315 - 1.26287], abs=1e-3)


def test_how_many_faults_are_found_is_said():
    from smollm3_neuron.check.drift import FOUND, drift_of, power

    judged = drift_of([[0.0]] * 8)
    assert power(torch.bfloat16, judged) == f"finds {FOUND[torch.bfloat16, True]} of 46 seeded faults in bfloat16"
    assert power(torch.bfloat16, None) == "finds 34 of 46 seeded faults in bfloat16"
    assert power(torch.float32, None) == "finds 46 of 46 seeded faults in float32"
    assert power(torch.float16, judged) == "how many seeded faults this finds in float16 was not measured"
    assert len(FAULTS) == FOUND[torch.float32, False]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["tiny", "widened"])
def test_seeded_faults_in_bfloat16(checkpoint, judge, cases, monkeypatch):
    from smollm3_neuron.check.drift import FOUND
    from smollm3_neuron.check.validation import WRONG

    monkeypatch.setattr(checkpoint_faults, "PROMPTS", [cases[0].prompt])  # whose rows of the embedding are swapped
    before, after = Counter(), Counter()
    for name, (base, *fault, _) in FAULTS.items():
        report = judge(checkpoint, base, fault)
        verdicts = [one.verdict for one in report.cases]
        largest = next(verdict for verdict in (WRONG, "near tie", "identical") if verdict in verdicts)
        before[largest] += 1
        after[report.verdict] += 1
        print(f"{name}: {largest}, with the mean {report.verdict}: {report.drift}", flush=True)
        assert report.verdict == WRONG or name in NOT_FOUND[checkpoint], name
    print(f"{checkpoint}: {dict(before)}, with the mean error {dict(after)}")
    assert after[WRONG] >= 40
    if checkpoint == "tiny":
        assert after[WRONG] == FOUND[torch.bfloat16, True]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["tiny", "widened"])
def test_no_right_model_is_called_wrong(checkpoint, judge, cases):
    """100 runs each: every setting with its own draws of prompts, every second one without oneDNN's products."""
    from smollm3_neuron.check.drift import drift_of
    from smollm3_neuron.check.validation import WRONG, _judge

    random.seed(1)
    verdicts, ratios = [], []
    for number, settings in enumerate(RIGHT):
        with torch.backends.mkldnn.flags(enabled=number % 2 == 0):
            report = judge(checkpoint, "plain" if number % 3 else "biases", **settings)
        verdicts.append(report.verdict)
        for _ in range(RUNS):
            drawn = random.sample(report.cases, CASES)
            drift = drift_of([one.log_ratios for one in drawn])
            verdicts.append(_judge(drawn, None, None, {}, drift).verdict)
            ratios.append(drift.ratio)
        print(f"{checkpoint}, {settings}: {report.drift}", flush=True)
    print(f"{checkpoint}: {len(verdicts)} runs, {Counter(verdicts)}, ratios {min(ratios):.3f} to {max(ratios):.3f}")
    assert WRONG not in verdicts and len(verdicts) >= 100
