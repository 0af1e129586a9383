# SPDX-License-Identifier: Apache-2.0
"""In the place of neuronx-cc: what would be compiled is kept, marked as what it is."""

import contextlib
from typing import Any

from . import neff


def neuron_xla_compile(module_bytes: bytes, *args, **kwargs) -> bytes:
    return neff.wrap(module_bytes)


def neuron_xla_wlo_compile(module_bytes: bytes, *args, **kwargs) -> tuple[bytes, None]:
    """The graph, and no other layout for its weights."""
    return neff.wrap(module_bytes), None


def modules(stand_ins: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """neuron_hlo's stand-ins, which end where the compiler is called, and what comes after."""
    return {
        **stand_ins,
        "torch_neuronx.contexts": {"disable_nrt_load": contextlib.nullcontext},
        "libneuronxla": {"neuron_xla_compile": neuron_xla_compile, "neuron_xla_wlo_compile": neuron_xla_wlo_compile},
    }
