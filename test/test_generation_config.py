"""What `generate` would refuse of a generation_config.json is refused when its checkpoint is compiled."""

import json
import shutil

import pytest

from smollm3_neuron.artifact import build
from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.artifact.tokenizer import check_generation_config
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx


@pytest.mark.parametrize(
    "content, named",
    [
        ([], "a JSON object is expected, found list"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot', allowed is 0"),
        ({"do_sample": True, "temperature": 1e-45}, "temperature is 1e-45, allowed is 0"),
        ({"do_sample": True, "top_k": "5"}, "top_k is '5', allowed is a whole number"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [2**40]}, "eos_token_id is"),
        ({"num_beams": 4}, "num_beams is 4, which is not done here"),
        ({"min_new_tokens": {}}, "generation config: "),
        ({"bad_words_ids": [[5000]]}, "generation config: "),
        ({"suppress_tokens": list(range(512))}, "it bars every token"),
        ({"stop_strings": [5]}, "stop_strings is"),
        ({"eos_token_id": 9999, "exponential_decay_length_penalty": [100, 1.5]}, "generation config: "),
    ],
)
def test_it_is_named_with_its_file(content, named, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SmolLM3Error) as error:
        check_generation_config(tmp_path, 512)
    assert str(error.value).startswith(f"{path}: ") and named in str(error.value)


@pytest.mark.parametrize("content", [None, {}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}])
def test_what_can_be_done_passes(content, tmp_path):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    check_generation_config(tmp_path, 512)
    check_generation_config(tiny_folder(), 512)


def test_it_is_told_before_anything_is_compiled(tmp_path, monkeypatch):
    ensure_neuronx()
    checkpoint = shutil.copytree(tiny_folder(), tmp_path / "checkpoint")
    (checkpoint / "generation_config.json").write_text('{"temperature": "hot", "do_sample": true}')
    monkeypatch.setattr(build, "staged", lambda target: pytest.fail("something was written"))
    with pytest.raises(SmolLM3Error, match="temperature is 'hot'"):
        compile_artifact(checkpoint, tmp_path / "output", Settings(1, 1, 32, torch_dtype="float32"), "cpu")
