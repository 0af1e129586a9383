"""SmolLM3InferenceConfig and the modules' shape, on the CPU runtime; the real library's are in conformance/."""

import json
import shutil

import pytest
import torch

from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config

ensure_neuronx()

from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from smollm3_neuron.modeling_smollm3_3b import (
    NeuronSmolLM3ForCausalLM,
    SmolLM3InferenceConfig,
)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_folder(), tmp_path / "checkpoint")


def rewrite(folder, *removed, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


@pytest.mark.parametrize("tp_degree, kv_heads", [(1, 4), (2, 4), (6, 16), (8, 4)])
def test_saved_and_loaded_it_is_the_same(folder, tmp_path, tp_degree, kv_heads):
    config = build_config(folder, Settings(tp_degree=tp_degree, seq_len=64))
    config.save(tmp_path / "saved")
    loaded = SmolLM3InferenceConfig.load(tmp_path / "saved")
    loaded.save(tmp_path / "again")
    assert loaded.to_json_string() == config.to_json_string()
    assert (tmp_path / "saved/neuron_config.json").read_text() == (tmp_path / "again/neuron_config.json").read_text()
    assert (loaded.num_key_value_heads, loaded.source_num_key_value_heads) == (kv_heads, 4)
    assert loaded.checkpoint_config == config.checkpoint_config == read_config(folder)
    assert "checkpoint_config" not in config.to_json_string()  # it would come back as a keyword argument
    assert str(folder) not in config.to_json_string()  # a path in it would win over the one that is given


def test_a_config_of_transformers_5(folder):
    """4.57 reads it and puts its own default of 2,000,000 beside rope_parameters."""
    rewrite(
        folder,
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        dtype="bfloat16",
        rope_parameters={
            "rope_theta": 5e6,
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
        },
    )
    config = build_config(folder, Settings(tp_degree=1, seq_len=64))
    assert config.rope_theta == 5e6
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    assert not hasattr(config, "rope_parameters")


def test_the_librarys_own_way_to_a_config_is_checked_too(folder):
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(tp_degree=2, seq_len=64)
    rewrite(folder, rms_norm_eps=-1.0)
    with pytest.raises(SmolLM3Error, match="rms_norm_eps is -1.0"):
        SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(str(folder)))
    rewrite(folder, rms_norm_eps=1e-6)
    with pytest.raises(SmolLM3Error, match=r"no_rope_layers\[2\] is 2"):
        SmolLM3InferenceConfig(
            neuron_config, load_config=load_pretrained_config(str(folder)), no_rope_layers=[1, 1, 2, 0, 1, 1, 1, 0]
        )


def test_nope_layers_have_no_rotary_embedding(folder):
    rewrite(folder, no_rope_layers=[0, 1, 1, 1, 0, 0, 1, 1, 1, 1])  # longer than the layers: cut
    config = build_config(folder, Settings(tp_degree=2, seq_len=64))
    model = NeuronSmolLM3ForCausalLM(str(folder), config).context_encoding_model._build(64)
    assert [int(layer.self_attn.rotary_emb is not None) for layer in model.layers] == [0, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_the_head(folder, tied):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(weights, folder / "model.safetensors")
        rewrite(folder, tie_word_embeddings=False)
    config = build_config(folder, Settings(tp_degree=1, seq_len=64))
    state_dict = NeuronSmolLM3ForCausalLM.get_state_dict(str(folder), config)
    embed, head = state_dict["embed_tokens.weight"], state_dict["lm_head.weight"]
    assert torch.equal(head, embed if tied else embed.flip(0)) and head.data_ptr() != embed.data_ptr()
