"""tools/full_shape_parity.py on small checkpoints: its reference is transformers, and what it finds is the model's."""

import json
import shutil
from pathlib import Path

import full_shape_parity as parity
import pytest
import torch
from reference import reference_model

PROMPT = parity.some_prompt(256)


@pytest.mark.parametrize("name", ["plain", "untied", "yarn"])
def test_the_reference_read_by_layers_is_transformers(random_checkpoints, name):
    with torch.inference_mode():
        expected = reference_model(random_checkpoints[name])(torch.tensor([PROMPT])).logits[0]
    assert torch.equal(parity.reference_logits(Path(random_checkpoints[name]), PROMPT), expected)


def test_the_logits_of_every_token_are_compared(random_checkpoints, tmp_path):
    checkpoint = Path(random_checkpoints["plain"])
    one_by_one, at_once = parity.model_logits(checkpoint, tmp_path / "artifact", PROMPT, 2)
    expected = parity.reference_logits(checkpoint, PROMPT)
    assert one_by_one.shape == expected.shape == (len(PROMPT), 256) and at_once.shape == (1, 256)
    largest = expected.abs().max()
    assert (one_by_one - expected).abs().max() < 1e-5 * largest
    assert (at_once - expected[-1:]).abs().max() < 1e-5 * largest
    other = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "no_rope_layers": [1, 1, 0, 1, 1]}))
    wrong = parity.reference_logits(other, PROMPT)
    assert (one_by_one - wrong).abs().max() > 1e-2 * largest
    assert parity.difference(expected, expected) == "at most 0.0e+00, in the mean 0.0e+00, best token equal in 78 of 78"
