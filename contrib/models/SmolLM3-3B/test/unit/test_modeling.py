"""What the model hands on to the library, whose own classes are stood in for where this runtime makes no difference."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smollm3_neuron.modeling_smollm3_3b as modeling
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model import interfaces
from smollm3_neuron.modeling_smollm3_3b import (
    NeuronSmolLM3Attention,
    NeuronSmolLM3DecoderLayer,
    NeuronSmolLM3ForCausalLM,
    NeuronSmolLM3Model,
    SmolLM3InferenceConfig,
    SmolLM3NeuronConfig,
)

FIELDS = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50, max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e4,
    no_rope_layers=[1, 0], pad_token_id=3,
)  # fmt: skip


def config(neuron=None, **changes) -> SmolLM3InferenceConfig:
    values = {"tp_degree": 1, "seq_len": 64, "torch_dtype": torch.float32, **(neuron or {})}
    return SmolLM3InferenceConfig(SmolLM3NeuronConfig(**values), **{**FIELDS, **changes})


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_devices_norm_is_only_for_devices(on_cpu, monkeypatch):
    monkeypatch.setattr(modeling, "cpu_mode", lambda: on_cpu)
    assert modeling.get_rmsnorm_cls() is (modeling.SmolLM3RMSNorm if on_cpu else modeling.CustomRMSNorm)


def test_a_rotation_in_float32_is_the_default_and_is_not_saved():
    plain, wide = SmolLM3NeuronConfig(), SmolLM3NeuronConfig(rope_precision="float64")
    assert plain.rope_precision == "float32" and "rope_precision" not in vars(plain)
    assert vars(wide)["rope_precision"] == "float64"
    assert vars(SmolLM3NeuronConfig(rope_precision="float32")).keys() == vars(plain).keys()
    with pytest.raises(SmolLM3Error, match="rope_precison"):  # the library would warn of it, and go on without
        SmolLM3NeuronConfig(rope_precison="float64")


@pytest.mark.parametrize("given, used", [(3, 3), (0, 0), (49, 49), (50, 0), (128_004, 0), (-1, 0), (None, 0)])
def test_the_library_pads_with_a_token_of_the_vocabulary(given, used):
    assert config(pad_token_id=given).pad_token_id == used


def test_a_config_without_what_the_library_needs_is_refused(monkeypatch):
    """By the library's own check, which is called, too."""
    required = SmolLM3InferenceConfig.get_required_attributes
    monkeypatch.setattr(
        SmolLM3InferenceConfig, "get_required_attributes", lambda self: [*required(self), "missing_one"]
    )
    with pytest.raises(AssertionError, match="missing_one"):
        config()


def test_a_release_is_looked_at_before_anything_of_it_is_imported(monkeypatch):
    def refuse():
        raise SmolLM3Error("another release")

    monkeypatch.setattr(interfaces, "check_installed", refuse)
    spec = importlib.util.find_spec(modeling.__name__)
    again = importlib.util.module_from_spec(spec)
    with pytest.raises(SmolLM3Error, match="another release"):
        spec.loader.exec_module(again)
    assert "NeuronConfig" not in vars(again)


class Kept(nn.Module):
    """Stands in for a part of a layer: keeps what it is called with."""

    def __init__(self, result, **attributes):
        super().__init__()
        self.result = result
        vars(self).update(attributes)

    def forward(self, *arguments, **named):
        self.arguments, self.named = arguments, named
        return self.result


@pytest.mark.parametrize("rotary_emb", [None, "a rotation"])
@pytest.mark.parametrize("window", [None, 16])
def test_a_layer_hands_on_all_that_it_is_given(rotary_emb, window):
    layer = NeuronSmolLM3DecoderLayer.__new__(NeuronSmolLM3DecoderLayer)
    nn.Module.__init__(layer)
    attended = SimpleNamespace(hidden_states=torch.tensor(2.0), present_key_value="kv", cos_cache="c", sin_cache="s")
    layer.self_attn = Kept(attended, rotary_emb=rotary_emb, sliding_window=window)
    layer.mlp = Kept([torch.tensor(5.0)])
    layer.input_layernorm = lambda states: states * 10
    layer.post_attention_layernorm = lambda states: states * 100
    given = {
        "position_ids": "positions", "past_key_value": "past", "adapter_ids": "adapters", "cos_cache": "cos",
        "sin_cache": "sin", "seq_ids": "of the library",
    }  # fmt: skip
    output = layer(torch.tensor(1.0), attention_mask="mask", local_mask="local", **given)
    assert layer.self_attn.named.pop("hidden_states") == 10
    assert layer.self_attn.named == {**given, "attention_mask": "local" if window else "mask"}
    assert layer.mlp.arguments == (torch.tensor(300.0),) and layer.mlp.named == {"adapter_ids": "adapters"}
    waves = ("c", "s") if rotary_emb else ("cos", "sin")  # a NoPE layer hands on those that it was given
    assert output == (torch.tensor(8.0), "kv", *waves, None)


class Calls(list):
    """Stands in for a class: keeps the arguments that its objects are made of."""

    def __call__(self, *arguments, **named):
        self.append((arguments, named))
        return nn.Identity()


@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_how_embeddings_and_head_are_cut(vocab_parallel, monkeypatch):
    """In [batch, seq, hidden] the sequence is dimension 1; what TP does not divide is padded; a device that samples
    needs each rank's own logits, and no others."""
    embedding, head = Calls(), Calls()
    monkeypatch.setattr(modeling, "ParallelEmbedding", embedding)
    monkeypatch.setattr(modeling, "ColumnParallelLinear", head)
    monkeypatch.setattr(modeling, "NeuronSmolLM3DecoderLayer", lambda config, layer_idx: nn.Identity())
    for sampling in (False, True):
        model = SimpleNamespace(on_device_sampling=sampling)
        NeuronSmolLM3Model.init_model(model, config({"vocab_parallel": vocab_parallel, "torch_dtype": torch.bfloat16}))
        assert len(model.layers) == 2
        assert embedding.pop() == (
            (50, 32, 3),
            {
                "dtype": torch.bfloat16, "shard_across_embedding": not vocab_parallel, "use_spmd_rank": vocab_parallel,
                "sequence_parallel_enabled": False, "sequence_dimension": 1, "pad": True,
            },
        )  # fmt: skip
        assert head.pop() == (
            (32, 50),
            {
                "bias": False, "pad": True, "gather_output": not sampling, "keep_padded_output": True,
                "dtype": torch.bfloat16,
            },
        )  # fmt: skip


def test_attention_is_made_of_the_config(monkeypatch):
    named = {}
    monkeypatch.setattr(modeling.NeuronAttentionBase, "__init__", lambda self, **arguments: named.update(arguments))
    for layer_idx, rotates in ((0, True), (1, False)):
        one = config(attention_bias=True)
        NeuronSmolLM3Attention(one, layer_idx)
        rotary_emb = named.pop("rotary_emb")
        assert (rotary_emb is not None) == rotates
        assert named == {
            "config": one, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "rms_norm_eps": 1e-6, "qkv_bias": True, "o_bias": True, "sliding_window": None,
        }  # fmt: skip


def test_only_one_graph_lays_out_the_weights(monkeypatch):
    calls, base = [], modeling.NeuronBaseForCausalLM
    monkeypatch.setattr(base, "enable_token_generation", lambda self, **named: calls.append(("one token", named)))
    monkeypatch.setattr(base, "enable_speculation", lambda self, **named: calls.append(("several", named)))
    NeuronSmolLM3ForCausalLM.__new__(NeuronSmolLM3ForCausalLM).enable_speculation()
    assert calls == [("one token", {}), ("several", {"enable_wlt_optimization": False})]


@pytest.mark.parametrize("strategy, is_prefix_caching", [("NONE", True), ("NONE", False), ("SHARDED_KERNEL", True)])
def test_a_cached_prefix_is_masked_where_no_kernel_does_it(strategy, is_prefix_caching, monkeypatch):
    attention = NeuronSmolLM3Attention.__new__(NeuronSmolLM3Attention)
    nn.Module.__init__(attention)
    calls, chosen = [], SimpleNamespace(name=strategy)
    attention.neuron_config = SimpleNamespace(is_prefix_caching=is_prefix_caching)
    attention.get_flash_attention_strategy = lambda q_len, has_attention_mask: (
        calls.append((q_len, has_attention_mask)) or chosen
    )
    attention.compute_for_token_gen = lambda *arguments, **named: calls.append((arguments, named)) or "masked"
    monkeypatch.setattr(
        modeling.NeuronAttentionBase, "perform_prefix_prefill", lambda self, *arguments: arguments, raising=False
    )
    mask = torch.tensor([[1, 1, 0]])
    arguments = ("Q", "K", "V", 4, 1, mask, "past", "active")
    found = attention.perform_prefix_prefill(*arguments)
    assert calls.pop(0) == (4, False)
    if strategy != "NONE" or not is_prefix_caching:
        assert found == arguments and not calls
        return
    assert found == ("masked", chosen)
    (((*first, of_prefix, active), named),) = calls
    assert first == ["Q", "K", "V", None, "past"] and active == "active" and named == {"is_prefix_caching": True}
    assert torch.equal(of_prefix, torch.tensor([[[[True, True, False]]]]))


@pytest.mark.parametrize("is_continuous, in_blocks", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("lines", [[0, 1, 2], [2, 0, 1], None])
def test_rows_are_given_by_their_lines_and_come_back_as_asked(is_continuous, in_blocks, lines, monkeypatch):
    """Only where the library takes rows for lines; what is no tensor, and sampling parameters, stay what they are."""
    seen, base = {}, modeling.NeuronBaseForCausalLM
    app = NeuronSmolLM3ForCausalLM.__new__(NeuronSmolLM3ForCausalLM)
    nn.Module.__init__(app)
    app.neuron_config = SimpleNamespace(
        is_continuous_batching=is_continuous, is_block_kv_layout=in_blocks, async_mode=False
    )
    app.default_sampling_params = torch.tensor([[1.0, 1.0, 1.0]] * 4)

    def forward(self, **inputs):
        seen.update(inputs)
        return SimpleNamespace(logits=inputs["input_ids"] * 10, hidden_states=None, tokens=inputs["input_ids"] * 100)

    monkeypatch.setattr(base, "forward", forward)
    ids, sampling_params = torch.tensor([[5], [6], [7]]), torch.tensor([[5.0, 1, 1], [6, 1, 1], [7, 1, 1]])
    seq_ids = None if lines is None else torch.tensor(lines)
    output = app(ids, seq_ids=seq_ids, position_ids=ids + 1, sampling_params=sampling_params, tf_args="as it is")
    is_sorted = is_continuous and not in_blocks and lines is not None
    order = sorted(range(3), key=lambda row: lines[row]) if is_sorted else [0, 1, 2]
    assert torch.equal(seen["input_ids"], ids[order]) and torch.equal(seen["position_ids"], ids[order] + 1)
    assert torch.equal(seen["sampling_params"], sampling_params[order])
    assert seen["tf_args"] == "as it is" and seen["attention_mask"] is None
    assert torch.equal(output.logits, ids * 10) and torch.equal(output.tokens, ids * 100)
    app(ids, seq_ids=seq_ids, position_ids=ids)
    assert torch.equal(seen["sampling_params"], torch.ones(3, 3))


def test_which_rotation_a_config_has():
    from smollm3_neuron.model.rope import RotaryTable, ScaledRotaryEmbedding

    plain = config().checkpoint_config
    scaled = config(rope_scaling={"rope_type": "linear", "factor": 2.0}).checkpoint_config
    assert type(modeling.get_rotary_embedding(plain, SmolLM3NeuronConfig())) is modeling.RotaryEmbedding
    assert type(modeling.get_rotary_embedding(scaled, SmolLM3NeuronConfig())) is ScaledRotaryEmbedding
    for one in (plain, scaled):
        table = modeling.get_rotary_embedding(one, SmolLM3NeuronConfig(rope_precision="float64", seq_len=40))
        assert type(table) is RotaryTable and table.cos.shape == (40, 4)


def test_every_check_sees_a_config(monkeypatch):
    """Those of others, as vLLM's, and that of adapters, which only a config that serves some has."""
    import smollm3_neuron.weights.adapter as adapter

    seen = []
    monkeypatch.setattr(SmolLM3InferenceConfig, "further_checks", (seen.append,))
    monkeypatch.setattr(adapter, "check_serving", lambda *configs: seen.append(configs))
    one = config()
    assert seen == [one]
    one.neuron_config.lora_config = "some adapters"
    one.validate_config()
    assert seen[1:] == [(one.checkpoint_config, one.neuron_config), one]


def test_a_model_without_windows_has_none():
    model = SimpleNamespace()
    NeuronSmolLM3Model.setup_attr_for_model(model, config())
    assert "has_mixed_attn" not in vars(model) and "sliding_window" not in vars(model)
    assert (model.tp_degree, model.hidden_size, model.on_device_sampling) == (1, 32, False)


@pytest.mark.parametrize("is_prefill_stage", [True, False])
def test_a_context_is_never_taken_for_tokens_to_be_verified(is_prefill_stage):
    """One as long as these are would be; the library sets the length before, for every graph."""
    one, model = config(), SimpleNamespace(speculation_length=4)
    one.neuron_config.is_prefill_stage = is_prefill_stage
    NeuronSmolLM3Model.setup_attr_for_model(model, one)
    assert model.speculation_length == (0 if is_prefill_stage else 4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_read_here_and_anything_else_by_the_library(tied, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from smollm3_neuron.weights.projections import expected_shapes

    one = config(tie_word_embeddings=tied)
    tensors = {name: torch.randn(shape) for name, shape in expected_shapes(one.checkpoint_config).items()}
    save_file({name if name.startswith("lm_head") else f"model.{name}": t for name, t in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    found = NeuronSmolLM3ForCausalLM.get_state_dict(str(tmp_path), one)
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(found["lm_head.weight"], tensors[head])
    assert torch.equal(found["norm.weight"], tensors["norm.weight"]) and "rank_util.rank" in found
    monkeypatch.setattr(
        modeling.NeuronBaseForCausalLM, "get_state_dict", classmethod(lambda cls, *arguments: arguments), raising=False
    )
    assert NeuronSmolLM3ForCausalLM.get_state_dict("owner/name", one) == ("owner/name", one)


@pytest.mark.parametrize("width, is_prefix_caching, window, positions", [
    (1, False, None, [[9]]),  # a step of one token or of as many as are verified: nothing is padded
    (4, False, None, [[0, 1, 1, 1]]),
    (3, False, None, [[0, 1, 0]]),  # a prompt of two tokens
    (3, True, None, [[0, 1, 1]]),
    (6, False, 3, [[0, 1, 0, 1, 1, 1]]),  # the first window only
])  # fmt: skip
def test_positions_of_padding_are_0_in_a_prompt(width, is_prefix_caching, window, positions, monkeypatch):
    model, seen = NeuronSmolLM3Model.__new__(NeuronSmolLM3Model), []
    nn.Module.__init__(model)
    model.speculation_length, model.vocab_size, model.on_device_sampling = 4, 5, False
    model.neuron_config = SimpleNamespace(is_prefix_caching=is_prefix_caching, windowed_context_encoding_size=window)
    model.lm_head = SimpleNamespace(pad_size=3)

    def forward(self, *arguments, **named):
        seen.append((arguments, named))
        return [torch.arange(8.0)[None, None], "K", "V"]

    monkeypatch.setattr(modeling.NeuronBaseModel, "forward", forward)
    ids, mask = torch.zeros(1, width, dtype=torch.long), torch.tensor([[1, 1, 0, 0, 0, 0][:width]])
    given = torch.tensor([[9] if width == 1 else [0, 1, 1, 1, 1, 1][:width]])
    logits, *caches = model(ids, mask, given, "seq_ids", "sampling_params", adapter_ids="adapters")
    (((found_ids, found_mask, found, *rest), named),) = seen
    assert found_ids is ids and found_mask is mask and found.tolist() == positions
    assert rest == ["seq_ids", "sampling_params"] and named == {"adapter_ids": "adapters"}
    # the vocabulary's padding is cut off here, and not where the device samples
    assert logits.tolist() == [[[0, 1, 2, 3, 4]]] and caches == ["K", "V"]
    model.on_device_sampling = True
    assert model(ids, mask, given)[0].shape == (1, 1, 8)


def test_every_norm_has_the_checkpoints_epsilon(monkeypatch):
    monkeypatch.setattr(modeling, "NeuronSmolLM3Attention", lambda config, layer_idx: nn.Identity())
    monkeypatch.setattr(modeling, "ParallelEmbedding", Calls())
    monkeypatch.setattr(modeling, "ColumnParallelLinear", Calls())
    monkeypatch.setattr(modeling, "NeuronLlamaMLP", lambda config: nn.Identity())
    model = SimpleNamespace(on_device_sampling=False)
    NeuronSmolLM3Model.init_model(model, config(rms_norm_eps=1e-3))
    norms = [
        model.norm,
        *(norm for one in model.layers for norm in (one.input_layernorm, one.post_attention_layernorm)),
    ]
    assert [norm.variance_epsilon for norm in norms] == [1e-3] * 5
    assert [tuple(norm.weight.shape) for norm in norms] == [(32,)] * 5
