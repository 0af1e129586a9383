import pytest

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.heads import ShardingPlan
from smollm3_neuron.weights.rank_layout import rank_outputs

# 16 query and 4 KV heads: tp -> (strategy, query heads and KV heads per rank, expansion)
OF_THE_3B = {
    1: ("keep", 16, 4, 1),
    2: ("keep", 8, 2, 1),
    3: ("convert-to-mha", 6, 6, 4),
    4: ("keep", 4, 1, 1),
    5: ("convert-to-mha", 4, 4, 4),
    6: ("convert-to-mha", 3, 3, 4),
    7: ("convert-to-mha", 3, 3, 4),
    8: ("replicate", 2, 1, 1),
    12: ("replicate", 2, 1, 1),
    16: ("replicate", 1, 1, 1),
    24: ("replicate", 1, 1, 1),
    32: ("replicate", 1, 1, 1),
}


@pytest.mark.parametrize("tp_degree", OF_THE_3B)
def test_of_the_3b(tp_degree):
    plan = ShardingPlan(tp_degree, 16, 4)
    found = (plan.strategy, plan.attention_heads_per_rank, plan.key_value_heads_per_rank, plan.kv_expansion)
    assert found == OF_THE_3B[tp_degree]


def test_9_query_and_3_kv_heads():
    assert ShardingPlan(2, 9, 3).strategy == "convert-to-mha"
    assert ShardingPlan(2, 9, 3).attention_heads_per_rank == 5
    assert ShardingPlan(3, 9, 3).strategy == "keep"


@pytest.mark.parametrize("tp_degree", [0, -1, 33, 2.0, True, "2"])
def test_tp_degrees_that_there_are_not(tp_degree):
    with pytest.raises(SmolLM3Error, match="tp_degree is .*1 to 32"):
        ShardingPlan(tp_degree, 16, 4)


def _(*heads):
    return [None if head == "-" else head for head in heads]


@pytest.mark.parametrize(
    "tp_degree, heads, kv_heads, of_queries, of_kv",
    [
        (2, 4, 2, [[0, 1], [2, 3]], [[0], [1]]),
        (4, 4, 2, [[0], [1], [2], [3]], [[0], [0], [1], [1]]),
        # replicated: the padding stands at the end of each KV head's group
        (6, 9, 3, [_(0, 1), _(2, "-"), _(3, 4), _(5, "-"), _(6, 7), _(8, "-")], [[0], [0], [1], [1], [2], [2]]),
        # one KV head per query head, padding at the end of all
        (2, 9, 3, [_(0, 1, 2, 3, 4), _(5, 6, 7, 8, "-")], [_(0, 0, 0, 1, 1), _(1, 2, 2, 2, "-")]),
        (3, 4, 2, [_(0, 1), _(2, 3), _("-", "-")], [_(0, 0), _(1, 1), _("-", "-")]),
    ],
)
def test_which_head_stands_where(tp_degree, heads, kv_heads, of_queries, of_kv):
    plan = ShardingPlan(tp_degree, heads, kv_heads)
    assert [plan.query_heads(rank) for rank in range(tp_degree)] == of_queries
    assert [plan.key_value_heads(rank) for rank in range(tp_degree)] == of_kv


@pytest.mark.parametrize("heads, kv_heads", [(16, 4), (9, 3), (12, 4), (15, 5), (8, 8), (6, 1)])
@pytest.mark.parametrize("tp_degree", range(1, 33))
def test_every_query_head_once_and_beside_its_kv_head(tp_degree, heads, kv_heads):
    plan = ShardingPlan(tp_degree, heads, kv_heads)
    seen = []
    for rank in range(tp_degree):
        queries, keys = plan.query_heads(rank), plan.key_value_heads(rank)
        assert len(queries) == plan.attention_heads_per_rank and len(keys) == plan.key_value_heads_per_rank
        group = len(queries) // len(keys)
        for place, head in enumerate(queries):
            if head is not None:
                seen.append(head)
                assert keys[place // group] == head // (heads // kv_heads)
    assert sorted(seen) == list(range(heads))


# two query heads and one KV head of 2, 3 neurons and 5 tokens: of two ranks each has a query head, both the KV head
SMALL = dict(
    hidden_size=4, intermediate_size=3, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=5,
    max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e4,
)  # fmt: skip
WHOLE, SECOND_HEAD, KV_HEAD, LAST_NEURON = ((0, 4),), ((2, 2),), ((0, 2),), ((2, 1), (None, 1))


def layout(rank, tp_degree, biases, **how):
    outputs = rank_outputs(
        resolve_config({**SMALL, "attention_bias": biases, "mlp_bias": biases}), rank, tp_degree, **how
    )
    assert len({output.name for output in outputs}) == len(outputs)
    return {
        output.name.removeprefix("layers.0."): (
            output.shape, [(part.source.removeprefix("layers.0."), part.dim, part.spans) for part in output.parts]
        )
        for output in outputs
    }  # fmt: skip


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_the_second_of_two_ranks(fused_qkv, biases):
    found, kinds = layout(1, 2, biases, fused_qkv=fused_qkv), ("weight", "bias") if biases else ("weight",)
    expected = {"embed_tokens.weight": ((5, 2), [("embed_tokens.weight", 1, ((2, 2),))])}
    expected["lm_head.weight"] = (3, 4), [("lm_head.weight", 0, ((3, 2), (None, 1)))]
    for name in ("norm", "input_layernorm", "post_attention_layernorm"):
        expected[f"{name}.weight"] = (4,), [(f"{name}.weight", 0, WHOLE)]
    for name in ("rank_util.rank", "self_attn.rank_util.rank"):
        expected[name] = (1,), []
    for kind in kinds:
        rows = {"weight": (4,), "bias": ()}[kind]  # a bias is cut as its weight's rows are, and is whole where none are
        cuts = [(f"self_attn.{one}_proj.{kind}", 0, KV_HEAD if one in "kv" else SECOND_HEAD) for one in "qkv"]
        if fused_qkv:
            expected[f"self_attn.qkv_proj.Wqkv.{kind}"] = (6, *rows), cuts
        else:
            for one, cut in zip("qkv", cuts):
                expected[f"self_attn.qkv_proj.{one}_proj.{kind}"] = (2, *rows), [cut]
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            expected[f"{name}.{kind}"] = (2, *rows), [(f"{name}.{kind}", 0, LAST_NEURON)]
    expected["self_attn.o_proj.o_proj.weight"] = (4, 2), [("self_attn.o_proj.weight", 1, SECOND_HEAD)]
    expected["mlp.down_proj.weight"] = (4, 2), [("mlp.down_proj.weight", 1, LAST_NEURON)]
    if biases:
        expected["self_attn.o_proj.o_proj.bias"] = (4,), [("self_attn.o_proj.bias", 0, WHOLE)]
        expected["mlp.down_proj.bias"] = (4,), [("mlp.down_proj.bias", 0, WHOLE)]
    assert found == expected
    by_rows = layout(1, 2, biases, fused_qkv=fused_qkv, vocab_parallel=True)
    assert by_rows.pop("embed_tokens.rank_util.rank") == ((1,), [])
    by_rows_expected = (3, 4), [("embed_tokens.weight", 0, ((3, 2), (None, 1)))]
    assert by_rows == {**expected, "embed_tokens.weight": by_rows_expected}


def test_ranks_that_have_padding_only():
    """Two tokens a rank, and of two heads one: the third rank has one token and no head, the fourth neither."""
    names = "lm_head.weight", "self_attn.qkv_proj.q_proj.weight", "mlp.down_proj.weight"
    spans = [[layout(rank, 4, False)[name][1][0][2] for name in names] for rank in range(4)]
    assert spans == [
        [((0, 2),), ((0, 2),), ((0, 1),)],
        [((2, 2),), ((2, 2),), ((1, 1),)],
        [((4, 1), (None, 1)), ((None, 2),), ((2, 1),)],
        [((None, 2),), ((None, 2),), ((None, 1),)],
    ]
