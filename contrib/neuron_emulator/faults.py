# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine, injected: NEURON_EMULATOR_FAULTS is a list like "fail=12,die=1@30,nan=4".

fail=N: the execution with number N fails; the first one after the start of the process is 1, and warm-up's count.
die=CORE@N: the NeuronCore is gone from execution N on, and all later ones fail, too.
nan=N: after execution N the first state that holds floating point numbers is not a number on NeuronCore 0.
"""

import os

import torch

from .errors import DeviceError

INJECTED = "injected into the emulated Neuron device"


def _parsed(text: str) -> dict[str, tuple[int, int]]:
    """Kind -> (core, execution)."""
    found = {}
    for part in filter(None, text.split(",")):
        kind, _, value = part.partition("=")
        core, at, number = value.rpartition("@")
        numbers = [core, number] if at else [number]
        if kind not in ("fail", "die", "nan") or not all(map(str.isdigit, numbers)) or bool(at) != (kind == "die"):
            raise DeviceError(f"NEURON_EMULATOR_FAULTS has {part!r}, allowed are fail=N, die=CORE@N and nan=N")
        found[kind] = int(core or 0), int(number)
    return found


FAULTS = _parsed(os.environ.get("NEURON_EMULATOR_FAULTS", ""))


def before(number: int) -> None:
    """Raises DeviceError where the execution with this number is to fail."""
    if "fail" in FAULTS and number == FAULTS["fail"][1]:
        raise DeviceError(f"execution {number} failed ({INJECTED})")
    if "die" in FAULTS and number >= FAULTS["die"][1]:
        raise DeviceError(f"NeuronCore {FAULTS['die'][0]} does not answer: execution {number} failed ({INJECTED})")


def after(number: int, states: dict[int, list[torch.Tensor]]) -> None:
    """Spoils a state where it is to be; `states` are tensors per rank by parameter number."""
    if "nan" in FAULTS and number == FAULTS["nan"][1]:
        from .device import extension

        state = next(of_ranks[0] for of_ranks in states.values() if of_ranks[0].is_floating_point())
        extension.host_view(state).fill_(float("nan"))
