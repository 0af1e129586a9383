"""Scaled rotary embeddings, with transformers' own `ROPE_INIT_FUNCTIONS` as the formula. No Neuron import.

Called inside the traced forward, on the device of its input: so the frequencies are computed in the graph from scalars, as
NxD Inference's own rotary modules do, and no tensor is baked in.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ScaledRotaryEmbedding(nn.Module):
    """linear, llama3 or yarn, for a config whose `rope_scaling` is not None.

    The attention factor (of yarn) is folded into cos and sin.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.rope = SimpleNamespace(
            rope_theta=config.rope_theta,
            rope_scaling=dict(config.rope_scaling),
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
        )
        self.init = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]]

    def get_inv_freqs(self, device: torch.device | None = None) -> torch.Tensor:
        """Inverse frequencies [head_dim / 2], float32."""
        return self._parameters_on(device)[0]

    def _parameters_on(self, device: torch.device | None) -> tuple[torch.Tensor, float]:
        device = device or torch.device("cpu")
        with device:  # some of the formulas make their first tensor without naming a device
            return self.init(self.rope, device)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [batch, seq] -> cos and sin [batch, seq, head_dim] in x's dtype."""
        inv_freq, attention_factor = self._parameters_on(x.device)
        angles = position_ids[:, :, None].float() * inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * attention_factor).to(x.dtype), (angles.sin() * attention_factor).to(x.dtype)
