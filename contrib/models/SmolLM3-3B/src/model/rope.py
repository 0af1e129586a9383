# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary embeddings, with transformers' own `ROPE_INIT_FUNCTIONS` as the formula. No Neuron import.

The modules are called inside the traced forward, on the device of their input. `ScaledRotaryEmbedding` computes the
frequencies in the graph from scalars, as NxD Inference's own rotary modules do it, and no tensor is baked in.
`RotaryTable` is computed in float64, which a device has not: its rows are looked up.
"""

import functools
import json
import math
from dataclasses import asdict

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .config import CheckpointConfig


def llama3_parameters(config: CheckpointConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """Computes transformers' llama3 formula, bit for bit, whose comparisons with Python floats XLA would do in float64.

    Returns the inverse frequencies [head_dim / 2] and the attention factor.
    """
    scaling = config.rope_scaling
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    positions = scaling["original_max_position_embeddings"]
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["default"](config, device)
    wavelengths = 2 * math.pi / inv_freq
    is_long = wavelengths > torch.full_like(wavelengths, positions / low)
    is_short = wavelengths < torch.full_like(wavelengths, positions / high)
    scaled = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (positions / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(is_long | is_short, scaled, between), attention_factor


class ScaledRotaryEmbedding(nn.Module):
    """Rotary embeddings scaled by linear, llama3 or yarn, for a config whose `rope_scaling` is not None.

    The attention factor of yarn is folded into cos and sin.
    """

    def __init__(self, config: CheckpointConfig):
        super().__init__()
        self.config = config
        rope_type = config.rope_scaling["rope_type"]
        self.rope_init_fn = llama3_parameters if rope_type == "llama3" else ROPE_INIT_FUNCTIONS[rope_type]

    def get_inv_freqs(self, device: torch.device | None = None) -> torch.Tensor:
        """Returns the inverse frequencies [head_dim / 2], float32."""
        return self._rope_parameters(device)[0]

    def _rope_parameters(self, device: torch.device | None) -> tuple[torch.Tensor, float]:
        device = device or torch.device("cpu")
        with device:  # some of the formulas make their first tensor without naming a device
            return self.rope_init_fn(self.config, device)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps position_ids [batch, seq] to cos and sin [batch, seq, head_dim] in the dtype of `x`."""
        inv_freq, attention_factor = self._rope_parameters(x.device)
        angles = position_ids[:, :, None].float() * inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * attention_factor).to(x.dtype), (angles.sin() * attention_factor).to(x.dtype)


class _InFloat64(TorchFunctionMode):
    """Makes float64 of every float32 that is asked for by name, as transformers' formulas do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        wider = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*wider, **named)


def parameters_in_float64(config: CheckpointConfig) -> tuple[torch.Tensor, float]:
    """Returns the inverse frequencies [head_dim / 2] in float64, and the attention factor."""
    rope_type = "default" if config.rope_scaling is None else config.rope_scaling["rope_type"]
    cpu = torch.device("cpu")
    with cpu, _InFloat64():
        return ROPE_INIT_FUNCTIONS[rope_type](config, cpu)


@functools.lru_cache(maxsize=2)
def _table(config_json: str, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin [positions, head_dim / 2], float32: every layer's module has the same two."""
    inv_freq, attention_factor = parameters_in_float64(CheckpointConfig(**json.loads(config_json)))
    angles = torch.arange(positions, dtype=torch.float64, device="cpu")[:, None] * inv_freq
    return (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()


class RotaryTable(nn.Module):
    """cos and sin of the positions 0 to `positions` - 1, scaled or not, computed in float64 and kept in float32.

    In float32 an angle at position 131,071 is off by up to 8e-3, as transformers' and NxD Inference's are; here cos
    and sin are rounded once. Both tables are constants of each graph, 4 * head_dim bytes per position together.
    """

    def __init__(self, config: CheckpointConfig, positions: int):
        super().__init__()
        self.config = config
        cos, sin = _table(json.dumps(asdict(config)), positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps position_ids [batch, seq] to cos and sin [batch, seq, head_dim] in the dtype of `x`."""
        halves = (nn.functional.embedding(position_ids, table) for table in (self.cos, self.sin))
        cos, sin = (torch.cat((half, half), dim=-1).to(x.dtype) for half in halves)
        return cos, sin
