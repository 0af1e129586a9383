# SPDX-License-Identifier: Apache-2.0
"""Tensors padded with zeros, whole or when rows of them are asked for."""

from typing import Any

import torch


def pad_with_zeros(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Returns `tensor` with its dimension `dim`, 0 or 1, made `size` long."""
    padding = size - tensor.shape[dim]
    if not padding:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = padding
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


class PaddedRows:
    """A tensor [out, in], or rows that are computed, with zeros behind them: `size` rows (`dim` 0) or columns (1)."""

    def __init__(self, tensor: Any, dim: int, size: int):
        self.tensor, self.dim, self.size = tensor, dim, size
        self.shape = torch.Size([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> torch.Tensor:
        size = len(range(*index.indices(len(self)))) if self.dim == 0 else self.size
        return pad_with_zeros(self.tensor[index], self.dim, size)
