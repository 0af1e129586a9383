# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that are computed when rows of them are asked for: merged with an adapter, quantized."""

from typing import Any

import torch

from .quantization import least_scale

FP8_LARGEST = 240.0  # what the library scales to, not the 448 of float8_e4m3fn
CHUNK_ROWS = 64


class MergedRows:
    """A weight merged with LoRA: base [out, in] + scaling * b [out, rank] @ a [rank, in], rounded to `dtype`.

    With DoRA's magnitude [out] each row is scaled to that length.
    """

    def __init__(
        self,
        base: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        magnitude: torch.Tensor | None,
        dtype: torch.dtype,
    ):
        self.base, self.a, self.b, self.scaling, self.magnitude, self.dtype = base, a, b, scaling, magnitude, dtype
        self.shape = base.shape

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: slice) -> torch.Tensor:
        merged = self.base[index].to(self.dtype) + self.b[index].float() @ self.a.float() * self.scaling
        if self.magnitude is not None:
            merged *= (self.magnitude[index].float() / torch.linalg.norm(merged, dim=1)).unsqueeze(1)
        return merged.to(self.dtype)


class QuantizedRows:
    """A weight [out, in] as NxD Inference quantizes it, with `scale`, float32: [out, 1] per channel, or [1].

    Reference: `quantization_utils.py` and `observer.py` of NxD 2.28 and 2.29, torch's `MinMaxObserver`.
    """

    def __init__(self, tensor: Any, quantization_type: str, quantization_dtype: str):
        self.tensor, self.shape = tensor, tensor.shape
        self.per_channel, self.is_int8 = quantization_type == "per_channel_symmetric", quantization_dtype == "int8"
        chunks = (tensor[row : row + CHUNK_ROWS].float() for row in range(0, len(tensor), CHUNK_ROWS))
        largest = torch.cat([chunk.abs().amax(dim=1, keepdim=True) for chunk in chunks])
        if not self.per_channel:
            largest = largest.amax().reshape(1)
        full = (127 if self.per_channel else 127.5) if self.is_int8 else FP8_LARGEST
        self.scale = (largest / full).clamp(min=least_scale(quantization_dtype, self.per_channel))

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: slice) -> torch.Tensor:
        weight, scale = self.tensor[index].float(), self.scale[index] if self.per_channel else self.scale
        if self.is_int8:  # by the reciprocal, as torch's quantize_per_tensor and quantize_per_channel do
            return (weight * (1 / scale)).round().clamp(-128, 127).to(torch.int8)
        return (weight / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
