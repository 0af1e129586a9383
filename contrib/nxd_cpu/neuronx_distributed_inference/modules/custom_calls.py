# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn


class CustomRMSNorm(nn.Module):
    """x / rms(x) in float32, times weight in the dtype of x."""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-6):
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = None if hidden_size is None else nn.Parameter(torch.ones(hidden_size), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        x = x.to(hidden_states.dtype)
        return x if self.weight is None else self.weight * x
