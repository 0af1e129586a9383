import json
from unittest import mock

import pytest
import torch
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config


class Config(InferenceConfig):
    attribute_map = {"hidden": "hidden_size"}

    def get_required_attributes(self):
        return ["hidden_size"]


def test_json_round_trip(tmp_path):
    neuron_config = NeuronConfig(tp_degree=4, seq_len=256, max_context_length=128, torch_dtype="float32")
    config = Config(neuron_config, hidden=8, names=["a"], nested={"b": torch.bfloat16, "c": NeuronConfig})
    config.save(tmp_path)
    saved = json.loads((tmp_path / "neuron_config.json").read_text())
    assert list(saved) == sorted(saved)
    assert saved["nested"] == {
        "b": "bfloat16",
        "c": {"__module__": "neuronx_distributed_inference.models.config", "__name__": "NeuronConfig"},
    }
    loaded = Config.load(tmp_path, hidden_size=16)
    assert loaded.hidden == loaded.hidden_size == 16
    assert loaded.neuron_config.torch_dtype == torch.float32 and loaded.neuron_config.max_new_tokens == 128
    loaded.hidden = 8
    assert loaded.to_json_string() == config.to_json_string()


def test_neuron_config():
    with mock.patch("logging.warning") as warned:  # not by the log itself: other tests of the process may silence it
        config = NeuronConfig(batch_size=4, no_such_option=1)
    assert "no_such_option" in warned.call_args.args[0] and not hasattr(config, "no_such_option")
    assert (config.ctx_batch_size, config.kv_cache_batch_size, config.max_new_tokens) == (4, 4, None)
    sampling = NeuronConfig(on_device_sampling_config=dict(top_k=5)).on_device_sampling_config
    assert isinstance(sampling, OnDeviceSamplingConfig) and sampling.top_k == 5 and sampling.top_p == 1.0
    with pytest.raises(AssertionError, match="max_context_length"):
        NeuronConfig(seq_len=8, max_context_length=9)
    with pytest.raises(AssertionError, match="missing|must define"):
        Config(NeuronConfig())


def test_checkpoint_dtype_gives_way_to_a_given_one(checkpoint):
    load_config = load_pretrained_config(checkpoint)
    assert InferenceConfig(NeuronConfig(), load_config=load_config).neuron_config.torch_dtype == torch.float32
    given = NeuronConfig(torch_dtype="bfloat16")
    config = InferenceConfig(given, load_config=load_config)
    assert config.neuron_config.torch_dtype == torch.bfloat16 and not hasattr(config, "torch_dtype")
    with pytest.raises(ValueError, match="only one"):
        InferenceConfig(NeuronConfig(), load_config=load_pretrained_config())


@pytest.mark.parametrize(
    "option",
    [
        dict(lora_config=dict(max_loras=2)), dict(kv_cache_quant=True), dict(qkv_kernel_enabled=True),
        dict(output_logits=True), dict(tkg_batch_size=2),
        dict(async_mode=True, on_device_sampling_config=dict(top_k=1)), dict(sequence_parallel_enabled=True),
        dict(windowed_context_encoding_size=16, ctx_batch_size=3),
        dict(is_prefix_caching=True, is_block_kv_layout=True, ctx_batch_size=1, seq_len=128, max_context_length=128,
             pa_block_size=32, pa_num_blocks=12),
    ],
)  # fmt: skip
def test_options_left_out(build, option):
    with pytest.raises(NotImplementedError, match=f"the CPU runtime does not support {next(iter(option))}="):
        build(**option)
