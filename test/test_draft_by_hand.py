"""What a draft asks of the model file, the shard writer and `generate`, on stand-ins whose answers are plain to see."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from smollm3_neuron.machine.runtime import ensure_neuronx

ensure_neuronx()

from neuronx_distributed_inference.models.config import NeuronConfig

import smollm3_neuron.modeling_smollm3_3b as modeling
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.modeling_smollm3_3b import (
    NeuronSmolLM3ForCausalLM,
    NeuronSmolLM3Model,
    SmolLM3InferenceConfig,
    SmolLM3NeuronConfig,
)
from smollm3_neuron.weights.projections import expected_shapes
from smollm3_neuron.weights.shard_writer import Model, shard_bytes, write_shards

FIELDS = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50, max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e4,
)  # fmt: skip
WIDTH, VOCAB = 4, 50


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shapes = expected_shapes(resolve_config(FIELDS))
    save_file({f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


class Drafted:
    """Stands in for graphs with a draft: each token is the one before and 1, a step accepts the next of `accepts`."""

    def __init__(self, accepts):
        self.accepts = accepts
        neuron_config = SimpleNamespace(
            is_prefix_caching=False, batch_size=1, seq_len=64, max_context_length=64, enable_fused_speculation=True,
            speculation_length=WIDTH,
            on_device_sampling_config=SimpleNamespace(do_sample=False, dynamic=False, global_topk=VOCAB),
        )  # fmt: skip
        self.config = SimpleNamespace(vocab_size=VOCAB, neuron_config=neuron_config)

    def reset(self):
        self.left = list(self.accepts)

    def __call__(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params):
        is_prompt = len(self.left) == len(self.accepts) and input_ids.shape[1] > 1
        count = 1 + (0 if is_prompt else self.left.pop(0))
        tokens = input_ids[:, -1:] + 1 + torch.arange(WIDTH)
        tokens[:, count:] = 0
        stands = position_ids[:, -1:] + count
        return SimpleNamespace(fused_outputs=[tokens, tokens * 0 + 9, attention_mask, stands])


@pytest.mark.parametrize("limit, accepted, offered", [(9, 5, 9), (8, 4, 8), (5, 2, 6), (2, 0, 3)])
def test_what_of_a_draft_counts_as_accepted(limit, accepted, offered):
    """Of the step in which the answer ends only what the answer still has; of any other, all that was guessed."""
    (result,) = generate(Drafted([0, 2, 3]), [[1, 2]], limit)
    assert result.tokens == list(range(3, 3 + limit))
    assert (result.accepted, result.offered) == (accepted, offered)


def test_the_librarys_prefix_is_of_one_folder(checkpoint, monkeypatch):
    neuron_config = SmolLM3NeuronConfig(tp_degree=1, seq_len=64, torch_dtype=torch.float32)
    config = SmolLM3InferenceConfig(neuron_config, **FIELDS, no_rope_layers=[1, 0], pad_token_id=3)
    monkeypatch.setattr(NeuronSmolLM3ForCausalLM, "_FUSED_PREFIX", "draft_model", raising=False)
    found = NeuronSmolLM3ForCausalLM.get_state_dict(str(checkpoint), config)
    plain = NeuronSmolLM3ForCausalLM.get_state_dict(str(checkpoint), config)
    assert found.keys() == {f"draft_model.{name}" for name in plain} and "lm_head.weight" in plain


def test_a_rank_of_both_has_the_order_of_the_safetensors_library(checkpoint, tmp_path):
    """And as many bytes as were counted before."""
    config, neuron_config = resolve_config(FIELDS), NeuronConfig(tp_degree=1, torch_dtype=torch.bfloat16)
    draft, written = Model(checkpoint, config, neuron_config), []
    write_shards(checkpoint, config, neuron_config, tmp_path / "both", written.append, draft=draft)
    content = (tmp_path / "both/tp0_sharded_checkpoint.safetensors").read_bytes()
    tensors = load_file(tmp_path / "both/tp0_sharded_checkpoint.safetensors")
    names, wanted = (list(json.loads(c[8 : 8 + int.from_bytes(c[:8], "little")])) for c in (content, save(tensors)))
    assert names == wanted
    header = 8 + int.from_bytes(content[:8], "little")
    assert sum(written) - header == shard_bytes(config, neuron_config, draft) == len(content) - header


@pytest.mark.parametrize("is_draft", [True, False])
def test_a_row_of_a_drafts_step_sees_what_stands_before_its_own(is_draft, monkeypatch):
    model, seen = NeuronSmolLM3Model.__new__(NeuronSmolLM3Model), []
    nn.Module.__init__(model)
    model.speculation_length, model.vocab_size, model.on_device_sampling = 4, 5, True
    model.neuron_config = SimpleNamespace(is_prefix_caching=False, use_draft_group=is_draft)
    model.lm_head = SimpleNamespace(pad_size=0)
    monkeypatch.setattr(
        modeling.NeuronBaseModel, "forward", lambda self, ids, mask, *rest: seen.append(mask) or [torch.zeros(2, 1)]
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    model(torch.zeros(2, 1, dtype=torch.long), mask, torch.tensor([[5], [2]]))
    assert seen[0].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0] if is_draft else mask[1].tolist()]


@pytest.fixture
def app(monkeypatch):
    """The application class, whose base keeps what it is called with and returns a draft's and the model's tokens."""
    app = NeuronSmolLM3ForCausalLM.__new__(NeuronSmolLM3ForCausalLM)
    nn.Module.__init__(app)
    app.neuron_config = SimpleNamespace(
        is_continuous_batching=True, is_block_kv_layout=False, async_mode=False, enable_fused_speculation=True
    )
    app.default_sampling_params = torch.ones(4, 3)

    def forward(self, **inputs):
        app.seen = inputs
        ids = inputs["input_ids"]
        return SimpleNamespace(fused_outputs=[ids * 10, ids * 100], logits=None)

    monkeypatch.setattr(modeling.NeuronBaseForCausalLM, "forward", forward)
    return app


def test_what_a_draft_returns_comes_back_as_the_rows_were_given(app):
    ids = torch.tensor([[5], [6], [7]])
    output = app(ids, seq_ids=torch.tensor([2, 0, 1]), position_ids=ids)
    assert app.seen["input_ids"].tolist() == [[6], [7], [5]]
    assert [rows.tolist() for rows in output.fused_outputs] == [(ids * 10).tolist(), (ids * 100).tolist()]


@pytest.mark.parametrize("positions, is_draft, mask", [
    ([[0], [0]], True, [[1], [1]]),  # prompts of one token, whose mask the library would infer to be empty
    ([[0], [0]], False, None),  # with prefix caching it wants none
    ([[0], [3]], True, None),  # a step
    ([[0, 0]], True, None),
])  # fmt: skip
def test_a_prompt_of_one_token_has_a_mask_with_a_draft(positions, is_draft, mask, app):
    app.neuron_config.enable_fused_speculation = is_draft
    positions = torch.tensor(positions)
    app(torch.ones_like(positions), position_ids=positions)
    found = app.seen["attention_mask"]
    assert (found if found is None else found.tolist()) == mask
    given = torch.zeros_like(positions)
    app(torch.ones_like(positions), position_ids=positions, attention_mask=given)
    assert app.seen["attention_mask"] is given
