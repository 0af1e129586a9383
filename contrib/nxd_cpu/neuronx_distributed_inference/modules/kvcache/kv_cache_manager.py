# SPDX-License-Identifier: Apache-2.0
import torch
from neuronx_distributed._cpu import refuse, weight_device
from neuronx_distributed.parallel_layers.utils import divide
from torch import Tensor, nn

from neuronx_distributed_inference.modules.attention.gqa import determine_sharding_strategy, get_shardable_head_counts


class KVCacheManager(nn.Module):
    """K and V of every layer, (batch, KV heads per rank, max_length, head_dim) each, written in place. With a
    `layer_to_cache_size_mapping` every layer has a length of its own.

    `seq_ids` (B,) say which line of the cache a row of the batch is. A negative one, -1 - line, marks a row that only
    fills the batch up: its line stays as it is.
    """

    def __init__(
        self,
        config,
        num_kv_head,
        global_rank=None,
        attention_chunk_size=None,
        sliding_window=None,
        layer_to_cache_size_mapping=None,
        **kwargs,
    ):
        super().__init__()
        refuse(attention_chunk_size=attention_chunk_size)
        neuron_config, tp_degree = config.neuron_config, config.neuron_config.tp_degree
        strategy = determine_sharding_strategy(tp_degree, num_kv_head)
        _, heads = get_shardable_head_counts(tp_degree, config.num_attention_heads, num_kv_head, strategy)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = neuron_config.attention_dtype or neuron_config.torch_dtype
        self.layer_to_cache_size_mapping = layer_to_cache_size_mapping
        self.past_key_values = nn.ParameterList(
            nn.Parameter(
                torch.zeros(
                    neuron_config.kv_cache_batch_size,
                    divide(heads, tp_degree),
                    length,
                    head_dim,
                    dtype=dtype,
                    device=weight_device(),
                ),
                requires_grad=False,
            )
            for length in layer_to_cache_size_mapping or [neuron_config.max_length] * config.num_hidden_layers
            for _ in "kv"
        )

    def get_kv_by_layer_id(self, idx, seq_len: int, skip_slice=False, **kwargs) -> tuple[Tensor, Tensor]:
        """Views of the first `seq_len` positions of K and V."""
        k_cache, v_cache = self.past_key_values[2 * idx], self.past_key_values[2 * idx + 1]
        return (k_cache, v_cache) if skip_slice else (k_cache[:, :, :seq_len], v_cache[:, :, :seq_len])

    def get_cache(self, seq_len: int, skip_slice=False, **kwargs) -> list[tuple[Tensor, Tensor]]:
        layers = range(len(self.past_key_values) // 2)
        return [self.get_kv_by_layer_id(idx=idx, seq_len=seq_len, skip_slice=skip_slice) for idx in layers]

    def _rows(self, seq_ids: Tensor, position_ids: Tensor, is_for_context_encoding: bool, idx: int = 0) -> Tensor:
        """Where the new K and V go in the layer's cache seen as rows of head_dim, ordered (B, heads, positions)."""
        _, heads, length, _ = self.past_key_values[2 * idx].shape
        lines = torch.where(seq_ids < 0, -1 - seq_ids, seq_ids)
        if is_for_context_encoding:  # a prompt begins at 0; what its padding writes, decoding writes over
            position_ids = torch.arange(position_ids.shape[1]).unsqueeze(0)
        head_rows = (lines.unsqueeze(1) * heads + torch.arange(heads)).unsqueeze(2) * length
        return (head_rows + position_ids.unsqueeze(1)).flatten()

    def update_kv_by_layer_id(
        self,
        idx,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        kv_per_layer: tuple[Tensor, Tensor],
        seq_len: int,
        scatter_index: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor]:
        """Write K and V (B, heads, S, head_dim) into layer `idx` at `scatter_index` (see `_rows`); its caches."""
        rows = scatter_index
        if self.layer_to_cache_size_mapping:
            index = self._get_index_to_update_new_position(
                seq_ids, None, position_ids[:, : kv_per_layer[0].shape[2]], kv_per_layer[0], False, idx
            )
            rows = self._rows(seq_ids, index[:, 0, :, 0], is_for_context_encoding, idx)
        caches = self.past_key_values[2 * idx], self.past_key_values[2 * idx + 1]
        for cache, latest in zip(caches, kv_per_layer):
            cache_rows = cache.view(-1, cache.shape[-1])
            if seq_ids.shape[0] > 1:  # a batch of one is never filled up
                old = cache_rows.index_select(0, rows).view(latest.shape)
                latest = torch.where((seq_ids < 0).view(-1, 1, 1, 1), old, latest.to(cache.dtype))
            cache_rows.index_copy_(0, rows, latest.to(cache.dtype).flatten(0, 2))
        return caches

    def _get_index_to_update_new_position(
        self, seq_ids, scatter_index, position_ids, full_k, transposed: bool, layer_idx: int
    ) -> Tensor:
        """Where in its cache a layer puts each position, in the shape of `full_k`."""
        return position_ids[:, None, :, None].expand_as(full_k)
