# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor, nn


def move_heads_front(
    tensor: Tensor,
    bsz: int,
    seq_len: int,
    num_head: int,
    head_dim: int,
    layernorm=None,
    post_transpose_layernorm: bool = False,
) -> Tensor:
    """(B, S, H * D) -> (B, H, S, D), with `layernorm` over D before or after the transposition."""
    tensor = tensor.view(bsz, seq_len, num_head, head_dim)
    if layernorm is not None and not post_transpose_layernorm:
        tensor = layernorm(tensor)
    tensor = tensor.transpose(1, 2).contiguous()
    return layernorm(tensor) if layernorm is not None and post_transpose_layernorm else tensor


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """(B, H, S, D) -> (B, H * n_rep, S, D), every head n_rep times in a row."""
    return hidden_states.repeat_interleave(n_rep, dim=1) if n_rep > 1 else hidden_states


def get_last_kv_window(window_size, position_ids, latest_k, latest_v):
    """A prompt's last window_size - 1 K and V (B, H, S, D), position p at p % (window_size - 1)."""
    last, slots = position_ids.amax(dim=1, keepdim=True), torch.arange(window_size - 1)
    index = (last - (last - slots) % (window_size - 1)).clamp(min=0)[:, None, :, None]
    return tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (latest_k, latest_v))


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, H, S, D) by cos and sin (B, S, D)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


class RotaryEmbedding(nn.Module):
    """cos and sin (B, S, dim) of positions (B, S), in the dtype of x."""

    def __init__(self, dim, max_position_embeddings=2048, base=10000, factor: float | None = None):
        super().__init__()
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.factor = factor
        self.register_buffer("inv_freq", None, persistent=False)

    def get_inv_freqs(self, device: torch.device | None = None) -> Tensor:
        """float32 (dim / 2,)"""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float, device=device) / self.dim
        inv_freq = 1.0 / self.base**exponents
        return inv_freq if self.factor is None else inv_freq / self.factor

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.get_inv_freqs(x.device) if self.inv_freq is None else self.inv_freq.float()
        angles = position_ids.unsqueeze(-1).float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
