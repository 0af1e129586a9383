# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for `torch_neuronx.xla_impl.ops`: operations that are custom calls or HLO written by hand on a device.

    RmsNorm       x [..., hidden], weight [hidden]: AwsNeuronRmsNorm on a device, plain multiplications here
    TopK, Argmax, Softmax      over one dimension: custom calls on a device, torch's own here (Argmax's indices: int32)
    ConcatenateOp              torch.cat
    xla_hlo_call  NxDI's hand-written HLO (dynamic_update_slice into a cache), built with torch_xla's XlaBuilder; random
                  numbers, which that cannot build, become a parameter of the graph, see `uniform_like`
    nki_jit       a kernel: raises where one is called, but for the sampler's cumsum, which is torch's own here

It does not show what the custom calls compute on a device, nor that the compiler takes them.
"""

import torch
import torch_xla.core.xla_builder as xla_builder
import torch_xla.core.xla_op_registry as xla_op_registry


class RmsNorm:
    @staticmethod
    def apply(x, weight, eps, dim):
        return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps) * weight


class TopK:
    @staticmethod
    def apply(x, k, dim):
        return tuple(torch.topk(x, k, dim=dim))


class Argmax:
    @staticmethod
    def apply(x, dim, keepdim=False):
        return torch.argmax(x, dim=dim, keepdim=keepdim).to(torch.int32)


class Softmax:
    @staticmethod
    def apply(x, dim=-1, *args):
        return torch.softmax(x, dim=dim)


class ConcatenateOp:
    @staticmethod
    def apply(*tensors, dim=0):
        return torch.cat(tensors, dim=dim)


class _Type:
    """What NxDI writes as `scribe.u32` and `tensor.dtype[shape]`."""

    def __init__(self, name, builder):
        self.name, self.builder = name, builder

    def __getitem__(self, shape):
        return self

    def Constant(self, constant_value):
        return _Operand(xla_builder.Op.scalar(self.builder, constant_value, dtype=self.name))

    def DynamicUpdateSlice(self, operand, update, *start_indices):
        return _Operand(operand.op.dynamic_update_slice(update.op, [index.op for index in start_indices]))


class _Scribe:
    def __init__(self, builder):
        self._builder = builder

    def __getattr__(self, name):
        return _Type(name, self._builder)


class _Operand:
    def __init__(self, op):
        self.op = op

    @property
    def scribe(self):
        return _Scribe(self.op.builder())

    @property
    def dtype(self):
        return _Type(self.op.shape().dtype, self.op.builder())

    @property
    def sizes(self):
        return tuple(self.op.shape().sizes)


uniform: list[torch.Tensor] = []  # what `uniform_like` made since the trace began


def uniform_like(tensor):
    """Random numbers from 0 to 1 that whoever runs the graph is to draw anew for each execution."""
    uniform.append(torch.rand(tensor.shape, dtype=tensor.dtype, device="cpu").to(tensor.device))
    return uniform[-1]


def xla_hlo_call(function):
    if "Rng" in function.__code__.co_names:
        return uniform_like
    operation = xla_op_registry.register(
        function.__name__, lambda *ops, **kwargs: function(*map(_Operand, ops), **kwargs).op
    )

    def call(*tensors, **kwargs):
        with torch.device("cpu"):  # XlaBuilder makes its literals from CPU tensors
            return operation(*tensors, **kwargs)

    return call


def cumsum(x, output=None, axis=1):
    """Written into `output`, as the kernel of NxDI 0.8 has it, or returned, as 0.9's."""
    if output is None:
        return torch.cumsum(x, axis)
    output.copy_(torch.cumsum(x, axis))


class _Kernel:
    """Called bare or with a grid, `kernel[grid](...)`."""

    def __init__(self, kernel):
        self.kernel, self.name = kernel, getattr(kernel, "__name__", str(kernel))

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        if self.kernel is cumsum:
            return cumsum(*args, **kwargs)
        raise RuntimeError(f"the NKI kernel {self.name} cannot be traced without the Neuron SDK")


def nki_jit(*args, **kwargs):
    return _Kernel


def jit(kernel=None, **options):
    """`nki.jit`, bare or with options. NxD tells its kernels apart by `func_name`."""
    if kernel is None:
        return jit
    kernel.func_name = kernel.__name__
    return kernel
