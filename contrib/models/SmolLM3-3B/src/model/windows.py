# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention: which layers have it, their caches, and the switches that do not go with it."""

from collections.abc import Sequence
from typing import Any

from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.autobucketing import generate_buckets_for_cte, generate_buckets_for_tkg
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager

from ..errors import SmolLM3Error

_PRIVATE_HOOKS = ("_get_index_to_update_new_position",)
# each keeps or reads the cache in a way of its own
EXCLUDED = (
    "attn_kernel_enabled", "k_cache_transposed", "flash_decoding_enabled", "apply_seq_ids_mask", "is_block_kv_layout",
    "is_prefix_caching", "windowed_context_encoding_size", "speculation_length",
)  # fmt: skip


def layer_windows(config: InferenceConfig) -> list[int | None]:
    """Lists each layer's window; None is full attention, and so is a window as long as the cache."""
    window = config.sliding_window
    if window is None or window >= config.neuron_config.max_length:
        return [None] * config.num_hidden_layers
    return [window if layer_type == "sliding_attention" else None for layer_type in config.layer_types]


def check_sliding_window(config: InferenceConfig) -> None:
    """Raises SmolLM3Error for a NeuronConfig that the library's windows do not go with."""
    if not any(layer_windows(config)):
        return
    window, neuron_config = config.sliding_window, config.neuron_config
    for name in EXCLUDED:
        if getattr(neuron_config, name, None):
            raise SmolLM3Error(
                f"{name} is {getattr(neuron_config, name)!r} with a sliding_window of {window}; leave it out"
            )
    shortest_context, token_generation_buckets = generate_buckets_for_cte(config)[0], generate_buckets_for_tkg(config)
    if shortest_context < window - 1:
        raise SmolLM3Error(
            f"prompts are encoded at a length of {shortest_context}, at least {window - 1} is needed for a "
            f"sliding_window of {window}: raise max_context_length or the first of context_encoding_buckets"
        )
    if len(token_generation_buckets) > 1:
        raise SmolLM3Error(
            f"token_generation_buckets is {token_generation_buckets}, with a sliding_window one is allowed: "
            f"[{neuron_config.max_length}]"
        )


class SlidingWindowKVCacheManager(KVCacheManager):
    """A KV cache that is as long as the window on sliding layers, and whole on the others.

    On a sliding layer position p is in line p % (window - 1). The library's own manager takes the window for every
    layer.
    """

    def __init__(self, config: InferenceConfig, num_kv_head: int, global_rank: Any, windows: Sequence[int | None]):
        self.windows = windows
        cache_sizes = [window or config.neuron_config.max_length for window in windows]
        super().__init__(config, num_kv_head, global_rank=global_rank, layer_to_cache_size_mapping=cache_sizes)

    def _get_index_to_update_new_position(self, seq_ids, scatter_index, position_ids, full_k, transposed, layer_idx):
        if self.windows[layer_idx]:
            position_ids = position_ids % (self.windows[layer_idx] - 1)
        return super()._get_index_to_update_new_position(
            seq_ids, scatter_index, position_ids, full_k, transposed, layer_idx
        )
