from types import SimpleNamespace

import pytest
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.switches import REFUSED, check_sequence_parallel, check_switches

MIXED, ROTARY = [1, 0], [1, 1]


def check(layers=MIXED, release="0.8.0", hidden_act="silu", **switches):
    check_switches(SimpleNamespace(**{"padding_side": "right", **switches}), layers, hidden_act, release)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: f"{refusal.name}-{refusal.releases[0]}")
def test_what_is_refused(refusal):
    for release in (*refusal.releases, None):
        with pytest.raises(SmolLM3Error, match=f"^{refusal.name} is 3, but [^\n]*; leave it out$"):
            check(release=release and f"{release}.16251", **{refusal.name: 3})
    check(**{refusal.name: 0})


def test_a_switch_that_only_a_nope_layer_minds():
    for name in ("qkv_cte_nki_kernel_fuse_rope", "attn_tkg_builtin_kernel_enabled"):
        check(ROTARY, **{name: True})
    with pytest.raises(SmolLM3Error, match="NeuronCore v3"):
        check(ROTARY, "0.9.0", attn_tkg_builtin_kernel_enabled=True)


def test_a_switch_that_is_wrong_in_one_release_only():
    check(release="0.8.0", attn_tkg_nki_kernel_enabled=True)
    with pytest.raises(SmolLM3Error, match="attn_tkg_nki_kernel_enabled"):
        check(release="0.9.0", attn_tkg_nki_kernel_enabled=True)


def test_kernels_that_compute_silu():
    check(mlp_kernel_enabled=True)
    with pytest.raises(SmolLM3Error, match="mlp_kernel_enabled is on.* hidden_act is 'gelu'"):
        check(hidden_act="gelu", mlp_kernel_enabled=True)


def test_left_padding():
    with pytest.raises(SmolLM3Error, match="padding_side is 'left', allowed is 'right'"):
        check(padding_side="left")


def sequence_parallel(tp_degree, context, bucketing=False, buckets=None):
    check_sequence_parallel(
        SimpleNamespace(
            sequence_parallel_enabled=True,
            tp_degree=tp_degree,
            max_context_length=context,
            enable_bucketing=bucketing,
            context_encoding_buckets=buckets,
        )
    )


def test_sequence_parallel_needs_contexts_that_the_ranks_divide():
    sequence_parallel(2, 128)
    sequence_parallel(3, 126)
    sequence_parallel(3, 126, True, [63, 126])
    with pytest.raises(SmolLM3Error, match="a context of 128 does not divide by tp_degree 3"):
        sequence_parallel(3, 128)
    with pytest.raises(SmolLM3Error, match="a context of 128 does not divide by tp_degree 3"):
        sequence_parallel(3, 1200, True)
    with pytest.raises(SmolLM3Error, match="a context of 64 does not divide by tp_degree 3"):
        sequence_parallel(3, 126, True, [64, 126])
