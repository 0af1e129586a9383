# SPDX-License-Identifier: Apache-2.0
"""Chooses which `neuronx_distributed` and `neuronx_distributed_inference` stand behind the model. Imports no torch."""

import importlib.util
import sys
from pathlib import Path

from ..errors import SmolLM3Error

SDK_PACKAGES = ("neuronx_distributed", "neuronx_distributed_inference", "torch_neuronx")


def ensure_neuronx() -> str:
    """Makes the two packages importable and returns which they are: "neuron" (the SDK's own) or "cpu" (nxd_cpu).

    nxd_cpu, this project's CPU runtime, is put at the END of sys.path and only where nothing of the SDK is installed.
    Raises SmolLM3Error where only a part of the SDK is.
    """
    installed = [name for name in SDK_PACKAGES if importlib.util.find_spec(name) is not None]
    if _nxd_cpu_is_active():
        return "cpu"
    if len(installed) == len(SDK_PACKAGES):
        return "neuron"
    if installed:
        missing = ", ".join(name for name in SDK_PACKAGES if name not in installed)
        raise SmolLM3Error(
            f"a part of the Neuron SDK is installed ({', '.join(installed)}), but not {missing}: activate the SDK's "
            "NxD Inference environment, or use one without any of it for the CPU runtime"
        )
    sys.path.append(str(nxd_cpu_folder()))
    importlib.invalidate_caches()
    return "cpu"


def emulated_devices() -> Path | None:
    """Returns the folder of the device files where the Neuron device is an emulated one, or None on a real machine.

    See contrib/neuron_emulator, which stands in for the SDK and says so by its loader.
    """
    spec = importlib.util.find_spec("torch_neuronx")
    return getattr(spec and spec.loader, "emulated_devices", None)


def device_place() -> str:
    """Returns where graphs run with the SDK: "neuron", or "emulated" where its device is an emulated one."""
    return "emulated" if emulated_devices() else "neuron"


def nxd_cpu_folder() -> Path:
    """Returns the CPU runtime's folder: inside the wheel, or beside `models` in a checkout.

    Raises SmolLM3Error where it is in neither.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "nxd_cpu", package.parents[2] / "nxd_cpu")
    for folder in candidates:
        if (folder / "neuronx_distributed_inference").is_dir():
            return folder
    raise SmolLM3Error(
        "neither the Neuron SDK nor the CPU runtime (nxd_cpu) is there; looked for the latter in "
        f"{candidates[0]} and {candidates[1]}"
    )


def _nxd_cpu_is_active() -> bool:
    spec = importlib.util.find_spec("neuronx_distributed_inference")
    return spec is not None and Path(next(iter(spec.submodule_search_locations))).parent.name == "nxd_cpu"
