"""scripts/plan.py: what it prints, draws and refuses. The arithmetic is tested in the model's own unit tests."""

import json
import subprocess

import pytest
from commands import run as run_command
from places import ROOT


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
    (expected,) = (line for line in done.stdout.splitlines() if line.startswith("tokens per second, expected"))
    assert 66 <= float(expected.split()[-1]) <= 71 and "34.4 tokens per second" in done.stdout  # TP 2 is the last


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
