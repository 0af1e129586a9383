# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed._cpu import ThreadGroup, refuse
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.utils import divide
from torch import Tensor, nn

from neuronx_distributed_inference.modules.attention.gqa import GroupQueryAttention_O, GroupQueryAttention_QKV
from neuronx_distributed_inference.modules.attention.utils import (
    apply_rotary_pos_emb,
    get_last_kv_window,
    move_heads_front,
    repeat_kv,
)
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager


@dataclass(frozen=True)
class NeuronAttentionBaseOutput:
    """Unpacks into the first four."""

    hidden_states: Tensor
    present_key_value: Any
    cos_cache: Tensor | None = None
    sin_cache: Tensor | None = None
    residual: Tensor | None = None
    attn_input_hidden_states: Tensor | None = None

    def __iter__(self):
        return iter((self.hidden_states, self.present_key_value, self.cos_cache, self.sin_cache))

    def __getitem__(self, i):
        return getattr(self, fields(self)[i].name)


class NeuronAttentionBase(nn.Module):
    """Attention over this rank's heads. Without a `rotary_emb` nothing is rotated (NoPE)."""

    def __init__(
        self,
        config,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int = None,
        rotary_emb=None,
        rope_theta: float = None,
        use_scaled_rope: bool = False,
        rms_norm_eps: float = None,
        use_qk_norm: bool = False,
        q_layernorm: Callable = None,
        k_layernorm: Callable = None,
        post_transpose_layernorm: bool = False,
        clip_qkv: float = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        num_cores_per_group: int = 1,
        sequence_parallel_enabled: bool = None,
        attention_chunk_size: int = None,
        is_post_global_attn_layer: bool = False,
        is_pre_global_attn_layer: bool = False,
        sliding_window: int = None,
        tensor_model_parallel_group: ThreadGroup | None = None,
        o_proj_layer_name: str = "o_proj",
        learned_sinks_size: int | None = None,
        optimize_interleave_attn: bool = False,
    ):
        super().__init__()
        refuse(
            sequence_parallel_enabled=sequence_parallel_enabled,
            attention_chunk_size=attention_chunk_size,
            learned_sinks_size=learned_sinks_size,
            use_qk_norm=use_qk_norm,
            qk_layernorm=config.neuron_config.qk_layernorm,
            post_transpose_layernorm=post_transpose_layernorm,
        )
        self.config, self.neuron_config = config, config.neuron_config
        self.tensor_model_parallel_group = (
            tensor_model_parallel_group or parallel_state.get_tensor_model_parallel_group()
        )
        self.tp_degree = self.tensor_model_parallel_group.size()
        self.rank_util = SPMDRank(self.neuron_config.tp_degree)
        self.torch_dtype = self.neuron_config.attention_dtype or self.neuron_config.torch_dtype
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rotary_emb, self.sliding_window = rotary_emb, sliding_window
        self.q_layernorm, self.k_layernorm = q_layernorm, k_layernorm
        self._make_projections(num_key_value_heads, qkv_bias, o_bias, clip_qkv, o_proj_layer_name)
        self.num_heads = divide(self.qkv_proj.num_attention_heads, self.tp_degree)
        self.num_key_value_heads = divide(self.qkv_proj.num_key_value_heads, self.tp_degree)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads

    def _make_projections(self, num_key_value_heads, qkv_bias, o_bias, clip_qkv, o_proj_layer_name) -> None:
        heads = dict(
            hidden_size=self.hidden_size,
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            tp_degree=self.tp_degree,
            dtype=self.torch_dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
        )
        self.qkv_proj = GroupQueryAttention_QKV(
            bias=qkv_bias,
            gather_output=False,
            fused_qkv=self.neuron_config.fused_qkv,
            clip_qkv=clip_qkv,
            **heads,
        )
        self.o_proj = GroupQueryAttention_O(
            bias=o_bias,
            input_is_parallel=True,
            layer_name=o_proj_layer_name,
            rpl_reduce_dtype=self.neuron_config.rpl_reduce_dtype,
            **heads,
        )

    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        """Rotate Q and K by cos and sin, which are made here if no layer before has made them."""
        refuse(use_polar_compatible_rope=use_polar_compatible_rope)
        if self.rotary_emb is not None:
            if cos_cache is None or sin_cache is None:
                cos_cache, sin_cache = self.rotary_emb(V, position_ids)
            Q, K = apply_rotary_pos_emb(Q, K, cos_cache, sin_cache)
        return Q, K, cos_cache, sin_cache

    def prep_qkv_tensors(
        self,
        position_ids,
        hidden_states,
        past_key_value,
        adapter_ids=None,
        cos_cache=None,
        sin_cache=None,
        rmsnorm=None,
        skip_rope=False,
        residual=None,
        use_polar_compatible_rope=False,
    ):
        """Q, K, V (B, heads, S, D), normed and rotated; cos, sin and the residual to hand on."""
        batch, length, _ = hidden_states.shape
        Q, K, V, residual = self.qkv_proj(hidden_states=hidden_states, residual=residual)
        Q = move_heads_front(Q, batch, length, self.num_heads, self.head_dim, self.q_layernorm)
        K = move_heads_front(K, batch, length, self.num_key_value_heads, self.head_dim, self.k_layernorm)
        V = move_heads_front(V, batch, length, self.num_key_value_heads, self.head_dim)
        if not skip_rope:
            rope = position_ids, cos_cache, sin_cache, use_polar_compatible_rope
            Q, K, cos_cache, sin_cache = self.apply_rotary_embedding(Q, K, V, *rope)
        return Q, K, V, cos_cache, sin_cache, residual

    def perform_prefill(self, Q, K, V, q_len, bsz, attention_mask) -> Tensor:
        """Causal attention within the prompt (B, heads, S, D). Padding on the right is behind every real query."""
        return F.scaled_dot_product_attention(Q, K, V, is_causal=True, enable_gqa=True)

    def perform_prefill_windowed_attn(self, Q, K, V, q_len, bsz, attention_mask, window_size) -> Tensor:
        """The same, each token seeing `window_size` tokens: in blocks of that many, which see themselves and the block
        before."""
        K, V = (repeat_kv(x, self.num_key_value_groups) for x in (K, V))
        Q, K, V = (F.pad(x, (0, 0, 0, -q_len % window_size)).unflatten(2, (-1, window_size)) for x in (Q, K, V))
        K, V = (torch.cat([F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x], 3) for x in (K, V))
        query, key = torch.arange(window_size)[:, None], torch.arange(2 * window_size)
        is_first = torch.arange(Q.shape[2])[:, None, None] == 0
        mask = (key > query) & (key <= query + window_size) & ~(is_first & (key < window_size))
        return F.scaled_dot_product_attention(Q, K, V, attn_mask=mask).flatten(2, 3)[:, :, :q_len]

    def _attend_in_window(self, Q, K, V, position_ids, past_key_value, attention_mask) -> tuple[Tensor, tuple]:
        """The output, and the K and V for the cache, which holds the window but for the active token."""
        window = self.sliding_window
        if past_key_value is None:
            output = self.perform_prefill_windowed_attn(Q, K, V, Q.shape[2], Q.shape[0], attention_mask, window)
            return output, get_last_kv_window(window, position_ids, K, V)
        seen = [torch.cat([old[:, :, : window - 1], new], 2) for old, new in zip(past_key_value, (K, V))]
        mask = F.pad(attention_mask, (0, 1), value=True)
        return self.compute_for_token_gen(Q, K, V, position_ids, seen, mask, None), (K, V)

    def compute_for_token_gen(
        self, Q, K, V, position_ids, past_key_value, attention_mask, active_mask, is_prefix_caching=False
    ) -> Tensor:
        """Attention of tokens (B, heads, S, D) to the cache, in which their own K and V stand already.

        The query heads that share a KV head go in as its queries: the cache is read once and not expanded.
        """
        shared, length = (self.num_key_value_heads, self.num_key_value_groups), Q.shape[2]
        if length > 1:
            attention_mask = attention_mask.repeat(1, 1, self.num_key_value_groups, 1)
        grouped = Q.unflatten(1, shared).flatten(2, 3)
        output = F.scaled_dot_product_attention(grouped, *past_key_value, attn_mask=attention_mask)
        return output.unflatten(2, (self.num_key_value_groups, length)).flatten(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: tuple[Tensor] | None = None,
        active_mask: Tensor | None = None,
        adapter_ids=None,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
        rmsnorm=None,
        rotary_position_ids: Tensor | None = None,
        kv_mgr: KVCacheManager | None = None,
        get_kv_per_layer: bool = False,
        update_kv_per_layer: bool = False,
        residual: Tensor | None = None,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs,
    ) -> NeuronAttentionBaseOutput:
        """Hidden states (B, S, hidden) -> the same. A `past_key_value` makes it one step of token generation:
        views of this layer's cache, into which `kv_mgr` writes the new K and V first."""
        batch, length, _ = hidden_states.shape
        rotary_position_ids = position_ids if rotary_position_ids is None else rotary_position_ids
        Q, K, V, cos_cache, sin_cache, residual = self.prep_qkv_tensors(
            rotary_position_ids,
            hidden_states.to(self.torch_dtype),
            past_key_value,
            cos_cache=cos_cache,
            sin_cache=sin_cache,
            residual=residual,
        )
        present, output = (K, V), None
        if self.sliding_window:  # before the cache is written: the oldest token in sight leaves it in this very step
            output, present = self._attend_in_window(Q, K, V, position_ids, past_key_value, attention_mask)
        if update_kv_per_layer:
            present = kv_mgr.update_kv_by_layer_id(kv_per_layer=present, position_ids=position_ids, **kwargs)
        if output is None and past_key_value is None:
            output = self.perform_prefill(Q, K, V, length, batch, attention_mask)
        elif output is None:
            output = self.compute_for_token_gen(Q, K, V, position_ids, past_key_value, attention_mask, active_mask)
        output = self.o_proj(output.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim))
        output = output.to(hidden_states.dtype)
        return NeuronAttentionBaseOutput(output, present, cos_cache, sin_cache, residual)
