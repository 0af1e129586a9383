"""A window on some layers: what it does to the caches, and what cannot go with it."""

import pytest
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import SmolLM3Config

from smollm3_neuron.model.windows import SlidingWindowKVCacheManager, layer_windows
from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM, SmolLM3InferenceConfig


def build(window=16, **options):
    options = {"seq_len": 128, "tp_degree": 2, "torch_dtype": torch.float32, **options}
    config = SmolLM3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=window,
        pad_token_id=0,
    )
    config = SmolLM3InferenceConfig(NeuronConfig(**options), load_config=load_pretrained_config(hf_config=config))
    return NeuronSmolLM3ForCausalLM("nowhere", config)


def test_a_sliding_layer_has_a_cache_as_long_as_its_window():
    app = build()
    lengths = [cache.shape[2] for cache in app.token_generation_model._build(128).kv_mgr.past_key_values]
    assert lengths == [128] * 6 + [16] * 2
    assert app.config.neuron_config.attn_kernel_enabled is False
    text = app.config.to_json_string()
    assert SmolLM3InferenceConfig.from_json_string(text).to_json_string() == text


def test_a_prompt_may_be_as_short_as_what_a_window_keeps():
    """The token itself is not in the cache: of a window of 16 it is the 15 before it."""
    app = build(max_context_length=15)
    assert app.config.neuron_config.max_context_length == 15
    assert app.config.checkpoint_config.sliding_window == 16
    with pytest.raises(ValueError, match="a length of 14, at least 15 is needed"):
        build(max_context_length=14)


def test_a_window_as_long_as_the_cache_is_none():
    app = build(window=128)
    assert layer_windows(app.config) == [None] * 4 != layer_windows(build(window=127).config)
    assert {cache.shape[2] for cache in app.token_generation_model._build(128).kv_mgr.past_key_values} == {128}


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(max_context_length=8), "a length of 8, at least 15 is needed"),
        (dict(enable_bucketing=True, context_encoding_buckets=[8, 128]), "a length of 8"),
        (
            dict(enable_bucketing=True, token_generation_buckets=[64, 128]),
            r"token_generation_buckets is \[64, 128\].*\[128\]",
        ),
        (dict(enable_bucketing=True, seq_len=512), "token_generation_buckets is"),
        (dict(attn_kernel_enabled=True), "attn_kernel_enabled is True"),
        (dict(k_cache_transposed=True), "k_cache_transposed is True"),
        (dict(windowed_context_encoding_size=64), "windowed_context_encoding_size is 64"),
        (dict(speculation_length=4), "speculation_length is 4"),
        (dict(is_prefix_caching=True), "is_prefix_caching is True"),
    ],
)
def test_what_cannot_go_with_a_window(options, named):
    with pytest.raises(ValueError, match=named):
        build(**options)


def test_a_position_is_written_where_the_one_a_window_before_it_was(monkeypatch):
    """Of a window of 16 the 15 before a token are kept: position 15 takes the place of position 0."""
    monkeypatch.setattr(
        KVCacheManager, "_get_index_to_update_new_position", lambda self, *arguments: arguments, raising=False
    )
    manager = SlidingWindowKVCacheManager.__new__(SlidingWindowKVCacheManager)
    torch.nn.Module.__init__(manager)
    manager.windows = [16, None]
    positions = torch.tensor([[0], [14], [15], [31]])
    for layer_idx, lines in ((0, [[0], [14], [0], [1]]), (1, positions.tolist())):
        arguments = ["seq_ids", "scatter_index", positions, "full_k", False, layer_idx]
        found = manager._get_index_to_update_new_position(*arguments)
        assert found[2].tolist() == lines and [*found[:2], *found[3:]] == [*arguments[:2], *arguments[3:]]
