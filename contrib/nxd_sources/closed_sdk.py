# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the closed parts of the Neuron SDK, so that the open NxD and NxDI sources can be imported.

What each stands for:

    torch_xla      the XLA device and its operations          torch_neuronx  tracing, and the runtime's tensors
    neuronxcc      the compiler, and NKI inside it            nki, nkilib    the kernel language and its library
    libneuronxla   the compiler's driver                      torchvision    image models; only where it is missing

The library's CPU mode calls none of them: they only have to import.
"""

import os

from . import inert

CLOSED = ("torch_neuronx", "torch_xla", "neuronxcc", "nki", "nkilib", "libneuronxla", "torchvision")
PLATFORM = {"get_platform_target": lambda: "trn1"}  # the sources ask while they are imported


class _TorchClasses:
    def __getattr__(self, name):
        return type(name, (), {})


def install():
    """Make the closed modules importable, except those that are installed, and put NxD in CPU mode."""
    os.environ["NXD_CPU_MODE"] = "1"
    inert.install(CLOSED, {"torch_neuronx.utils": PLATFORM, "torch_neuronx.utils.utils": PLATFORM})

    import torch

    torch.classes.neuron = _TorchClasses()
