# SPDX-License-Identifier: Apache-2.0
"""The C++ extension (device.cpp), and torch's module for its device, `torch.privateuseone`."""

import types

import neuron_emulator_device as extension
import torch

from . import CORES

__all__ = ["extension"]


def _device_module() -> types.ModuleType:
    """What torch asks of a backend from outside; without it `tensor.to("privateuseone:0")` fails."""
    module = types.ModuleType("torch.privateuseone")
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.current_device = lambda: 0
    module.device_count = lambda: CORES
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.manual_seed_all = lambda seed: None
    return module


torch._register_device_module("privateuseone", _device_module())
