"""The library's attention kernel is off where nobody turns it on, on every way to a config."""

import json
import logging

import pytest
import torch
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B
from smollm3_neuron.modeling_smollm3_3b import SmolLM3InferenceConfig, SmolLM3NeuronConfig
from smollm3_neuron.vllm.plugin import register


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM3_3B))
    return tmp_path


def by_hand(folder, **options):
    neuron_config = SmolLM3NeuronConfig(**options, torch_dtype=torch.bfloat16)
    return SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(str(folder)))


def by_compile(folder, **options):
    return build_config(folder, Settings(**options))


def through_vllm(folder, **options):
    """As vllm-neuron builds it, with an override of nothing."""
    register()
    cls = MODEL_TYPES["smollm3"]["causal-lm"].get_config_cls()
    return cls(cls.get_neuron_config_cls()(**options), load_config=load_pretrained_config(str(folder)))


@pytest.mark.parametrize("seq_len", [4096, 8192, 65536])
@pytest.mark.parametrize("build", [by_hand, by_compile, through_vllm])
def test_it_is_off(build, seq_len, folder):
    config = build(folder, tp_degree=2, seq_len=seq_len)
    assert config.neuron_config.attn_kernel_enabled is False
    again = SmolLM3InferenceConfig.from_json_string(config.to_json_string())
    assert again.neuron_config.attn_kernel_enabled is False


@pytest.mark.parametrize("build", [by_hand, by_compile, through_vllm])
def test_asked_for_it_is_on_and_the_reports_are_named(build, folder, caplog):
    with caplog.at_level(logging.WARNING, "Neuron"):
        config = build(folder, tp_degree=2, seq_len=4096, attn_kernel_enabled=True)
    assert config.neuron_config.attn_kernel_enabled is True
    assert "public reports of 2026" in caplog.text and "NCC_INLA001" in caplog.text


def test_two_physical_cores_in_one_keep_the_librarys_choice(folder, caplog):
    config = by_hand(folder, tp_degree=2, seq_len=4096, logical_nc_config=2)
    assert config.neuron_config.attn_kernel_enabled is None
    by_hand(folder, tp_degree=2, seq_len=4096, logical_nc_config=2, attn_kernel_enabled=True)
    assert "public reports of 2026" not in caplog.text
