import pytest
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.sharding import ShardingPlan

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
