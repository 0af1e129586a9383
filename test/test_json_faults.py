"""A JSON file that is none is one line, whichever file it is; numbers have bounds before anything is built."""

import json
import shutil

import pytest

from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.tokenizer import TOKENIZER_FILES, write_tokenizer
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.chat import read_conversation
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.adapter import Adapter
from smollm3_neuron.weights.checkpoint import checkpoint_files

FILES = {
    "config.json": read_config,
    "model.safetensors.index.json": checkpoint_files,
    "adapter_config.json": lambda folder: Adapter(folder, read_config(tiny_folder())),
    "artifact.json": lambda folder: open_artifact(folder, "cpu"),
    "messages.json": lambda folder: read_conversation(folder / "messages.json"),
}
CONTENTS = {
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "cut": b'{"a"',
    "empty": b"",
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "too large": b'{"a": 1e400}',
    "half a character": b'{"a": "\\ud800"}',
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_json_is_one_line(file, content, tmp_path):
    (tmp_path / file).write_bytes(CONTENTS[content])
    with pytest.raises(SmolLM3Error, match=f"{file}: not valid JSON") as error:
        FILES[file](tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["folder", "circle"])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_one_line(file, kind, tmp_path):
    (tmp_path / file).mkdir() if kind == "folder" else (tmp_path / file).symlink_to(tmp_path / file)
    with pytest.raises(SmolLM3Error) as error:
        FILES[file](tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", ["folder", "circle", "nothing"])
@pytest.mark.parametrize("file", TOKENIZER_FILES)
def test_what_is_no_file_of_a_tokenizer_is_one_line(file, kind, tmp_path):
    if kind == "folder":
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).symlink_to(tmp_path / (file if kind == "circle" else "none"))
    with pytest.raises(SmolLM3Error, match=f"{file}: a (folder|link to nothing), a file is expected"):
        write_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("template", [b"a\xff", b"{{ 1 / 0 }}", b"{% x %}", b"{{ messages.a.b }}", b"{{ [].append }}"])
def test_a_template_that_does_not_render_is_one_line(template, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_folder() / file, checkpoint / file)
    (checkpoint / "chat_template.jinja").write_bytes(template)
    (tmp_path / "output").mkdir()
    try:
        write_tokenizer(checkpoint, tmp_path / "output")
    except SmolLM3Error as error:
        assert str(checkpoint) in str(error) and "\n" not in str(error)
    else:
        assert template == b"{{ [].append }}"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10**400},
        {"rope_theta": -(10**400)},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
        {"rope_scaling": {"rope_type": "linear", "factor": 10**400}},
        {"num_hidden_layers": 2**31, "no_rope_layers": None, "layer_types": None},
        {"vocab_size": 2**40},
        {"hidden_size": 10**400},
    ],
)
def test_numbers_have_bounds(changes, tmp_path):
    config = json.loads((tiny_folder() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(SmolLM3Error, match="allowed is a") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    shutil.copyfile(tiny_folder() / "config.json", tmp_path / "config.json")
    read_config(tmp_path)
