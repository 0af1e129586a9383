"""compile.py --device hlo without sources or venv: one line says what is missing and how to get it."""

import os
import subprocess
import sys

import pytest
from places import ROOT


def compile_to_hlo(*args, **environment):
    command = [sys.executable, ROOT / "scripts/compile.py", "--tp", "2", "--device", "hlo", *map(str, args)]
    clean = {name: value for name, value in os.environ.items() if name != "NXD_SOURCE"}
    return subprocess.run(command, capture_output=True, text=True, env={**clean, **environment}, timeout=300)


def refused(done, *parts):
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert [part for part in parts if part not in lines[0]] == []


def test_without_sources(tmp_path):
    refused(compile_to_hlo("--output", tmp_path / "out"), "--nxd-source", "NXD_SOURCE", "git clone", "v2.28.0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["/no/such/folder", "/no/such:/folder", ":"])
def test_wrong_sources(source, tmp_path):
    refused(compile_to_hlo("--output", tmp_path / "out", NXD_SOURCE=source), "holds no neuronx_distributed", "src")


def test_other_commands_do_not_take_it():
    command = [sys.executable, ROOT / "scripts/generate.py", "artifact", "prompt", "--device", "hlo"]
    refused(subprocess.run(command, capture_output=True, text=True, timeout=300), "device is 'hlo'")
