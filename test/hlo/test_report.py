"""compile.py --device hlo without sources or venv: one line says what is missing and how to get it."""

import os
import subprocess
import sys

import pytest
from places import ROOT

from neuron_hlo import report


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


def test_what_was_not_checked_is_said():
    """Where the SDK's own tracer ran, nothing was recorded: the report says so. Patterns come with effect or reason."""
    found = {"pattern": "round trip", "effect": "it is folded away", "source": "https://a.b", "places": ["c.1", "c.2"]}
    graph = {
        "instructions": 9, "opcodes": {"dot": 1}, "collectives": {}, "keys_rotated": [1, 0], "parameter_bytes": 1,
        "flops": 1, "planned_flops": 1, "bytes_read": 1, "planned_bytes": 1, "compiler_args": "-O1", "faults": None,
        "patterns": {
            "checked": ["cumsum", "float64", "round trip"],
            "not_checked": {"large constant": "no record"},
            "found": [{**found, "harmless": "more exact"}, {**found, "harmless": None}],
        },
    }  # fmt: skip
    settings = {"tp_degree": 2, "batch_size": 1, "seq_len": 8, "torch_dtype": "bfloat16"}
    text = report.text({"settings": settings, "seconds": 1, "peak_memory": 1, "graphs": {"graph_0": graph}})
    assert f"NOT CHECKED    {report.NOT_RECORDED}" in text and "FAULT" not in text
    assert "NOT CHECKED    large constant: no record" in text
    assert "harmless       round trip, 2 times, the first c.1: more exact" in text
    assert "PATTERN        round trip, 2 times, the first c.1: it is folded away; https://a.b" in text
    assert "patterns       2 of 3 that are reported to go wrong are not in it" in text
    graph["faults"] = {"waves": "2 cosines"}
    assert "FAULT          waves: 2 cosines" in report.text(
        {"settings": settings, "seconds": 1, "peak_memory": 1, "graphs": {"graph_0": graph}}
    )
