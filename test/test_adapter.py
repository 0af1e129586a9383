"""--merge-adapter: PEFT adapters merged while the weights are sharded, against PEFT on transformers."""

import json
from dataclasses import asdict

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from smollm3_neuron.artifact import Settings, compile_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generation import generate
from smollm3_neuron.reference import load_reference
from smollm3_neuron.runtime import ensure_neuronx
from transformers import SmolLM3ForCausalLM

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[7, 45, 101, 9, 200], [250, 3, 77]]
NEW_TOKENS = 12
SETTINGS = Settings(tp_degree=2, batch_size=2, seq_len=64, torch_dtype="float32")
CASES = {
    "every linear": ("plain", dict(target_modules=LINEARS)),
    "untied head and embeddings": ("untied", dict(target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "patterns": (
        "plain",
        dict(target_modules=LINEARS, rank_pattern={"o_proj": 2, r"layers\.1\.mlp\..*": 3}, alpha_pattern={"layers.2.self_attn.q_proj": 64}),
    ),
    "rslora": ("plain", dict(target_modules=LINEARS, use_rslora=True, r=5)),
    "some layers": ("plain", dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 4])),
    "fan_in_fan_out": ("plain", dict(target_modules=["up_proj", "o_proj"], fan_in_fan_out=True)),
    "trained biases": ("biases", dict(target_modules=["q_proj", "down_proj"], bias="all")),
    "bias of lora_B": ("biases", dict(target_modules=["k_proj", "gate_proj"], lora_bias=True)),
    "dora": ("plain", dict(target_modules=LINEARS, use_dora=True)),
    "whole modules": ("untied", dict(target_modules=["q_proj"], modules_to_save=["lm_head", "input_layernorm", "up_proj", "norm"])),
    "saved embeddings": ("plain", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    "saved tied head": ("plain", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "tied embeddings": ("plain", dict(target_modules=["embed_tokens", "q_proj"])),
    "tied head": ("plain", dict(target_modules=["lm_head"])),
    "embeddings and head kept tied": ("plain", dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
}


def make_adapter(checkpoint, folder, **config):
    """A random adapter of PEFT's own; every tensor of it different from what it starts with."""
    base = SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def load_peft(checkpoint, adapter, dtype=torch.float32):
    return PeftModel.from_pretrained(SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=dtype), adapter).eval()


def tokens_of(model):
    return [
        model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip


@pytest.fixture(scope="module")
def swap(random_checkpoints, tmp_path_factory):
    """The artifact of a checkpoint, compiled once, with an adapter in its weights."""
    ensure_neuronx()
    folder = tmp_path_factory.mktemp("artifacts")

    def swapped(name, adapter):
        output = folder / name
        standing = output.exists()
        return compile_artifact(
            Path(random_checkpoints[name]), output, SETTINGS, "cpu", weights_only=standing, merge_adapter=adapter
        )

    return swapped


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_pefts(case, swap, random_checkpoints, tmp_path):
    checkpoint, config = CASES[case]
    adapter = make_adapter(random_checkpoints[checkpoint], tmp_path / "adapter", **config)
    artifact = swap(checkpoint, adapter)
    found = [result.tokens for result in generate(artifact.load(), PROMPTS, NEW_TOKENS, pad_token_id=0)]
    reference = load_peft(random_checkpoints[checkpoint], adapter)
    expected = tokens_of(reference)
    assert found == expected
    assert found != tokens_of(SmolLM3ForCausalLM.from_pretrained(random_checkpoints[checkpoint]))
    assert tokens_of(load_reference(random_checkpoints[checkpoint], adapter=adapter)) == expected
    if "tied" not in case:
        assert tokens_of(reference.merge_and_unload()) == expected
