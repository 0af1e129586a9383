from types import SimpleNamespace

import pytest

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.switches import REFUSED, check_encoding, check_sampling, check_switches

MIXED, ROTARY = [1, 0], [1, 1]


def check(layers=MIXED, release="0.8.0", hidden_act="silu", **switches):
    check_switches(SimpleNamespace(**{"padding_side": "right", **switches}), layers, hidden_act, release)


ALL = ("0.7", "0.8", "0.9", "0.10", "0.11", None)
NEWER = ("0.9", "0.10", "0.11", None)
# written out here, so that a refusal that is taken out of the product's table is missed
EXPECTED = {
    "qkv_cte_nki_kernel_fuse_rope": ALL,
    "attn_tkg_builtin_kernel_enabled": ALL,
    "attn_tkg_nki_kernel_enabled": NEWER,
    "attn_block_tkg_nki_kernel_enabled": ALL,
    "attn_block_cte_nki_kernel_enabled": ALL,
    "qkv_kernel_fuse_residual_add": ALL,
    "mlp_kernel_fuse_residual_add": ALL,
    "fused_rmsnorm_skip_gamma": ALL,
    "flash_decoding_enabled": ALL,
    "layer_boundary_markers": ALL,
    "chunked_prefill_config": ALL,
    "enable_fused_speculation": ALL,
    "enable_eagle_speculation": ALL,
    "is_eagle_draft": ALL,
    "token_tree_config": ALL,
    "is_medusa": ALL,
    "medusa_speculation_length": ALL,
    "num_medusa_heads": ALL,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_refused(name):
    for release in EXPECTED[name]:
        with pytest.raises(SmolLM3Error, match=f"^{name} is 3, but [^\n]*; leave it out$"):
            check(release=release and f"{release}.16251", **{name: 3})
    check(**{name: 0})


def test_every_refusal_is_expected():
    assert {refusal.name for refusal in REFUSED} == set(EXPECTED)


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


@pytest.mark.parametrize("global_topk, wrong", [(0, True), (1, False), (253, False), (254, True)])
def test_a_device_samples_from_tokens_that_are_there(global_topk, wrong):
    def check_it(**kind):
        sampling = SimpleNamespace(**{"do_sample": False, "dynamic": False, "global_topk": global_topk, **kind})
        check_sampling(SimpleNamespace(on_device_sampling_config=sampling), 253)

    check_it()  # greedy: it does not look at global_topk
    for kind in ("do_sample", "dynamic"):
        if wrong:
            with pytest.raises(SmolLM3Error, match=f"global_topk of {global_topk}, allowed is 1 to .* 253 tokens"):
                check_it(**{kind: True})
        else:
            check_it(**{kind: True})


def test_left_padding():
    with pytest.raises(SmolLM3Error, match="padding_side is 'left', allowed is 'right'"):
        check(padding_side="left")


def encoding(**settings):
    """check_encoding of a NeuronConfig's attributes; here everything is off."""
    off = dict(
        tp_degree=2,
        batch_size=1,
        ctx_batch_size=1,
        seq_len=256,
        max_context_length=256,
        enable_bucketing=False,
        context_encoding_buckets=None,
        sequence_parallel_enabled=False,
        windowed_context_encoding_size=None,
        is_continuous_batching=False,
        apply_seq_ids_mask=False,
        async_mode=False,
        on_device_sampling_config=None,
        is_prefix_caching=False,
        is_block_kv_layout=False,
        pa_block_size=32,
        pa_num_blocks=8,
        prefix_buckets=None,
        speculation_length=0,
    )
    check_encoding(SimpleNamespace(**{**off, **settings}))


SEQUENCE_PARALLEL = dict(sequence_parallel_enabled=True, tp_degree=3)
WINDOWED = dict(windowed_context_encoding_size=64)
PREFIX_CACHING = dict(is_prefix_caching=True, is_block_kv_layout=True)
BUCKETING = dict(enable_bucketing=True)
MASKED = dict(apply_seq_ids_mask=True, is_continuous_batching=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(sequence_parallel_enabled=True),
        dict(SEQUENCE_PARALLEL, max_context_length=126),
        dict(SEQUENCE_PARALLEL, max_context_length=126, **BUCKETING, context_encoding_buckets=[63, 126]),
        WINDOWED,
        dict(WINDOWED, **BUCKETING),
        dict(WINDOWED, **BUCKETING, context_encoding_buckets=[64, 192, 256]),
        dict(async_mode=True, on_device_sampling_config={"top_k": 1}),
        MASKED,
        PREFIX_CACHING,
        dict(PREFIX_CACHING, batch_size=4, pa_num_blocks=20, **BUCKETING),
        dict(PREFIX_CACHING, **BUCKETING, context_encoding_buckets=[128, 256], prefix_buckets=[128, 256]),
        dict(speculation_length=2),
        dict(speculation_length=255, on_device_sampling_config={"top_k": 1}, **MASKED),
    ],
)
def test_ways_to_encode_a_context(settings):
    encoding(**settings)


@pytest.mark.parametrize(
    "settings, named",
    [
        (dict(SEQUENCE_PARALLEL, max_context_length=128), "sequence_parallel_enabled: a context of 128 .* tp_degree 3"),
        (
            dict(SEQUENCE_PARALLEL, max_context_length=1200, **BUCKETING),
            "a context of 128 does not divide by tp_degree 3",
        ),
        (
            dict(SEQUENCE_PARALLEL, max_context_length=126, **BUCKETING, context_encoding_buckets=[64, 126]),
            "a context of 64 does not divide by tp_degree 3",
        ),
        (dict(windowed_context_encoding_size=96), "windowed_context_encoding_size: a context of 256 .* 96"),
        (dict(windowed_context_encoding_size=256, **BUCKETING), "a context of 128 does not divide by it, which is 256"),
        (dict(WINDOWED, **BUCKETING, context_encoding_buckets=[96, 256]), "a context of 96"),
        (
            dict(WINDOWED, batch_size=4),
            "windowed_context_encoding_size is 64 with a ctx_batch_size of 1 and a batch_size of 4",
        ),
        (
            dict(WINDOWED, sequence_parallel_enabled=True),
            "windowed_context_encoding_size is 64 with sequence_parallel_enabled",
        ),
        (dict(windowed_context_encoding_size=1), "windowed_context_encoding_size is 1, .* at least 2"),
        (dict(async_mode=True), "async_mode is on without on_device_sampling_config"),
        (dict(apply_seq_ids_mask=True), "apply_seq_ids_mask is on without is_continuous_batching"),
        (dict(PREFIX_CACHING, **MASKED), "apply_seq_ids_mask and is_prefix_caching are both set"),
        (dict(is_block_kv_layout=True), "is_block_kv_layout is on and is_prefix_caching off"),
        (
            dict(PREFIX_CACHING, batch_size=2, ctx_batch_size=2),
            "is_prefix_caching with a ctx_batch_size of 2.* is_continuous_",
        ),
        (dict(PREFIX_CACHING, **WINDOWED), "windowed_context_encoding_size and is_prefix_caching are both set"),
        (
            dict(PREFIX_CACHING, **BUCKETING, context_encoding_buckets=[128, 256]),
            "context_encoding_buckets .* prefix_buckets",
        ),
        (
            dict(PREFIX_CACHING, **BUCKETING, context_encoding_buckets=[256], prefix_buckets=[64, 256]),
            r"prefix_buckets is \[64, 256\], .* multiples of pa_block_size, 32, of at least 128",
        ),
        (dict(PREFIX_CACHING, pa_block_size=48), "pa_block_size is 48, allowed is a power of two"),
        (dict(PREFIX_CACHING, seq_len=250), "seq_len is 250, .* multiples of pa_block_size, 32"),
        (dict(PREFIX_CACHING, max_context_length=64), "max_context_length is 64, .* at least 128"),
        (dict(speculation_length=1), r"speculation_length is 1, allowed is 0 \(off\) or a whole number from 2 to 255"),
        (dict(speculation_length=256), "speculation_length is 256, .* from 2 to 255, below seq_len"),
        (dict(batch_size=2, spec_batch_size=1, speculation_length=4), "a spec_batch_size of 1 and a batch_size of 2"),
        (
            dict(PREFIX_CACHING, speculation_length=4),
            "speculation_length is 4 with is_prefix_caching, .* block KV layout",
        ),
        (
            dict(async_mode=True, on_device_sampling_config={"top_k": 1}, speculation_length=4),
            "speculation_length is 4 with async_mode, but a step is given to the device before",
        ),
        (dict(WINDOWED, speculation_length=4), "speculation_length is 4 with windowed_context_encoding_size"),
        (dict(lora_config={"max_loras": 2}, speculation_length=4), "speculation_length is 4 with lora_config"),
        (
            dict(on_device_sampling_config={"do_sample": True}, speculation_length=4),
            "speculation_length is 4 and on_device_sampling_config has do_sample, .* greedy",
        ),
        (
            dict(on_device_sampling_config=SimpleNamespace(do_sample=False, dynamic=True), speculation_length=4),
            "speculation_length is 4 and on_device_sampling_config has dynamic, .* greedy",
        ),
        (dict(PREFIX_CACHING, pa_num_blocks=7), "pa_num_blocks is 7: of pa_block_size 32 at least 8 .* seq_len of 256"),
    ],
)
def test_what_cannot_encode_a_context(settings, named):
    with pytest.raises(SmolLM3Error, match=f"^[^\n]*{named}[^\n]*$"):
        encoding(**settings)


def test_a_kernel_that_computes_the_rotation_itself_has_no_table():
    kernel = {"attn_tkg_builtin_kernel_enabled": True}
    with pytest.raises(SmolLM3Error, match="rope_precision is 'float64', but .*attn_tkg_builtin_kernel_enabled"):
        encoding(rope_precision="float64", **kernel)
    encoding(rope_precision="float32", **kernel)
