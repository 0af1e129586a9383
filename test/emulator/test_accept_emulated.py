"""scripts/accept.sh from start to end on the emulated device, the answer of a vLLM server included."""

import json
import os
import subprocess

import pytest
from places import ROOT

pytestmark = [pytest.mark.emulator, pytest.mark.slow]


def test_a_machine_is_accepted_and_its_row_says_what_it_is(pair, tmp_path):
    command = ["scripts/accept.sh", "--device", "neuron", "--model", "tiny", "--tp", "2", "--seq-len", "128"]
    environment = pair.environment(tmp_path, PYTHON=str(pair.python))
    environment["PATH"] = f"{pair.python.parent}{os.pathsep}{environment['PATH']}"  # where `vllm` is
    done = subprocess.run(
        [*command, "--dtype", "float32", "--output", tmp_path / "results"],
        capture_output=True, text=True, timeout=3600, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0].startswith("an emulated Neuron device") and cells[1].endswith("+emulated")
    assert cells[6] == "identical" and cells[-1] == "passed"
    report = json.loads((tmp_path / "results/report.json").read_text())
    assert report["environment"]["place"] == "emulated" and report["vllm"]["ran"]
