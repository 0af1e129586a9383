"""machine/scores.py: the figures, and which settings are warned of."""

import pytest

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.machine.roofline import Estimate
from smollm3_neuron.machine.scores import notes_on_attention
from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

CONFIG = resolve_config(SMOLLM3_3B)


def notes(**settings) -> list[str]:
    return notes_on_attention(CONFIG, Settings(**settings).checked(CONFIG))


@pytest.mark.parametrize("tp_degree, length, expected", [(2, 8192, 2.147e9), (2, 65536, 137.4e9), (8, 8192, 0.537e9)])
def test_scores(tp_degree, length, expected):
    assert Estimate(CONFIG, tp_degree, length).scores(length) == pytest.approx(expected, rel=1e-3)
    assert Estimate(CONFIG, tp_degree, length, window=512).scores(length) == pytest.approx(
        expected * 512 / length, rel=1e-3
    )


@pytest.mark.parametrize(
    "settings",
    [
        dict(seq_len=4096),
        dict(seq_len=8192),
        dict(seq_len=8192, batch_size=4, is_continuous_batching=True),
        dict(seq_len=16384, windowed_context_encoding_size=2048),
    ],
)
def test_nothing_to_say(settings):
    assert notes(**settings) == []


def test_the_bucket_is_named():
    lines = notes(seq_len=65536, enable_bucketing=True)
    assert [line.split(" may take")[0] for line in lines[:-1]] == [
        "the context bucket of 32768 tokens",
        "the context bucket of 65536 tokens",
    ]
    assert "137.4 GB of it for scores" in lines[1] and "windowed_context_encoding_size" in lines[1]
    assert "65536 tokens at a time: no report of a trn1 or inf2 goes beyond 8192" in lines[-1]


def test_the_rows_of_a_batch_count():
    assert notes(seq_len=8192, batch_size=4) == []
    (line,) = notes(seq_len=8192, batch_size=8)
    assert "17.2 GB of it for scores" in line


def test_with_the_kernel_the_reports_are_named():
    (line,) = notes(seq_len=65536, attn_kernel_enabled=True)
    assert "public reports of 2026" in line


def test_padded_mlps_take_memory():
    """11008 to 11264 over two cores: 36 layers of three projections, 128 features of 2048 more, in two bytes."""
    padded = CONFIG.padded(Settings(tp_degree=2, padded_intermediate_size=11264))
    more = Estimate(padded, 2, 2048).weights - Estimate(CONFIG, 2, 2048).weights
    assert more == 36 * 3 * 128 * 2048 * 2 == 56_623_104
