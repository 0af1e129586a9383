"""SmolLM3InferenceConfig and the modules' shape, on the CPU runtime; the real library's are in conformance/."""

import json
import shutil

import pytest
import torch

from smollm3_neuron.artifact import build
from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.reference import load_reference, reference_generate
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config

ensure_neuronx()

from neuronx_distributed_inference.models.config import NeuronConfig
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


AS_MET = {
    "an empty rope_scaling": {"rope_scaling": {}},
    "rope_scaling of nulls": {"rope_scaling": {"rope_type": None, "factor": None}},
    "both spellings of the type, which differ": {
        "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}
    },
    "layer_types of a deeper model": {"layer_types": ["full_attention"] * 36},
    "layer_types and a window of a deeper model": {
        "layer_types": (["full_attention"] * 3 + ["sliding_attention"]) * 9,
        "use_sliding_window": True,
        "sliding_window": 8,
    },
    "layer_types of a shallower model": {"layer_types": ["full_attention"]},
    "no pad_token_id": {"pad_token_id": ...},
    "pad_token_id null": {"pad_token_id": None},
    "a pad_token_id that the vocabulary has not": {"pad_token_id": 128004},
    "a pad_token_id below 0": {"pad_token_id": -1},
}


SCALED = {"both spellings of the type, which differ": {"rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize("case", AS_MET)
def test_a_config_as_met_runs_as_the_reference_does(random_checkpoints, tmp_path, monkeypatch, case):
    """The model and transformers, each from the folder, give the same tokens for prompts of unequal lengths."""
    monkeypatch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")  # and not compile each ahead of time
    folder = shutil.copytree(random_checkpoints["plain"], tmp_path / "checkpoint")
    removed = [name for name, value in AS_MET[case].items() if value is ...]
    rewrite(folder, *removed, **{name: value for name, value in AS_MET[case].items() if value is not ...})
    settings = Settings(tp_degree=1, batch_size=2, seq_len=32, torch_dtype="float32")
    model = build.compile_artifact(folder, tmp_path / "artifact", settings, "cpu").load()
    prompts = [[5, 70, 9, 100, 33, 12, 40, 8, 90, 17, 60, 2], [7, 8, 9]]
    reference = load_reference(folder)
    expected = [reference_generate(reference, prompt, 8).tokens for prompt in prompts]
    assert [result.tokens for result in generate(model, prompts, 8)] == expected
    assert model.config.rope_scaling == reference.config.rope_scaling == SCALED.get(case)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 2**40},
        {"id2label": 5, "label2id": [1]},
        {"neuron_config": {"tp_degree": 8}},
        {"text_config": {"hidden_size": 5}},
        {"attribute_map": {"hidden_size": "vocab_size"}},
        {"problem_type": "x", "torchscript": True, "return_dict": False},
        {"output_attentions": True, "attn_implementation": "flash_attention_2"},
    ],
)
def test_fields_that_the_model_has_not_do_nothing(fields, folder):
    """transformers would set each as an attribute, or make as many labels."""
    settings = Settings(tp_degree=1, seq_len=64)
    expected = build_config(folder, settings).to_json_string()
    rewrite(folder, **fields)
    assert build_config(folder, settings).to_json_string() == expected


@pytest.mark.parametrize("fields", [{"partial_rotary_factor": 0.5}, {"pruned_heads": {"0": [1]}}])
def test_fields_that_transformers_cannot_run_are_refused(fields, folder):
    rewrite(folder, **fields)
    with pytest.raises(SmolLM3Error, match=f"{next(iter(fields))} is .*, which SmolLM3 cannot be run with"):
        read_config(folder)


def test_the_library_is_silent_about_its_own_keywords(folder, tmp_path, caplog):
    config = build_config(folder, Settings(tp_degree=1, seq_len=64))
    config.save(tmp_path)
    SmolLM3InferenceConfig.load(tmp_path)
    assert caplog.messages == []
    NeuronConfig(not_a_keyword=1)  # the library's own class still says so
    assert "not_a_keyword" in caplog.text


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
