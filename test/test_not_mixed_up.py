"""An artifact is of the files that are there now, a load of one artifact, and an answer of one prompt."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smollm3_neuron.artifact.build import Callbacks, _identity, compile_artifact
from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.files import INDEX_FILE, SINGLE_FILE

SETTINGS = Settings(tp_degree=1, seq_len=32, torch_dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("good") / "tiny", SETTINGS, "cpu").path


@pytest.fixture
def checkpoint(tmp_path):
    """`tiny`, its weights in a folder that an index names."""
    folder = shutil.copytree(tiny_folder(), tmp_path / "checkpoint")
    (folder / "s").mkdir()
    weights = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).rename(folder / "s/m.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "s/m.safetensors")}))
    return folder


def change_eos(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), "eos_token_id": 7}))


def add_template(folder: Path) -> None:
    (folder / "additional_chat_templates/a.jinja").touch()


def flip_weights(folder: Path, offset: int = -5) -> None:
    """One bit, with the times that the file had: only the kernel's own tells."""
    file = folder / "s/m.safetensors"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes() + b"\n"),
        change_eos,
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        lambda folder: (folder / "additional_chat_templates").mkdir() or add_template(folder),
        lambda folder: (folder / "special_tokens_map.json").write_text('{"pad_token": "x"}'),
        flip_weights,
    ],
)  # fmt: skip
def test_a_change_of_any_file_is_seen(change, checkpoint):
    before = _identity(checkpoint)
    assert _identity(checkpoint) == before
    change(checkpoint)
    assert _identity(checkpoint) != before


def test_other_weights_are_seen_whatever_their_times(checkpoint):
    """Where a file system keeps no time of the last change, samples of the weights tell."""
    file = checkpoint / "s/m.safetensors"
    before, status, content = _identity(checkpoint)["weights"][0], file.stat(), file.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    file.write_bytes(content[:header] + content[header:][::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = _identity(checkpoint)["weights"][0]
    assert (after["size"], after["modified_ns"]) == (before["size"], before["modified_ns"])
    assert after["sampled_sha256"] != before["sampled_sha256"]


def test_a_changed_file_makes_the_artifact_again(tmp_path):
    checkpoint = shutil.copytree(tiny_folder(), tmp_path / "checkpoint")
    steps = []
    for _ in range(2):
        compile_artifact(checkpoint, tmp_path / "a", SETTINGS, "cpu", callbacks=Callbacks(on_step=steps.append))
    assert "nothing to do" in steps[-1]
    change_eos(checkpoint)
    artifact = compile_artifact(checkpoint, tmp_path / "a", SETTINGS, "cpu")
    assert artifact.eos_token_ids() == [7]


def exchange(folder: Path, other: Path) -> None:
    from smollm3_neuron.artifact.staging import _exchange

    _exchange(other, folder)


@pytest.mark.parametrize("when", ["before", "between", "gone"])
def test_a_load_is_of_one_artifact(when, good, tmp_path, monkeypatch):
    here, other = (shutil.copytree(good, tmp_path / name) for name in ("here", "other"))
    artifact = open_artifact(here, "cpu")
    if when == "before":
        exchange(here, other)
    elif when == "gone":
        shutil.rmtree(here)
    else:
        from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

        load = NeuronSmolLM3ForCausalLM.load_weights

        def load_weights(*arguments):
            exchange(here, other)
            return load(*arguments)

        monkeypatch.setattr(NeuronSmolLM3ForCausalLM, "load_weights", load_weights)
    for read in (artifact.load, artifact.tokenizer, artifact.eos_token_ids):
        with pytest.raises(SmolLM3Error, match="a compile replaced it while it was read|cannot be read"):
            read()
    if when != "gone":
        open_artifact(here, "cpu").tokenizer()


def test_nothing_is_checked_of_one_and_loaded_of_another(good, tmp_path, monkeypatch):
    """While `open_artifact` itself is at work, too."""
    from smollm3_neuron.artifact import folder as module

    here, other = (shutil.copytree(good, tmp_path / name) for name in ("here", "other"))
    check, once = module._check_file, []

    def checked(*arguments):
        if not once:
            once.append(exchange(here, other))
        return check(*arguments)

    monkeypatch.setattr(module, "_check_file", checked)
    with pytest.raises(SmolLM3Error, match="a compile replaced it while it was read"):
        open_artifact(here, "cpu")


PROMPTS = [[5, 6, 7, 8], [100, 3, 9], [44, 45, 46, 47, 48], [200, 1, 2], [9], [17, 300], [81, 82, 83], [400, 7]]


def test_eight_threads_get_their_own_answers(good):
    model = open_artifact(good, "cpu").load()
    expected = [generate(model, [prompt], 6)[0].tokens for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 4
    for _ in range(3):
        found = [None] * len(PROMPTS)

        def ask(index, found=found):
            found[index] = generate(model, [PROMPTS[index]], 6)[0].tokens

        threads = [threading.Thread(target=ask, args=[index]) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected


def test_a_callback_that_asks_the_model_is_refused(good):
    model = open_artifact(good, "cpu").load()
    with pytest.raises(SmolLM3Error, match="in the middle of an answer to this caller"):
        generate(model, [[5, 6]], 2, on_token=lambda *token: generate(model, [[5]], 1))
    assert generate(model, [[5, 6]], 1)[0].tokens


def test_no_tie_is_no_tie(checkpoint):
    """transformers takes null for false, though true is its default."""
    weights = load_file(checkpoint / "s/m.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"].float()).to(torch.bfloat16)
    save_file(weights, checkpoint / SINGLE_FILE, {"format": "pt"})
    (checkpoint / INDEX_FILE).unlink()
    for given, tied in (({"tie_word_embeddings": None}, False), ({"tie_word_embeddings": True}, True), ({}, True)):
        config = json.loads((tiny_folder() / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        (checkpoint / "config.json").write_text(json.dumps({**config, **given}))
        from transformers import SmolLM3ForCausalLM

        reference = SmolLM3ForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32)
        is_tied = torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
        assert read_config(checkpoint).tie_word_embeddings == is_tied == tied
