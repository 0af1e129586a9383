"""Scaled rotary embeddings against transformers, and how far either is from float64."""

import math

import pytest
import torch
from transformers import SmolLM3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.rope import RotaryTable, ScaledRotaryEmbedding
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
    "llama3, other bounds": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 4096,
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
    assert torch.equal(ScaledRotaryEmbedding(ours).get_inv_freqs(), expected)  # which the library's attention asks for


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
    assert (ours.dim, ours.base, ours.max_position_embeddings) == (128, 5e6, 65536)
    theirs = SmolLM3RotaryEmbedding(SmolLM3Config(**values))
    found = errors(ours, theirs, inv_freq, 1.0)
    report(found, capsys)
    assert found[0] <= found[1]


def frequencies_by_hand(scaling) -> tuple[list[float], float]:
    """YaRN's inverse frequencies (arXiv 2309.00071, section 3.2) or unscaled ones for 64 pairs, and the attention
    factor (3.4), in Python's floats, which are float64."""
    plain = [5e6 ** (-pair / 64) for pair in range(64)]
    if scaling is None:
        return plain, 1.0

    def pair_of(turns: float) -> float:
        return 64 * math.log(65536 / (turns * 2 * math.pi)) / math.log(5e6)

    first, last = math.floor(pair_of(32)), math.ceil(pair_of(1))
    ramp = [min(1.0, max(0.0, (pair - first) / (last - first))) for pair in range(64)]
    return [f * (1 - r) + f / 2 * r for f, r in zip(plain, ramp)], 0.1 * math.log(2) + 1


@pytest.mark.parametrize("name", [None, "yarn as the model card has it"])
@pytest.mark.parametrize("position", [7, 70000, 131071])
def test_the_table_is_float64s_and_transformers_is_not(name, position):
    scaling = SCALINGS.get(name)
    values = dict(rope_theta=5e6, rope_scaling=scaling, max_position_embeddings=65536, head_dim=128)
    inv_freq, factor = frequencies_by_hand(scaling)
    exact = [
        torch.tensor([f(position * w) * factor for w in inv_freq], dtype=torch.float64) for f in (math.cos, math.sin)
    ]

    def error(module) -> float:
        found = module(torch.zeros(1), torch.tensor([[position]]))
        halves = [half for table in found for half in table[0, 0].double().chunk(2)]
        wanted = [exact[0], exact[0], exact[1], exact[1]]
        return max(float((half - right).abs().max()) for half, right in zip(halves, wanted))

    ours = RotaryTable(resolve_config({**SMOLLM3_3B, **values}), 131072)
    assert error(ours) <= 1e-7 and not ours.state_dict()  # a checkpoint has no table
    if position > 7:
        assert error(SmolLM3RotaryEmbedding(SmolLM3Config(**values))) > 1e-3


@pytest.mark.parametrize("scaling", [None, *SCALINGS.values()], ids=["none", *SCALINGS])
def test_the_table_has_transformers_formula_of_every_scaling(scaling):
    """At near positions, where float32 is good: a formula that was another one would be far off."""
    values = dict(rope_theta=5e6, rope_scaling=scaling, max_position_embeddings=65536, head_dim=128)
    positions = torch.arange(64)[None]
    ours = RotaryTable(resolve_config({**SMOLLM3_3B, **values}), 64)(torch.zeros(1), positions)
    theirs = SmolLM3RotaryEmbedding(SmolLM3Config(**values))(torch.zeros(1), positions)
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
