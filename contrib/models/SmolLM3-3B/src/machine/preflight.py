# SPDX-License-Identifier: Apache-2.0
"""Is there a Neuron device on this machine, and is it ready for what is about to be compiled? Imports no torch.

The rules are AWS's documents'; nothing here ever ran on a device.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import SmolLM3Error
from ..model.releases import check_nxdi
from .roofline import INSTANCES, check_tp_degree
from .runtime import device_place, emulated_devices, ensure_neuronx

FIRST_NATIVE_VLLM = (0, 21)
DEVICES = ("auto", "neuron", "cpu")
GiB = 1 << 30


def choose_place(device: str) -> str:
    """Returns "neuron", "emulated" or "cpu" for a `device` of "auto", "neuron" or "cpu"; makes the library importable.

    Raises SmolLM3Error where the machine has not what was asked for.
    """
    if device not in DEVICES:
        raise SmolLM3Error(f"device is {device!r}, allowed is one of {', '.join(DEVICES)}")
    if device != "cpu":
        _check_vllm()
    runtime = ensure_neuronx()
    if device == "cpu" and runtime == "neuron":
        raise SmolLM3Error(
            "--device cpu, but the Neuron SDK is installed here and its library would run, not the CPU runtime: use "
            "--device neuron, or an environment without the SDK"
        )
    if device == "cpu" or (device == "auto" and runtime == "cpu"):
        return "cpu"
    if runtime == "cpu":
        raise SmolLM3Error(
            "--device neuron, but the Neuron SDK is not installed here; use --device cpu, or a trn1 or inf2"
        )
    if not list((emulated_devices() or Path("/dev")).glob("neuron*")):
        raise SmolLM3Error(
            "no Neuron device here (/dev/neuron*); use a trn1 or inf2, or an environment without the SDK"
        )
    return device_place()


def check_device(tp_degree: int, weight_bytes: int, output: Path) -> list[str]:
    """Checks the machine before a compile for `tp_degree` to the folder `output`; returns a line for each doubt.

    `weight_bytes` are those of the checkpoint. Raises SmolLM3Error for what cannot work.
    """
    warnings = []
    instance = instance_type()
    if instance in INSTANCES:
        check_tp_degree(instance, tp_degree)
    else:
        warnings.append(f"instance type {instance or 'unknown'}: which TP degrees its runtime takes is not known here")
    check_nxdi(importlib.metadata.version("neuronx-distributed-inference"))
    warnings += _doubts_of_software()
    devices = _neuron_ls()
    if devices is None:
        warnings.append("neuron-ls is not there or failed: NeuronCores were not checked")
    else:
        free, visible = free_cores(devices), visible_cores(os.environ)
        usable = free if visible is None else [core for core in visible if core in free]
        if len(usable) < tp_degree:
            raise SmolLM3Error(
                f"tp_degree is {tp_degree}, but {len(usable)} NeuronCores can be used: free are {free or 'none'}, "
                f"NEURON_RT_VISIBLE_CORES allows {'all' if visible is None else visible}; stop what uses them or lower "
                "--tp"
            )
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    free_disk, needed = shutil.disk_usage(parent).free, 2 * weight_bytes + 2 * GiB
    if free_disk < needed:
        raise SmolLM3Error(f"{parent}: {free_disk / GiB:.1f} GiB free, about {needed / GiB:.1f} GiB are needed")
    memory, needed = available_memory(), 2 * weight_bytes
    if memory < needed:
        warnings.append(
            f"{memory / GiB:.1f} GiB of memory are available, sharding may take {needed / GiB:.1f} GiB: add swap"
        )
    return warnings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_vllm() -> None:
    """Raises SmolLM3Error for a vLLM whose own plugin drives Neuron: its images have no NxD Inference."""
    vllm, here = _version("vllm"), instance_type() or ""
    if vllm is None or not here.startswith(("trn1", "inf2")):
        return
    if tuple(int(part) for part in re.findall(r"\d+", vllm)[:2]) >= FIRST_NATIVE_VLLM:
        raise SmolLM3Error(
            f"vLLM {vllm} is installed: images of vLLM 0.21 and later have no NxD Inference, and their own plugin does "
            f"not run on {here} (NeuronCore-v2); use the image of SDK 2.31 (vLLM 0.16) or of SDK 2.28 (vLLM 0.13)"
        )


def _doubts_of_software() -> list[str]:
    """Returns a line for each thing that was reported to go wrong and shows in the environment."""
    doubts = []
    if shutil.which("libneuronpjrt-path") is None:
        doubts.append(
            "libneuronpjrt-path is not on PATH, where torch_neuronx looks for it: activate the SDK's environment "
            "(shells of cron and of Systems Manager have not)"
        )
    if _version("vllm") and _version("optimum-neuron"):
        doubts.append(
            "optimum-neuron is installed beside vLLM: a server may end with 'Only one platform plugin can be "
            "activated'; uninstall optimum-neuron from this environment to serve"
        )
    return doubts


def instance_type() -> str | None:
    """Returns the machine's name as its firmware has it, e.g. "trn1.2xlarge", or None where it has none."""
    try:
        return Path("/sys/devices/virtual/dmi/id/product_name").read_text().strip() or None
    except OSError:
        return None


def free_cores(devices: list[dict]) -> list[int]:
    """Returns the ids of the NeuronCores that no process holds; `devices` is `neuron-ls --json-output`."""
    free, first = [], 0
    for device in devices:
        ids = device.get("neuroncore_ids") or list(range(first, first + device["nc_count"]))
        first += device["nc_count"]
        if not device.get("neuron_processes"):
            free += ids
    return free


def visible_cores(environ) -> list[int] | None:
    """Returns the ids that NEURON_RT_VISIBLE_CORES ("0-3", "0,2,5-7") or NEURON_RT_NUM_CORES allows; None is all.

    Raises SmolLM3Error where NEURON_RT_VISIBLE_CORES is no such list.
    """
    value = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if not value:
        number = environ.get("NEURON_RT_NUM_CORES", "").strip()
        return list(range(int(number))) if number.isdigit() else None
    cores = []
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise SmolLM3Error(f"NEURON_RT_VISIBLE_CORES is {value!r}, allowed is a list like 0-1 or 0,1") from None
    return cores


def available_memory() -> int:
    """Returns the bytes that the host can still give out, 0 where it does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _neuron_ls() -> list[dict] | None:
    """Returns the devices as neuron-ls lists them, or None where it is not there or fails."""
    try:
        done = subprocess.run(["neuron-ls", "--json-output"], capture_output=True, timeout=30, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
