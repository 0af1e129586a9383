"""Every code block of the documents runs as it stands, or says above it why it does not."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "contrib/models/SmolLM3-3B"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("contrib/**/README.md")])
BLOCK = re.compile(r"(?:^<!-- (?P<mark>.*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
BLOCKS = [(path, m) for path in DOCUMENTS for m in BLOCK.finditer(path.read_text()) if m["language"] != "text"]


def name(block) -> str:
    path, match = block
    return f"{path.relative_to(ROOT)}:{match['code'].splitlines()[0][:40]}"


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a fresh clone whose .venv is this interpreter's."""
    for path in ROOT.iterdir():
        if path.name in ("contrib", "scripts", "test", "Makefile", "pyproject.toml", "README.md"):
            (tmp_path / path.name).symlink_to(path)
    commands = tmp_path / ".venv/bin"
    commands.mkdir(parents=True)
    for command, call in (("python", ""), ("pytest", " -m pytest")):
        (commands / command).write_text(f'#!/bin/sh\nexec {sys.executable}{call} "$@"\n')
        (commands / command).chmod(stat.S_IRWXU)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def test_every_block_is_marked():
    assert len(BLOCKS) > 5
    unmarked = [name(block) for block in BLOCKS if not re.match(r"run$|run: |not run: ", block[1]["mark"] or "")]
    assert unmarked == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b[1]["mark"] == "run"], ids=name)
def test_block(block, checkout):
    path, match = block
    environment = {**os.environ, "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    if match["language"] == "python":
        code = match["code"].replace("/tmp/", f"{checkout}/")
        command, folder = [sys.executable, "-c", code], MODEL
    else:
        command, folder = ["bash", "-euo", "pipefail", "-c", match["code"]], checkout
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_what_make_test_runs_is_among_its_paths(request):
    (code,) = [match["code"].strip() for _, match in BLOCKS if match["mark"] == "run: by make test"]
    paths = request.config.getini("testpaths")
    path = code.removeprefix("pytest ")
    assert (ROOT / path).is_file() and any(path.startswith(f"{folder}/") for folder in paths)


def test_the_test_command_is_what_ci_runs():
    of_ci = [match["code"].strip() for _, match in BLOCKS if match["mark"] == "run: .ci/run"]
    assert of_ci == ["make test"] and "make test" in (ROOT / ".ci/run").read_text().splitlines()
