"""Scaled rotary embeddings against transformers, and how far either is from float64."""

import pytest
import torch
from transformers import SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.rope import ScaledRotaryEmbedding
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

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
    return resolve_config({**SMOLLM3_3B, **values}), SmolLM3Config(**values)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("head_dim", [16, 72, 128])
def test_inverse_frequencies_are_transformers_bit_for_bit(scaling, head_dim):
    ours, theirs = configs(scaling, head_dim)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    found, found_factor = ScaledRotaryEmbedding(ours)._rope_parameters(None)
    assert torch.equal(found, expected) and found_factor == factor


def test_the_attention_factor_of_the_model_card():
    assert ScaledRotaryEmbedding(configs(SCALINGS["yarn as the model card has it"])[0])._rope_parameters(None)[1] == (
        pytest.approx(1.0693, abs=5e-5)
    )


def errors(ours, theirs, inv_freq, factor) -> list[float]:
    """How far cos and sin of each module are from float64 at most, at positions up to 131,071."""
    positions = torch.cat([torch.arange(0, 131072, 97), torch.tensor([65535, 65536, 70000, 131071])])[None]
    angles = torch.cat([positions[0, :, None].double() * inv_freq.double()] * 2, dim=-1)
    exact = angles.cos() * factor, angles.sin() * factor
    pairs = [module(torch.zeros(1), positions) for module in (ours, theirs)]
    return [max(float((a[0].double() - b).abs().max()) for a, b in zip(pair, exact)) for pair in pairs]


def report(found, capsys) -> None:
    with capsys.disabled():
        print(f"\n  largest error of cos and sin up to 131,071: {found[0]:.2e}, transformers {found[1]:.2e}", end="")


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cos_and_sin_up_to_131071_are_no_further_from_float64_than_transformers(scaling, capsys):
    ours, theirs = configs(scaling)
    parameters = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    found = errors(ScaledRotaryEmbedding(ours), SmolLM3RotaryEmbedding(theirs), *parameters)
    report(found, capsys)
    assert found[0] <= found[1]


def test_without_scaling_they_are_neither(capsys):
    """The library's own module; here the frequencies are float64, too."""
    from smollm3_neuron.modeling_smollm3_3b import get_rotary_embedding

    values = dict(rope_theta=5e6, rope_scaling=None, max_position_embeddings=65536, head_dim=128)
    inv_freq = 5e6 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = get_rotary_embedding(resolve_config({**SMOLLM3_3B, **values}))
    theirs = SmolLM3RotaryEmbedding(SmolLM3Config(**values))
    found = errors(ours, theirs, inv_freq, 1.0)
    report(found, capsys)
    assert found[0] <= found[1]
