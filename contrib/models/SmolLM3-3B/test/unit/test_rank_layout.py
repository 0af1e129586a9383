import pytest

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.heads import ShardingPlan

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
