"""Scaled rotary embeddings against transformers, and how far either is from float64."""

from types import SimpleNamespace

import pytest
import torch
from smollm3_neuron.rope import ScaledRotaryEmbedding
from transformers import SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

SCALINGS = {
    "yarn as the model card has it": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    "yarn, explicit attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn, other ramp": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def configs(scaling, head_dim=128):
    values = dict(rope_theta=5e6, rope_scaling=dict(scaling), max_position_embeddings=65536, head_dim=head_dim)
    return SimpleNamespace(hidden_size=2048, num_attention_heads=16, **values), SmolLM3Config(**values)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 72, 128])
def test_inverse_frequencies_are_transformers_bit_for_bit(scaling, head_dim):
    ours, theirs = configs(scaling, head_dim)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    found, found_factor = ScaledRotaryEmbedding(ours)._parameters_on(None)
    assert torch.equal(found, expected) and found_factor == factor


def test_the_attention_factor_of_the_model_card():
    assert ScaledRotaryEmbedding(configs(SCALINGS["yarn as the model card has it"])[0])._parameters_on(None)[1] == (
        pytest.approx(1.0693, abs=5e-5)
    )


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cos_and_sin_up_to_131071_are_no_further_from_float64_than_transformers(scaling, capsys):
    ours, theirs = configs(scaling)
    positions = torch.cat([torch.arange(0, 131072, 97), torch.tensor([65535, 65536, 70000, 131071])])[None]
    x = torch.zeros(1, dtype=torch.float32)
    found, expected = ScaledRotaryEmbedding(ours)(x, positions), SmolLM3RotaryEmbedding(theirs)(x, positions)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    angles = torch.cat([positions[0, :, None].double() * inv_freq.double()] * 2, dim=-1)
    exact = angles.cos() * factor, angles.sin() * factor
    errors = [max(float((a[0].double() - b).abs().max()) for a, b in zip(pair, exact)) for pair in (found, expected)]
    with capsys.disabled():
        print(f"\n  largest error of cos and sin up to 131,071: {errors[0]:.2e}, transformers {errors[1]:.2e}", end="")
    assert errors[0] <= errors[1]
