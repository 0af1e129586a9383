# SPDX-License-Identifier: Apache-2.0
"""Makes this Python look like the Neuron SDK's, so that programs written for it run unmodified. Imports no torch.

`make emulator-venv` has every interpreter of .venv-emulator call `activate` when it starts. NXD_SOURCE names the
library's sources, NXD_SRC:NXDI_SRC.
"""

import email.message
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from nxd_sources import inert

from . import DEVICE_FILES, FOLDER, NAME

# vllm-neuron's own looks for /dev/neuron*
ENTRY_POINTS = "[vllm.platform_plugins]\nemulated_neuron = neuron_emulator.sdk:vllm_platform\n"
CLOSED = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "torchvision")
_versions: dict[str, str] = {}  # distribution -> version, of what is stood in for


def release() -> str:
    """NxD Inference's version, marked as emulated."""
    return _versions["neuronx-distributed-inference"]


def activate() -> None:
    """Stands in for the SDK in this process, or says in one line on stderr why that cannot be."""
    if _versions:  # done before
        return
    try:
        reason = _real_sdk() or _take_sources(os.environ.get("NXD_SOURCE", ""))
    except OSError as error:
        reason = str(error)
    if reason:
        print(f"{NAME}: off, {reason}", file=sys.stderr)
        return
    sys.meta_path.append(_ClosedModules(CLOSED, _modules))
    sys.meta_path.append(_Versions())
    os.environ["PJRT_DEVICE"] = "CPU"  # torch_xla's
    os.environ["PATH"] = f"{FOLDER / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"


def vllm_platform() -> str | None:
    """Answers vLLM's `vllm.platform_plugins`: vllm-neuron's platform, where vllm-neuron is."""
    return "vllm_neuron.platform.NeuronPlatform" if importlib.util.find_spec("vllm_neuron") else None


def _real_sdk() -> str | None:
    """Why the emulation may not be here."""
    if any(importlib.util.find_spec(name) for name in ("torch_neuronx", "neuronxcc")):
        return "the Neuron SDK is installed in this environment: use it, or another environment for the emulation"
    if any(Path("/dev").glob("neuron*")):
        return "this machine has a Neuron device (/dev/neuron*): use that"
    return None


def _take_sources(source: str) -> str | None:
    folders = source.split(":")
    if len(folders) != 2:
        return "NXD_SOURCE is not set to NXD_SRC:NXDI_SRC, the `src` folders of the library's sources"
    for folder, package in zip(folders, ("neuronx_distributed", "neuronx_distributed_inference"), strict=True):
        file = Path(folder).resolve() / package / "_version.py"
        version = file.is_file() and re.search(r'__version__ = "([\d.]+)', file.read_text())
        if not version:
            return f"NXD_SOURCE has {folder!r}, no source folder of {package}: {file} is missing or names no version"
        _versions[package.replace("_", "-")] = f"{version[1]}+emulated"
    for name in ("torch-neuronx", "neuronx-cc", "libneuronxla"):
        _versions[name] = "0+emulated"
    sys.path += [str(Path(folder).resolve()) for folder in folders]
    return None


def _modules() -> dict[str, dict[str, Any]]:
    """The closed modules, made when the first of them is imported: that takes torch and torch_xla."""
    from neuron_hlo import stand_ins

    from . import compiler
    from .device import extension  # noqa: F401  # with it come torch.classes.neuron and the device

    return compiler.modules(stand_ins.modules())


class _ClosedModules(inert.Finder):
    emulated_devices = DEVICE_FILES  # by this a program tells that nothing here is a device

    def find_spec(self, name, path=None, target=None):
        torch_xla = sys.modules.get("torch_xla")
        if name.startswith("libneuronxla") and torch_xla and not hasattr(torch_xla, "_found_libneuronxla"):
            return None  # torch_xla is being imported, and would start a device with it
        return super().find_spec(name, path, target)


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str):
        self._name = name

    @property
    def metadata(self):
        message = email.message.Message()
        message["Name"], message["Version"] = self._name, _versions[self._name]
        message["Summary"] = f"stood in for by an {NAME}"
        return message

    def read_text(self, filename):
        return ENTRY_POINTS if (filename, self._name) == ("entry_points.txt", "torch-neuronx") else None

    def locate_file(self, path):
        return FOLDER / path


_ANY = importlib.metadata.DistributionFinder.Context()


class _Versions(importlib.metadata.DistributionFinder):
    """Answers importlib.metadata for the distributions that are stood in for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None

    @staticmethod
    def find_distributions(context=_ANY):
        wanted = context.name and context.name.lower().replace("_", "-")
        return [_Distribution(name) for name in _versions if wanted in (None, name)]
