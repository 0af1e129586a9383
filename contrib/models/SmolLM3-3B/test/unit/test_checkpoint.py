import json
import logging
import math

import pytest
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from safetensors.torch import save_file

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import CheckpointConfig, resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B
from smollm3_neuron.weights import checkpoint
from smollm3_neuron.weights.files import INDEX_FILE


def config(**changes) -> CheckpointConfig:
    values = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e4,
    )  # fmt: skip
    return resolve_config({**values, **changes})


def tensors(config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in checkpoint.expected_shapes(config).items()}


def save(folder, state_dict, shards=1, prefix="model.") -> None:
    named = {name if name.startswith("lm_head") else prefix + name: tensor for name, tensor in state_dict.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(named.items())[shard::shards])
        save_file(part, folder / file)
        weight_map |= {name: file for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_the_tensors_of_the_3b():
    """As its checkpoint has them: 326 tensors, nine per layer, no head of its own."""
    shapes = checkpoint.expected_shapes(resolve_config(SMOLLM3_3B))
    assert len(shapes) == 326 == 36 * 9 + 2 and "lm_head.weight" not in shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == 3_075_098_624
    assert shapes["layers.35.self_attn.k_proj.weight"] == (512, 2048)
    assert shapes["layers.35.mlp.down_proj.weight"] == (2048, 11008)


@pytest.mark.parametrize("prefix", ["model.model.", "module.model.", "_orig_mod.model.", "base_model.model.model."])
def test_a_wrappers_prefix_is_named(tmp_path, prefix):
    save(tmp_path, tensors(config()), prefix=prefix)
    with pytest.raises(SmolLM3Error, match=f"begin with '{prefix}'.*save the model that is inside") as error:
        checkpoint.check_checkpoint(tmp_path, config())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head, drops", [(None, False), ("same", False), ("other", True), ("short", True)])
def test_a_head_that_is_dropped_is_noticed(tmp_path, monkeypatch, tied, head, drops):
    monkeypatch.setattr(checkpoint, "COMPARED_ROWS", 7)
    state_dict = tensors(config())
    embeddings = state_dict["embed_tokens.weight"]
    if head:
        state_dict["lm_head.weight"] = {"same": embeddings.clone(), "short": embeddings[:-1].clone()}.get(
            head, embeddings + 0
        )
        if head == "other":
            state_dict["lm_head.weight"][-1, -1] += 1
    save(tmp_path, state_dict, shards=2)
    assert checkpoint.drops_head(tmp_path, config(tie_word_embeddings=tied)) == (tied and drops)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}])
def test_what_was_saved_is_loaded(tmp_path, shards, prefix, changes):
    cfg = config(**changes)
    saved = tensors(cfg)
    save(tmp_path, saved, shards, prefix)
    loaded = checkpoint.load_state_dict(tmp_path, cfg, NeuronConfig())
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_stray_single_file_beside_an_index_is_not_taken(tmp_path):
    cfg = config()
    save(tmp_path, tensors(cfg), shards=2)
    save(tmp_path, {name: tensor + 1 for name, tensor in tensors(cfg).items()})
    loaded = checkpoint.load_state_dict(tmp_path, cfg, NeuronConfig())
    assert torch.equal(loaded["norm.weight"], tensors(cfg)["norm.weight"])


def test_faults_of_files_are_named(tmp_path):
    cfg = config()
    with pytest.raises(SmolLM3Error, match="neither model.safetensors.index.json nor model.safetensors"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SmolLM3Error, match="pytorch_model.bin is a PyTorch pickle, only safetensors"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    save(tmp_path, tensors(cfg), shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(SmolLM3Error, match="model-00002-of-00002.safetensors: not a whole safetensors file"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    second.unlink()
    with pytest.raises(SmolLM3Error, match="model-00002-of-00002.safetensors: missing, but"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    second.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(SmolLM3Error, match="is not in it, but model.safetensors.index.json says so"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(SmolLM3Error, match="not a weight index"):
        checkpoint.check_checkpoint(tmp_path, cfg)


def test_faults_of_names_and_shapes_are_named(tmp_path):
    cfg = config()
    wrong = tensors(cfg)
    del wrong["layers.1.mlp.up_proj.weight"], wrong["layers.1.mlp.down_proj.weight"]
    save(tmp_path, wrong)
    with pytest.raises(SmolLM3Error, match="layers.1.mlp.up_proj.weight is missing and 1 more"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    save(tmp_path, {**tensors(cfg), "layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(SmolLM3Error, match="layers.0.self_attn.q_norm.weight is unknown"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    save(tmp_path, {**tensors(cfg), "norm.weight": torch.ones(31)})
    with pytest.raises(SmolLM3Error, match=r"norm.weight has shape \(31,\), config.json asks for \(32,\)"):
        checkpoint.check_checkpoint(tmp_path, cfg)
    save(tmp_path, tensors(cfg))
    with pytest.raises(SmolLM3Error, match="lm_head.weight is missing, but tie_word_embeddings is false"):
        checkpoint.check_checkpoint(tmp_path, config(tie_word_embeddings=False))


@pytest.mark.parametrize(
    "tensor, name",
    [
        (torch.zeros(32, 48, dtype=torch.int8), "layers.0.mlp.down_proj.weight"),
        (torch.zeros(32, 48).to(torch.float8_e4m3fn), "layers.0.mlp.down_proj.weight"),
        (torch.zeros(1), "layers.0.mlp.down_proj.weight_scale"),
        (torch.zeros(4, 48, dtype=torch.int32), "layers.0.mlp.down_proj.qweight"),
    ],
)
def test_quantized_tensors_are_recognised(tmp_path, tensor, name):
    cfg = config()
    save(tmp_path, {**tensors(cfg), name: tensor})
    with pytest.raises(
        SmolLM3Error, match=f"{name} is .*, as in a quantized checkpoint, which is not read; use the bfloat16"
    ):
        checkpoint.check_checkpoint(tmp_path, cfg)


def test_leftovers_of_old_versions_are_dropped(tmp_path):
    cfg = config()
    save(tmp_path, {**tensors(cfg), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    converted = checkpoint.to_neuron_state_dict(
        checkpoint.load_state_dict(tmp_path, cfg, NeuronConfig()), cfg, NeuronConfig()
    )
    assert not [name for name in converted if "inv_freq" in name]


def test_names_of_a_state_dict_are_checked_too():
    cfg = config()
    for changed, message in (
        ({"norm.bias": torch.ones(32)}, "the state dict: norm.bias is unknown"),
        ({"layers.1.mlp.up_proj.weight": None}, "the state dict: layers.1.mlp.up_proj.weight is missing"),
    ):
        state_dict = {name: tensor for name, tensor in {**tensors(cfg), **changed}.items() if tensor is not None}
        with pytest.raises(SmolLM3Error, match=message):
            checkpoint.to_neuron_state_dict(state_dict, cfg, NeuronConfig())


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings(same, caplog):
    cfg = config()
    state_dict = tensors(cfg)
    state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"] + (0 if same else 1)
    with caplog.at_level(logging.WARNING, logger="Neuron"):
        converted = checkpoint.to_neuron_state_dict(state_dict, cfg, NeuronConfig())
    assert "lm_head.weight" not in converted  # update_state_dict_for_tied_weights writes it
    assert [record for record in caplog.records if "dropped" in record.message] == [] if same else caplog.records


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("tp_degree, repeats", [(1, 1), (2, 1), (4, 1), (3, 2), (8, 1)])
def test_kv_heads_are_expanded_only_where_tp_cannot_shard_them(tp_degree, repeats, fused_qkv):
    cfg = config(attention_bias=True)
    before = tensors(cfg)
    after = checkpoint.to_neuron_state_dict(dict(before), cfg, NeuronConfig(tp_degree=tp_degree, fused_qkv=fused_qkv))
    for kind in ("weight", "bias"):
        q, k, v = (before[f"layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        heads = [head for head in k.split(8) for _ in range(repeats)]
        v_heads = [head for head in v.split(8) for _ in range(repeats)]
        if fused_qkv:
            expected = torch.cat([q, *heads, *v_heads])
            assert torch.equal(after[f"layers.1.self_attn.Wqkv.{kind}"], expected)
            assert f"layers.1.self_attn.k_proj.{kind}" not in after
        else:
            assert torch.equal(after[f"layers.1.self_attn.k_proj.{kind}"], torch.cat(heads))
            assert torch.equal(after[f"layers.1.self_attn.v_proj.{kind}"], torch.cat(v_heads))
    for name in ("rank_util.rank", "layers.0.self_attn.rank_util.rank"):
        assert after[name].tolist() == list(range(tp_degree)) and after[name].dtype == torch.int32


@pytest.mark.parametrize("size, rows, bias_rows", [(None, 48, 50), (60, 60, 60)])
def test_an_mlp_is_padded_with_zeros_where_the_library_would_not(size, rows, bias_rows):
    """It pads a weight for its 5 ranks by itself, and not the bias beside it."""
    cfg = config(mlp_bias=True)
    before = tensors(cfg)
    after = checkpoint.to_neuron_state_dict(dict(before), cfg, NeuronConfig(tp_degree=5, padded_intermediate_size=size))
    for name in ("gate_proj", "up_proj"):
        for kind, length in (("weight", rows), ("bias", bias_rows)):
            found, own = (state[f"layers.1.mlp.{name}.{kind}"] for state in (after, before))
            assert len(found) == length and torch.equal(found[:48], own) and not found[48:].any()
    found, own = (state["layers.1.mlp.down_proj.weight"] for state in (after, before))
    assert found.shape == (32, rows) and torch.equal(found[:, :48], own) and not found[:, 48:].any()
    assert torch.equal(after["layers.1.mlp.down_proj.bias"], before["layers.1.mlp.down_proj.bias"])
    assert torch.equal(after["layers.1.self_attn.o_proj.weight"], before["layers.1.self_attn.o_proj.weight"])
