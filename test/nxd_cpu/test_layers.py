"""Layers at several TP degrees, each with the weights that the sharder cuts for it, against the whole weights."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from neuronx_distributed._cpu import RankThreads
from neuronx_distributed._shard import shard_checkpoint
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed_inference.modules.attention.gqa import (
    GQA,
    GroupQueryAttention_O,
    GroupQueryAttention_QKV,
    determine_sharding_strategy,
    get_shardable_head_counts,
)
from torch import nn

TP = [1, 2, 3, 4]


class Only(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


def on_all_ranks(tp, make, checkpoint, call):
    """call(layer) on every rank, after sharding `checkpoint` (names without "layer.")."""
    with parallel_state._model_parallel(tp):
        layers = [Only(make()).eval() for _ in range(tp)]
    whole = {f"layer.{name}": tensor.clone() for name, tensor in checkpoint.items()}
    for layer, shard in zip(layers, shard_checkpoint(whole, layers[0], range(tp))):
        layer.load_state_dict(shard)
    return RankThreads(tp).run(lambda rank: call(layers[rank].layer))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("gather", [True, False])
def test_column_parallel(tp, gather):
    weight, bias, x = torch.randn(10, 6), torch.randn(10), torch.randn(2, 3, 6)
    make = partial(ColumnParallelLinear, 6, 10, bias=not gather, gather_output=gather, pad=True)
    checkpoint = dict(weight=weight) if gather else dict(weight=weight, bias=bias)
    outputs = on_all_ranks(tp, make, checkpoint, lambda layer: layer(x))
    output = outputs[0] if gather else torch.cat(outputs, -1)[..., :10]
    torch.testing.assert_close(output, F.linear(x, weight, None if gather else bias))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_parallel(tp, dtype):
    weight, bias, x = torch.randn(5, 10).to(dtype), torch.randn(5).to(dtype), torch.randn(2, 3, 10).to(dtype)
    make = partial(RowParallelLinear, 10, 5, pad=True, dtype=dtype, input_is_parallel=True)
    parts = F.pad(x, (0, -10 % tp)).chunk(tp, -1)

    def call(layer):
        return layer(parts[layer.tensor_parallel_group.rank()])

    for output in on_all_ranks(tp, make, dict(weight=weight, bias=bias), call):
        # every rank's part is rounded once more: half a unit in the last place of up to 8, 2**-6, each; not measured
        tolerance = {} if dtype == torch.float32 else dict(atol=0.05, rtol=0.02)
        torch.testing.assert_close(output, F.linear(x, weight, bias), **tolerance)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("across_embedding", [True, False])
def test_embedding(tp, across_embedding):
    weight, ids = torch.randn(11, 10), torch.tensor([[0, 10, 3], [7, 7, 1]])
    make = partial(
        ParallelEmbedding, 11, 10, shard_across_embedding=across_embedding, use_spmd_rank=not across_embedding, pad=True
    )
    checkpoint = dict(weight=weight)
    if not across_embedding:
        checkpoint["rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
    for output in on_all_ranks(tp, make, checkpoint, lambda layer: layer(ids)):
        assert torch.equal(output, weight[ids])


def test_padding_wants_the_length_that_the_layer_has():
    make = partial(ParallelEmbedding, 11, 10, shard_across_embedding=True, pad=True)
    with pytest.raises(RuntimeError, match="layer.weight has 9 in dimension 1, not 10"):
        on_all_ranks(3, make, dict(weight=torch.randn(11, 9)), lambda layer: None)


def test_layer_before_initialization_has_one_rank():
    parallel_state.destroy_model_parallel()
    layer = ColumnParallelLinear(4, 4)
    assert layer.tensor_parallel_group.size() == 1
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()


def test_one_rank_leaves_no_collective():
    with parallel_state._model_parallel(1):
        x = torch.ones(2, 2)
        for name in ("reduce_from", "gather_from"):
            assert getattr(mappings, f"{name}_tensor_model_parallel_region")(x) is x


@pytest.mark.parametrize(
    "tp, heads, kv, strategy, counts",
    [
        (1, 16, 4, GQA.CONVERT_TO_MHA, (16, 4)),
        (2, 16, 4, GQA.CONVERT_TO_MHA, (16, 4)),
        (4, 16, 4, GQA.REPLICATE_TO_TP_DEGREE, (16, 4)),
        (8, 16, 4, GQA.REPLICATE_TO_TP_DEGREE, (16, 8)),
        (32, 16, 4, GQA.REPLICATE_TO_TP_DEGREE, (32, 32)),
        (3, 16, 4, GQA.CONVERT_TO_MHA, (18, 18)),
        (3, 16, 16, GQA.CONVERT_TO_MHA, (18, 18)),
    ],
)
def test_head_counts(tp, heads, kv, strategy, counts):
    assert determine_sharding_strategy(tp, kv) == strategy
    assert get_shardable_head_counts(tp, heads, kv, strategy) == counts


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tp, heads, kv", [(1, 4, 2), (2, 4, 2), (4, 4, 2), (2, 6, 2), (6, 6, 3), (4, 6, 2), (3, 4, 4)])
def test_attention_projections(tp, heads, kv, fused):
    """Every query head meets its own KV head on its rank, and padded heads add nothing."""
    dim, hidden = 2, 6
    group = heads // kv
    q, k, v, o = (torch.randn(n * dim, hidden) for n in (heads, kv, kv, heads))
    x = torch.randn(1, 1, hidden)
    checkpoint = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), (q, k, v)))
    if fused:
        checkpoint = {"Wqkv.weight": torch.cat((q, k, v))}
    checkpoint["o_proj.weight"] = o.t()

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            layout = (hidden, dim, heads, kv, tp)
            self.qkv_proj = GroupQueryAttention_QKV(*layout, gather_output=False, fused_qkv=fused)
            self.o_proj = GroupQueryAttention_O(*layout, input_is_parallel=True)

        def forward(self):  # a stand-in for attention that needs a query and its KV head on the same rank
            query, key, value, _ = self.qkv_proj(x)
            query, key, value = (t.unflatten(-1, (-1, dim)) for t in (query, key, value))
            repeats = query.shape[2] // key.shape[2]
            key, value = (t.repeat_interleave(repeats, 2) for t in (key, value))
            return self.o_proj((query * key * value).flatten(2))

    query, key, value = (F.linear(x, w).unflatten(-1, (-1, dim)) for w in (q, k, v))
    key, value = (t.repeat_interleave(group, 2) for t in (key, value))
    expected = F.linear((query * key * value).flatten(2), o.t())
    for output in on_all_ranks(tp, Attention, checkpoint, lambda layer: layer()):
        torch.testing.assert_close(output, expected)


def test_kv_heads_that_nxdi_cannot_spread():
    checkpoint = {f"{name}_proj.weight": torch.randn(n * 2, 6) for name, n in dict(q=16, k=4, v=4).items()}
    with parallel_state._model_parallel(3):
        layer = GroupQueryAttention_QKV(6, 2, 16, 4, 3, gather_output=False)
        with pytest.raises(RuntimeError, match="expand the checkpoint's K and V to 16 heads"):
            layer.preshard_hook({f"a.{name}": tensor for name, tensor in checkpoint.items()}, "a.qkv_proj.weight")


@pytest.mark.parametrize("option", [dict(sequence_parallel_enabled=True), dict(stride=2)])
def test_options_left_out(option):
    refused = pytest.raises(NotImplementedError, match=f"does not support {next(iter(option))}")
    with parallel_state._model_parallel(1), refused:
        ColumnParallelLinear(4, 4, **option)
