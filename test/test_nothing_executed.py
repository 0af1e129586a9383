"""An artifact or a checkpoint of somebody else's is data: nothing in it runs, and no name in it leads out of it."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from manifests import rewrite

from smollm3_neuron.artifact import compiled_graphs, signature
from smollm3_neuron.artifact.build import Callbacks, compile_artifact
from smollm3_neuron.artifact.folder import MANIFEST, open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.weights.checkpoint import checkpoint_files
from smollm3_neuron.weights.digests import sha256

SETTINGS = Settings(tp_degree=1, seq_len=16, torch_dtype="float32")
PART = "0123456789abcdef.so"
PLAN = {"cpu": [], "products": {}, "graphs": [{"steps": [{"file": PART, "inputs": [], "outputs": []}]}]}


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("good") / "tiny", SETTINGS, "cpu").path


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


@pytest.fixture
def opened(monkeypatch):
    """The shared libraries that were opened."""
    import torch

    files = []

    class Runner:
        def __init__(self, file, count):
            files.append(Path(file).name)

    monkeypatch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCpu", Runner)
    return files


def foreign(folder: Path, listed: bool = True, signed: bool = False) -> None:
    files = {f"compiled/{PART}": b"\x7fELF", "compiled/graphs.json": json.dumps(PLAN).encode()}
    if not listed:
        (folder / "compiled").mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    rewrite(folder, files if listed else {}, signed, exported_because=None)


@pytest.mark.parametrize("listed", [True, False])
def test_machine_code_of_another_runs_nowhere(listed, copy, opened):
    foreign(copy, listed)
    artifact = open_artifact(copy, "cpu")
    assert artifact.has_foreign_code and "compile again" in artifact.exported_because
    artifact.load()  # the exported graphs
    steps = []
    with pytest.raises(SmolLM3Error, match="machine code in it is another user's .* without --weights-only"):
        compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", weights_only=True)
    if listed:  # else something is in the folder that no compile wrote
        compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", callbacks=Callbacks(on_step=steps.append))
        assert "nothing to do" not in " ".join(steps)
    assert opened == []


def test_machine_code_of_ones_own_runs(copy, opened):
    foreign(copy, signed=True)
    artifact = open_artifact(copy, "cpu")
    assert not artifact.has_foreign_code and artifact.exported_because is None
    compiled_graphs.check_graphs(copy)
    assert opened == []
    with pytest.raises(KeyError):  # the plan of this test has no arguments
        artifact.load()
    assert opened == [PART]


def test_a_signature_is_of_one_manifest_and_one_user(monkeypatch, tmp_path):
    for user in ("one", "other"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / user))
        assert not signature.is_signed_here("digest", "0" * 64)
        signed = signature.sign("digest")
        assert signature.sign("digest") == signed and signature.is_signed_here("digest", signed)
        assert not signature.is_signed_here("another", signed)
        for wrong in (None, 5, "", "\ud800", [signed]):
            assert not signature.is_signed_here("digest", wrong)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "one"))
    assert not signature.is_signed_here("digest", signed)
    assert signature.key_file().stat().st_mode & 0o777 == 0o600


def test_a_key_that_others_may_read_signs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    signed = signature.sign("digest")
    signature.key_file().chmod(0o644)
    assert not signature.is_signed_here("digest", signed) and signature.sign("digest") is None
    signature.key_file().unlink()
    signature.key_file().symlink_to("/dev/zero")
    assert not signature.is_signed_here("digest", signed) and signature.sign("digest") is None


@pytest.mark.parametrize("name", ["/etc/hostname", "../x.so", "x.so", f"sub/{PART}", f"{PART}\n"])
def test_a_plan_names_parts_beside_it_only(name, copy, opened):
    plan = {**PLAN, "graphs": [{"steps": [{"file": name, "inputs": [], "outputs": []}]}]}
    rewrite(copy, {"compiled/graphs.json": json.dumps(plan).encode()}, signed=True, exported_because=None)
    with pytest.raises(SmolLM3Error, match="which is no part of it: compile again"):
        open_artifact(copy, "cpu").load()
    assert opened == []


@pytest.mark.parametrize("name", ["../../payload", "/etc/hostname", "..", "", "a/../../b", "a\0b"])
def test_a_manifest_names_files_in_its_folder_only(name, copy, tmp_path):
    (tmp_path / "payload").write_text("")
    manifest = json.loads((copy / MANIFEST).read_text())
    rewrite(copy, files={**manifest["files"], name: {"size": 0, "sha256": sha256(tmp_path / "payload")}})
    with pytest.raises(SmolLM3Error, match="which is not in its folder"):
        open_artifact(copy, "cpu")
    with pytest.raises(SmolLM3Error, match="which is not in its folder"):
        compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", weights_only=True)


def test_a_link_that_leads_out_is_not_followed(copy, tmp_path):
    (tmp_path / "secret").write_text("secret")
    rewrite(copy, {"note": b"secret"})
    (copy / "note").unlink()
    (copy / "note").symlink_to(tmp_path / "secret")
    with pytest.raises(SmolLM3Error, match="note: a link that leads out of the artifact"):
        open_artifact(copy, "cpu")


@pytest.mark.parametrize("name", ["../m.safetensors", "/m.safetensors", "s/../../m.safetensors"])
def test_an_index_names_files_in_its_folder_only(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(SmolLM3Error, match="which is not in its folder"):
        checkpoint_files(tmp_path)


CODE = {"tokenizer_class": "Foo", "auto_map": {"AutoTokenizer": ["mod.Tok", None]}}


def test_a_tokenizer_with_code_of_its_own_is_refused_and_nobody_is_asked(copy, tmp_path, monkeypatch):
    (copy / "mod.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nTok = None\n")
    rewrite(copy, {"tokenizer_config.json": json.dumps(CODE).encode(), "mod.py": (copy / "mod.py").read_bytes()})
    monkeypatch.setattr("builtins.input", lambda *said: pytest.fail(f"asked: {said}"))
    with pytest.raises(SmolLM3Error, match="its tokenizer does not load"):
        open_artifact(copy, "cpu").tokenizer()
    assert not (tmp_path / "ran").exists()


def test_files_that_the_manifest_does_not_list_are_not_read(copy):
    expected = open_artifact(copy, "cpu").tokenizer()
    (copy / "added_tokens.json").write_text('{"<|stray|>": 5000}')
    (copy / "config.json").write_text('{"model_type": "llama"}')
    artifact = open_artifact(copy, "cpu")
    tokenizer = artifact.tokenizer()
    assert tokenizer.get_vocab() == expected.get_vocab() and tokenizer.chat_template == expected.chat_template
    assert tokenizer.name_or_path == str(copy)


@pytest.mark.parametrize("name", ["model.pt", "neuron_config.json", "weights/tp0_sharded_checkpoint.safetensors"])
def test_what_is_loaded_must_be_listed(name, copy):
    files = json.loads((copy / MANIFEST).read_text())["files"]
    del files[name]
    rewrite(copy, files=files)
    with pytest.raises(SmolLM3Error, match=f"{name} is not among its files"):
        open_artifact(copy, "cpu")


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_a_template_that_loops_for_ever_ends(monkeypatch):
    from transformers import AutoTokenizer

    from smollm3_neuron.generate import chat

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    messages = [{"role": "user", "content": "1+1="}]
    monkeypatch.setattr(chat, "SECONDS", 60)
    prompt, before = chat.render(tokenizer, messages, today="1 May 2026"), threading.active_count()
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    tokenizer.chat_template = LOOP
    with pytest.raises(SmolLM3Error, match="chat template takes longer than 0.5 s: it may never end"):
        chat.render(tokenizer, messages)
    assert threading.active_count() == before
    monkeypatch.setattr(chat, "SECONDS", 60)
    tokenizer.chat_template = AutoTokenizer.from_pretrained(tiny_folder()).chat_template
    assert chat.render(tokenizer, messages, today="1 May 2026") == prompt
