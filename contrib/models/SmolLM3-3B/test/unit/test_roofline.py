import pytest

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.roofline import INSTANCES, Estimate, check_tp_degree
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B
from smollm3_neuron.weights.rank_layout import rank_outputs

CONFIG = resolve_config(SMOLLM3_3B)


def estimate(tp_degree=2, seq_len=128, **changes) -> Estimate:
    return Estimate(CONFIG, tp_degree, seq_len, **changes)


def test_the_published_profile():
    """NxDI contrib's SmolLM3 on a trn1.32xlarge, TP 2, sequence of 128: HBM read per core, 3.08 and 3.11 GB."""
    assert estimate().decode_bytes == pytest.approx(3.08e9, rel=0.02)
    assert estimate().prefill_bytes == pytest.approx(3.11e9, rel=0.02)


def test_weights_are_the_models_parameters():
    parameters = 3_075_098_624
    head = 128256 * 2048
    assert estimate(tp_degree=1).weights == 2 * (parameters + head)
    assert estimate(tp_degree=1).untied_head == 2 * head
    assert 2 * estimate(tp_degree=2).weights - 2 * (parameters + head) == 2 * (2 * 36 + 1) * 2048  # the norms, twice


@pytest.mark.parametrize("tp_degree, heads", [(1, 4), (2, 2), (4, 1), (8, 1), (6, 3)])
def test_kv_cache(tp_degree, heads):
    assert estimate(tp_degree).kv_cache_per_token == heads * 36 * 2 * 128 * 2
    if tp_degree == 1:
        assert estimate(1, 65536).kv_cache == 73728 * 65536


def test_masked_lines_have_128_positions_more_that_no_step_reads():
    masked, plain = (estimate(batch_size=4, apply_seq_ids_mask=on) for on in (True, False))
    assert masked.kv_cache - plain.kv_cache == 4 * 128 * plain.kv_cache_per_token
    assert masked.decode_bytes == plain.decode_bytes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tp_degree", [1, 2, 8])
def test_the_largest_that_fit_do_and_the_next_do_not(tp_degree, masked):
    def room(seq_len, batch_size):
        return estimate(tp_degree, seq_len, batch_size=batch_size, apply_seq_ids_mask=masked).room

    batch = estimate(tp_degree, 4096, apply_seq_ids_mask=masked).largest_batch(4096)
    assert room(4096, batch) >= 0 > room(4096, batch + 1)
    seq_len = estimate(tp_degree, batch_size=32, apply_seq_ids_mask=masked).largest_seq_len(32)
    assert room(seq_len, 32) >= 0 > room(seq_len + 1, 32)


def test_operations_are_two_per_weight_and_token():
    one = estimate(1, 1)
    assert one.decode_flops == pytest.approx(2 * 3.075e9, rel=0.01)
    assert estimate(2, 128).prefill_flops == pytest.approx(128 * (3.075e9 - 262.7e6), rel=0.01)


def test_every_rank_has_the_same_shapes():
    for tp_degree in (3, 8, 12):
        shapes = [{o.name: o.shape for o in rank_outputs(CONFIG, rank, tp_degree)} for rank in range(tp_degree)]
        assert all(of_rank == shapes[0] for of_rank in shapes)


@pytest.mark.parametrize(
    "instance, refused, named", [("trn1.32xlarge", 4, "1, 2, 8, 16, 32"), ("inf2.xlarge", 8, "1, 2")]
)
def test_tp_degrees_of_the_instances(instance, refused, named):
    with pytest.raises(SmolLM3Error, match=f"tp_degree is {refused}, {instance} takes {named}"):
        check_tp_degree(instance, refused)
    for tp_degree in INSTANCES[instance].tp_degrees:
        check_tp_degree(instance, tp_degree)
        assert tp_degree <= INSTANCES[instance].neuron_cores


def test_a_draft_takes_its_place_beside_the_model():
    """Its weights and caches, and as many sequences and positions less."""
    config = resolve_config(SMOLLM3_3B)
    draft = resolve_config({**SMOLLM3_3B, "num_hidden_layers": 12, "no_rope_layers": [1] * 12})
    alone, of_draft = Estimate(config, 2, 65536), Estimate(draft, 2, 65536)
    both = Estimate(config, 2, 65536, draft=draft)
    assert both.held_by_draft == of_draft.weights + of_draft.kv_cache and alone.held_by_draft == 0
    assert alone.room - both.room == both.total - alone.total == both.held_by_draft
    assert both.host_memory_to_load == alone.host_memory_to_load + of_draft.host_memory_to_load
    for seq_len in (2048, 65536):
        largest = both.largest_batch(seq_len)
        assert Estimate(config, 2, seq_len, largest, draft=draft).room >= 0
        assert Estimate(config, 2, seq_len, largest + 1, draft=draft).room < 0 and largest < alone.largest_batch(
            seq_len
        )
    longest = both.largest_seq_len(8)
    assert Estimate(config, 2, longest, 8, draft=draft).room >= 0
    assert Estimate(config, 2, longest + 1, 8, draft=draft).room < 0
