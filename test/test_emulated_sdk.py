"""The environment that looks like the SDK's, as far as it goes without torch_xla: what it says, and when it is off."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from places import CONTRIB

from neuron_emulator import faults, neff, sdk
from neuron_emulator.errors import DeviceError

NAMES = """
import importlib.util, neuron_emulator.sdk
neuron_emulator.sdk.activate()
print(importlib.util.find_spec("torch_neuronx") is not None)
"""


def activated(code=NAMES, **variables) -> tuple[str, str]:
    """What a fresh interpreter prints on stdout and stderr."""
    clean = {name: value for name, value in os.environ.items() if name != "NXD_SOURCE"}
    environment = {**clean, "PYTHONPATH": str(CONTRIB), **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def sources(tmp_path):
    """Two folders that look like the library's sources."""
    folders = []
    for package, version in (("neuronx_distributed", "0.17.0"), ("neuronx_distributed_inference", "0.8.0")):
        folder = tmp_path / package / "src" / package
        folder.mkdir(parents=True)
        (folder / "_version.py").write_text(f'__version__ = "{version}"\n')
        folders.append(str(folder.parent))
    return ":".join(folders)


@pytest.mark.parametrize("source", [None, "nowhere", "/no/such:/folder"])
def test_without_sources_it_is_off_and_says_so_in_one_line(source):
    found, said = activated(**({} if source is None else {"NXD_SOURCE": source}))
    assert found == "False" and said.startswith("emulated Neuron device: off, NXD_SOURCE") and "\n" not in said


def test_beside_the_sdk_it_is_off(sources, tmp_path):
    (tmp_path / "torch_neuronx.py").touch()
    _, said = activated(NXD_SOURCE=sources, PYTHONPATH=f"{CONTRIB}:{tmp_path}")
    assert "the Neuron SDK is installed in this environment" in said


def test_versions_and_neuron_ls_say_that_they_are_emulated(sources):
    code = (
        "import neuron_emulator.sdk as s; s.activate(); import importlib.metadata as m, subprocess\n"
        "print(m.version('neuronx-distributed-inference'))\n"
        "print(subprocess.run(['neuron-ls', '--json-output'], capture_output=True, text=True).stdout)"
    )
    version, devices = activated(code, NXD_SOURCE=sources, NEURON_EMULATOR_CORES="4")[0].splitlines()
    assert version == "0.8.0+emulated"
    assert [(device["nc_count"], device["emulated"]) for device in json.loads(devices)] == [(2, True)] * 2
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("neuronx-distributed-inference")


def test_a_graph_says_what_it_is_and_of_which_release(monkeypatch):
    monkeypatch.setitem(sdk._versions, "neuronx-distributed-inference", "0.8.0+emulated")
    graph = neff.wrap(b"hlo\nof a graph")
    assert graph.startswith(b"emulated Neuron device, not a NEFF") and neff.unwrap(graph) == b"hlo\nof a graph"
    with pytest.raises(DeviceError, match="not made on an emulated Neuron device"):
        neff.unwrap(b"\x7fNEFF of a device")
    monkeypatch.setitem(sdk._versions, "neuronx-distributed-inference", "0.9.0+emulated")
    with pytest.raises(DeviceError, match="with NxD Inference 0.8.0.emulated, here is 0.9.0.emulated: compile again"):
        neff.unwrap(graph)


@pytest.mark.parametrize("text", ["fail", "fail=x", "fail=1@2", "die=3", "stop=1", "nan=-1"])
def test_faults_that_are_none(text):
    with pytest.raises(DeviceError, match="allowed are fail=N, die=CORE@N and nan=N"):
        faults._parsed(text)


def test_faults():
    assert faults._parsed("fail=12,die=1@30,nan=4") == {"fail": (0, 12), "die": (1, 30), "nan": (0, 4)}
    assert faults._parsed("") == {}
