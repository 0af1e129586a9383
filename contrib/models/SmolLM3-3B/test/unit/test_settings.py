"""artifact.Settings: what is filled in, and what cannot run together."""

import pytest

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B


def checked(**settings):
    return Settings(**{"seq_len": 256, **settings}).checked(resolve_config(SMOLLM3_3B))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {"max_context_length": 256, "ctx_batch_size": 1}),
        ({"batch_size": 4}, {"ctx_batch_size": 4}),
        ({"batch_size": 4, "is_continuous_batching": True}, {"ctx_batch_size": 1}),
        ({"batch_size": 4, "is_continuous_batching": True, "ctx_batch_size": 2}, {"ctx_batch_size": 2}),
        ({"enable_bucketing": True, "context_encoding_buckets": [64, 256]}, {"token_generation_buckets": None}),
        ({"is_prefix_caching": True}, {"pa_block_size": 32, "pa_num_blocks": 8}),
        (
            {"batch_size": 4, "is_continuous_batching": True, "is_prefix_caching": True, "pa_block_size": 16},
            {"pa_num_blocks": 64},
        ),
    ],
)
def test_what_is_filled_in(settings, expected):
    found = checked(**settings)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.checked(resolve_config(SMOLLM3_3B)) == found


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"batch_size": 4, "ctx_batch_size": 1}, ["ctx_batch_size is 1", "batch_size 4", "is_continuous_batching"]),
        (
            {"batch_size": 2, "is_continuous_batching": True, "ctx_batch_size": 3},
            ["ctx_batch_size is 3", "from 1 to 2"],
        ),
        ({"token_generation_buckets": [256]}, ["token_generation_buckets is [256]", "enable_bucketing is off"]),
        (
            {"enable_bucketing": True, "token_generation_buckets": [64]},
            ["token_generation_buckets is [64]", "seq_len, which is 256"],
        ),
        ({"enable_bucketing": True, "context_encoding_buckets": [128, 64, 256]}, ["[128, 64, 256]", "rising"]),
        ({"enable_bucketing": True, "context_encoding_buckets": [1, 256]}, ["[1, 256]", "at least 2"]),
        ({"on_device_sampling_config": {"do_smaple": True}}, ["do_smaple True", "do_sample"]),
        ({"on_device_sampling_config": {"global_topk": "all"}}, ["global_topk 'all'", "numbers"]),
        ({"on_device_sampling_config": {"do_sample": 5}}, ["do_sample 5", "true or false"]),
        ({"on_device_sampling_config": {"temperature": float("nan")}}, ["temperature nan", "numbers"]),
        ({"on_device_sampling_config": {"top_p": 7}}, ["top_p 7", "up to 1"]),
        ({"on_device_sampling_config": {}}, ["on_device_sampling_config is empty", "do_sample"]),
        ({"ctx_batch_size": 0, "is_continuous_batching": True}, ["ctx_batch_size is 0", "from 1 to 1"]),
        ({"pa_block_size": 32}, ["pa_block_size is 32", "is_prefix_caching is off"]),
        ({"pa_num_blocks": 32}, ["pa_num_blocks is 32", "is_prefix_caching is off"]),
        ({"is_prefix_caching": True, "pa_block_size": 0}, ["pa_block_size is 0", "power of two"]),
        (
            {"is_prefix_caching": True, "batch_size": 2},
            ["is_prefix_caching", "ctx_batch_size of 2", "is_continuous_batching"],
        ),
        ({"sequence_parallel_enabled": True, "tp_degree": 3}, ["a context of 256", "tp_degree 3"]),
        ({"windowed_context_encoding_size": 48}, ["windowed_context_encoding_size", "a context of 256"]),
        ({"async_mode": True}, ["async_mode", "on_device_sampling_config"]),
        ({"rope_precision": "float16"}, ["rope_precision is 'float16'", "'float32' or 'float64'"]),
        ({"enable_bucketing": True, "context_encoding_buckets": []}, ["context_encoding_buckets is []"]),
        ({"speculation_length": 1}, ["speculation_length is 1", "from 2 to 255"]),
        ({"speculation_length": 4, "is_prefix_caching": True}, ["speculation_length is 4", "is_prefix_caching"]),
        (
            {"speculation_length": 4, "on_device_sampling_config": {"do_sample": True}},
            ["speculation_length is 4", "do_sample"],
        ),
    ],
)
def test_what_cannot_run_together(settings, named):
    with pytest.raises(SmolLM3Error) as error:
        checked(**settings)
    message = str(error.value)
    assert "\n" not in message and [part for part in named if part not in message] == []


QUANTIZED = {"quantized": True, "quantization_type": "per_channel_symmetric"}


@pytest.mark.parametrize(
    "settings, config, named",
    [
        ({"modules_to_not_convert": ["lm_head"]}, {}, ["modules_to_not_convert is ['lm_head']", "quantized is off"]),
        (
            {"quantized": True, "quantization_type": "blockwise_symmetric"},
            {},
            ["'blockwise_symmetric'", "'per_channel_symmetric'"],
        ),
        ({"quantized": True, "quantization_dtype": "int4"}, {}, ["quantization_dtype is 'int4'", "'f8e4m3'"]),
        ({"quantized": True, "fused_qkv": True}, {}, ["fused_qkv", "'per_channel_symmetric'"]),
        ({"quantized": True, "modules_to_not_convert": ["lm_head"]}, {}, ["['lm_head']", "'per_channel_symmetric'"]),
        (
            {"quantized": True, "tp_degree": 24},
            {},
            ["intermediate_size is 11008", "tp_degree 24", "'per_channel_symmetric'"],
        ),
        ({**QUANTIZED, "tp_degree": 7}, {}, ["vocab_size is 128256", "tp_degree 7", "modules_to_not_convert lm_head"]),
        (
            {**QUANTIZED, "modules_to_not_convert": ["layers.0.self_attn.q_proj"]},
            {},
            ["only one of", "qkv_proj.q_proj"],
        ),
        ({**QUANTIZED, "fused_qkv": True, "modules_to_not_convert": ["q_proj"]}, {}, ["only one of", "qkv_proj.Wqkv"]),
        ({**QUANTIZED, "modules_to_not_convert": ["mlp", "lmhead"]}, {}, ["'lmhead'", "lm_head"]),
        ({"quantized": True}, {"attention_bias": True}, ["attention_bias is true", "loses biases"]),
        ({"quantized": True}, {"mlp_bias": True}, ["mlp_bias is true", "loses biases"]),
    ],
)
def test_what_cannot_be_quantized(settings, config, named):
    with pytest.raises(SmolLM3Error) as error:
        Settings(**{"seq_len": 256, **settings}).checked(resolve_config({**SMOLLM3_3B, **config}))
    message = str(error.value)
    assert "\n" not in message and [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"quantized": True},
        {**QUANTIZED, "quantization_dtype": "f8e4m3", "fused_qkv": True, "tp_degree": 24},
        {**QUANTIZED, "tp_degree": 7, "modules_to_not_convert": ["lm_head", "self_attn"]},
    ],
)
def test_what_can_be_quantized(settings):
    assert checked(**settings).quantized
