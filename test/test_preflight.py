"""The preflight's rules, on what the machine's tools would print. No device is here."""

import importlib.machinery
import re

import pytest

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine import preflight, runtime

TRN1_2XLARGE = [
    {"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "neuroncore_ids": [0, 1], "neuron_processes": []}
]


def test_free_cores():
    assert preflight.free_cores(TRN1_2XLARGE) == [0, 1]
    busy = {"neuron_device": 1, "nc_count": 2, "neuron_processes": [{"pid": 7, "command": "python"}]}
    third = {"neuron_device": 2, "nc_count": 2, "neuron_processes": []}
    assert preflight.free_cores([*TRN1_2XLARGE, busy, third]) == [0, 1, 4, 5]


@pytest.mark.parametrize(
    "environ, cores",
    [
        ({}, None),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, [0, 1, 2, 3]),
        ({"NEURON_RT_VISIBLE_CORES": "0,2,5-7"}, [0, 2, 5, 6, 7]),
        ({"NEURON_RT_VISIBLE_CORES": "1", "NEURON_RT_NUM_CORES": "2"}, [1]),
        ({"NEURON_RT_NUM_CORES": "2"}, [0, 1]),
    ],
)
def test_visible_cores(environ, cores):
    assert preflight.visible_cores(environ) == cores


def test_visible_cores_that_are_no_list():
    with pytest.raises(SmolLM3Error, match="NEURON_RT_VISIBLE_CORES is 'all'"):
        preflight.visible_cores({"NEURON_RT_VISIBLE_CORES": "all"})


@pytest.mark.parametrize("version", ["0.7.14366", "0.8.16251+f3ca5575", "0.9.1", "0.10.18399+a1b2c3"])
def test_releases_that_were_checked(version):
    preflight.check_nxdi(version)


@pytest.mark.parametrize("version", ["0.6.10598", "0.11.2", "1.0"])
def test_other_releases(version):
    with pytest.raises(
        SmolLM3Error,
        match=f"NxD Inference {version} is installed, supported are 0.7, 0.8, 0.9, 0.10: use SDK 2.31 or 2.28",
    ):
        preflight.check_nxdi(version)


def installed(monkeypatch, **versions):
    """These packages, and NxD Inference of SDK 2.28."""
    versions = {"neuronx-distributed-inference": "0.8.16251", **versions}

    def version(package):
        if package not in versions:
            raise preflight.importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(preflight.importlib.metadata, "version", version)


@pytest.fixture
def machine(monkeypatch):
    """A trn1.2xlarge with SDK 2.28, as far as the preflight sees it."""
    installed(monkeypatch)
    monkeypatch.setattr(preflight.shutil, "which", lambda command: f"/opt/{command}")
    monkeypatch.setattr(preflight, "instance_type", lambda: "trn1.2xlarge")
    monkeypatch.setattr(preflight, "_neuron_ls", lambda: TRN1_2XLARGE)
    monkeypatch.setattr(preflight, "available_memory", lambda: 30 * preflight.GiB)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100 * preflight.GiB}))
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    monkeypatch.delenv("NEURON_RT_NUM_CORES", raising=False)
    return monkeypatch


def test_a_ready_machine_has_nothing_to_say(machine, tmp_path):
    assert preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact") == []


def test_software_that_was_reported_to_go_wrong(machine, tmp_path):
    machine.setattr(preflight.shutil, "which", lambda command: None)
    (line,) = preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact")
    assert line.startswith("libneuronpjrt-path is not on PATH")
    machine.setattr(preflight.shutil, "which", lambda command: command)
    installed(machine, vllm="0.13.0")
    assert preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact") == []
    installed(machine, **{"vllm": "0.13.0", "optimum-neuron": "0.4.1"})
    (line,) = preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact")
    assert "optimum-neuron is installed beside vLLM" in line and "Only one platform plugin" in line


@pytest.mark.parametrize("version", ["0.21.0", "0.24.1+neuron", "1.0.0"])
def test_images_of_a_native_vllm_are_refused(version, machine):
    installed(machine, vllm=version)
    for device in ("auto", "neuron"):
        with pytest.raises(SmolLM3Error, match=f"vLLM {re.escape(version)} is installed.*does not run on trn1.2xlarge"):
            preflight.choose_place(device)
    machine.setattr(preflight, "instance_type", lambda: "trn2.48xlarge")
    assert preflight.choose_place("auto") == "cpu"


def test_other_vllms_are_not(machine):
    for version in ("0.11.0", "0.13.0", "0.16.0+neuron", "0.20.9"):
        installed(machine, vllm=version)
        assert preflight.choose_place("auto") == "cpu"


def test_too_few_cores(machine, tmp_path):
    machine.setattr(preflight, "instance_type", lambda: "trn1.32xlarge")
    with pytest.raises(SmolLM3Error, match="tp_degree is 8, but 2 NeuronCores can be used"):
        preflight.check_device(8, 6 * preflight.GiB, tmp_path / "artifact")
    machine.setenv("NEURON_RT_VISIBLE_CORES", "1")
    with pytest.raises(
        SmolLM3Error, match=r"tp_degree is 2, but 1 NeuronCores can be used: free are \[0, 1\].*allows \[1\]"
    ):
        preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact")


def test_tp_degrees_that_the_runtime_would_refuse(machine, tmp_path):
    with pytest.raises(SmolLM3Error, match="tp_degree is 8, trn1.2xlarge takes 1, 2"):
        preflight.check_device(8, 6 * preflight.GiB, tmp_path / "artifact")
    machine.setattr(preflight, "instance_type", lambda: "p5.48xlarge")
    assert "instance type p5.48xlarge" in preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact")[0]


def test_a_full_disk_and_little_memory(machine, tmp_path):
    machine.setattr(preflight, "available_memory", lambda: 8 * preflight.GiB)
    machine.setattr(preflight, "_neuron_ls", lambda: None)
    warnings = preflight.check_device(2, 6 * preflight.GiB, tmp_path / "deep" / "artifact")
    assert len(warnings) == 2 and "8.0 GiB of memory" in warnings[1]
    machine.setattr(preflight.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3 * preflight.GiB}))
    with pytest.raises(SmolLM3Error, match="3.0 GiB free, about 14.0 GiB are needed"):
        preflight.check_device(2, 6 * preflight.GiB, tmp_path / "artifact")


@pytest.mark.parametrize(
    "asked, message", [("neuron", "the Neuron SDK is not installed here"), ("gpu", "device is 'gpu'")]
)
def test_places_that_are_not_here(asked, message):
    with pytest.raises(SmolLM3Error, match=message):
        preflight.choose_place(asked)


def test_an_emulated_device_is_a_place_of_its_own(monkeypatch, tmp_path):
    class Loader:
        emulated_devices = tmp_path

    spec = importlib.machinery.ModuleSpec("torch_neuronx", Loader())
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: spec if name == "torch_neuronx" else None)
    monkeypatch.setattr(preflight, "ensure_neuronx", lambda: "neuron")
    with pytest.raises(SmolLM3Error, match="no Neuron device here"):
        preflight.choose_place("neuron")
    (tmp_path / "neuron0").touch()
    assert preflight.choose_place("neuron") == preflight.choose_place("auto") == "emulated"


def test_the_cpu_runtime_is_refused_beside_the_sdk(monkeypatch):
    monkeypatch.setattr(preflight, "ensure_neuronx", lambda: "neuron")
    with pytest.raises(SmolLM3Error, match="--device cpu, but the Neuron SDK is installed here"):
        preflight.choose_place("cpu")
    with pytest.raises(SmolLM3Error, match="no Neuron device here"):
        preflight.choose_place("auto")
