"""scripts/plan.py: what it prints, draws and refuses. The arithmetic is tested in the model's own unit tests."""

import json
import subprocess

import pytest
from commands import run as run_command
from places import ROOT, TINY

from smollm3_neuron.machine.expectations import Expectation
from smollm3_neuron.machine.roofline import Estimate
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B


def plan(*args) -> subprocess.CompletedProcess:
    return run_command(ROOT / "scripts/plan.py", *args)


def test_json_has_a_plan_per_degree_and_the_sources_of_what_is_expected():
    content = json.loads(plan("--instance", "inf2.48xlarge", "--json").stdout)
    degrees = [one["tp_degree"] for one in content["plans"]]
    assert degrees == content["tp_degrees"] and degrees[:3] == [1, 2, 4]
    # across the chips of an inf2 nobody published what a collective costs
    known = [one["tp_degree"] for one in content["plans"] if one["tokens_per_second_expected"] is not None]
    assert known == [1, 2]
    assert all(figure["source"].startswith("https://") for figure in content["expected_from"])


def test_it_prints_what_to_expect_beside_the_published_port(tmp_path):
    done = plan("--plot", tmp_path / "plan.png", "--model", "tiny", "--tp", 2)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == [tmp_path / "plan.png"], done.stderr
    done = plan("--plot", tmp_path / "plan.png")
    assert done.returncode == 0 and (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG", done.stderr
    assert "read per decode step" in done.stdout
    assert "3,075,098,624 parameters in 326 tensors, 6.150 GB (5.728 GiB) in bfloat16" in done.stdout
    assert "KV cache: 73,728 bytes per token; activations are left out" in done.stdout
    (expected,) = (line for line in done.stdout.splitlines() if line.startswith("tokens per second, expected"))
    assert 66 <= float(expected.split()[-1]) <= 71 and "34.4 tokens per second" in done.stdout  # TP 2 is the last


def test_8_bit_weights_and_float32():
    model = json.loads(plan("--tp", 2, "--json").stdout)
    quantized = json.loads(plan("--tp", 2, "--quantized", "--json").stdout)
    assert model["model"] == quantized["model"]
    assert model["model"] == {
        "parameters": 3_075_098_624, "tensors": 326, "checkpoint_bytes": 6_150_197_248, "kv_bytes_per_token": 73_728
    }  # fmt: skip
    (whole,), (of_8_bits,) = model["plans"], quantized["plans"]
    head, embedding = 128_256 * 2048 // 2, 128_256 * 2048  # of a core: elements, and bytes of its part of the table
    projections = (3_075_098_624 - 128_256 * 2048 - 73 * 2048) // 2
    scales = of_8_bits["weights"] - projections - head - embedding - 2 * 73 * 2048
    assert whole["weights"] == 2 * (projections + head) + embedding + 2 * 73 * 2048
    assert scales == 4 * (36 * 7 + 1)  # one float32 for each projection and the head
    assert of_8_bits["tokens_per_second_at_most"] > 1.7 * whole["tokens_per_second_at_most"]
    said = plan("--tp", 2, "--dtype", "float32").stdout
    assert "--auto-cast=none" in said and "6.827 GB" in said and "147,456 bytes per token" in said


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--instance", "p5.48xlarge"], ["instance is 'p5.48xlarge'", "trn1.2xlarge"]),
        (["--tp", "4"], ["tp_degree is 4, trn1.2xlarge takes 1, 2"]),
        (["--dtype", "int4"], ["dtype is 'int4'"]),
        (["--plot", "no/such/folder/plan.png"], ["no/such/folder/plan.png: no such folder"]),
        (["--plot", "."], [".: a folder; name a file"]),
        (["--model", "/dev/null"], ["/dev/null: no such folder", "'tiny'"]),
        (["--model", "~nobodyx/a"], ["~nobodyx/a: Could not determine home directory"]),
    ],
)
def test_what_it_refuses(args, parts):
    done = plan(*args)
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert [part for part in parts if part not in lines[0]] == []


def test_several_tokens_in_one_step():
    """Each accepted candidate is a token more of a step; what differs in a step are its logits and operations."""
    (one,) = json.loads(plan("--tp", 2, "--json").stdout)["plans"]
    (several,) = json.loads(plan("--tp", 2, "--speculation-length", 5, "--json").stdout)["plans"]
    assert several["logits"] == 5 * one["logits"] and several["decode_bytes"] == one["decode_bytes"]
    step = several["verify_seconds_expected"]
    assert one["decode_seconds_expected"] <= step < 1.01 * one["decode_seconds_expected"]
    by_share = several["tokens_per_second_expected_by_accepted"]
    assert by_share == pytest.approx(
        {"0": 1 / step, "0.25": 2 / step, "0.5": 3 / step, "0.75": 4 / step, "1": 5 / step}
    )
    done = plan("--tp", 2, "--speculation-length", 5)
    assert "  tokens per second, 50% accepted" in done.stdout
    assert "accepted" not in plan("--tp", 2).stdout
    assert "draft" not in done.stdout
    done = plan("--model", "tiny", "--tp", 2, "--speculation-length", 5, "--draft", TINY)
    assert "the draft's weights and KV cache" in done.stdout and done.returncode == 0
    (with_draft,) = json.loads(plan("--tp", 2, "--speculation-length", 5, "--json").stdout)["plans"]
    assert with_draft["held_by_draft"] == 0
    refused = plan("--tp", 2, "--speculation-length", 5, "--draft", TINY)
    assert refused.returncode == 2 and "its vocab_size is 512 and the model's 128256" in refused.stderr
    refused = plan("--speculation-length", 1)
    assert refused.returncode == 2 and "speculation_length is 1, allowed is 0 (off)" in refused.stderr


def test_what_performance_md_says_of_a_draft():
    """Its table of what a draft gains, by the share of guesses accepted."""
    shapes = (
        {"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
        {"num_hidden_layers": 4},
    )
    config = resolve_config(SMOLLM3_3B)
    alone = Expectation(Estimate(config, 2, 2048), "trn1.2xlarge").tokens_per_second
    expected = {}
    for shape in shapes:
        draft = resolve_config({**SMOLLM3_3B, **shape})
        for length in (5, 7):
            estimate = Estimate(config, 2, 2048, speculation_length=length, draft=draft)
            for share in (0.25, 0.5, 0.75, 1):
                gain = Expectation(estimate, "trn1.2xlarge").speculated_tokens_per_second(share) / alone
                expected.setdefault(f"{share:.0%}", []).append(f"{gain:.2f}")
    lines = (ROOT / "docs/performance.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    (head,) = (at for at, row in enumerate(rows) if row[0] == "share of guesses accepted")
    assert {row[0]: row[1:] for row in rows[head + 2 : head + 6]} == expected
