"""What is not an artifact's own is not lost: files in the way, links, locks and folders of others."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest

from smollm3_neuron.artifact import staging
from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.manifest import check_replaceable
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

SETTINGS = Settings(tp_degree=1, seq_len=16, torch_dtype="float32")
OTHERS = Settings(tp_degree=1, seq_len=32, torch_dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("good") / "tiny", SETTINGS, "cpu").path


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, output: Path, said: str) -> None:
    """The compile is refused, and nothing in `folder` is another than before."""
    before = all_files(folder)
    with pytest.raises(SmolLM3Error, match=said):
        compile_artifact(tiny_folder(), output, OTHERS, "cpu")
    assert all_files(folder) == before


@pytest.mark.parametrize(
    "manifest", ['{"name": "x"}', "[]", "5", "not json", '{"format": 2, "files": {}, "sha256": "0"}', "[" * 100_000]
)
def test_a_folder_with_a_foreign_manifest_is_kept(manifest, tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f/artifact.json").write_text(manifest)
    (tmp_path / "f/notes.txt").write_text("mine")
    refused(tmp_path, tmp_path / "f", "is not what a compile wrote, so nothing there is replaced")


@pytest.mark.parametrize("name", ["notes.html", "weights/notes", "more/notes", "empty/"])
def test_a_file_of_the_users_in_an_artifact_is_kept(name, copy, tmp_path):
    path = copy / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_text("mine")
    refused(tmp_path, copy, "no compile wrote it, and it would be lost")
    assert path.exists()


def test_a_file_that_comes_while_it_compiles_is_kept(copy, monkeypatch):
    from smollm3_neuron.artifact import build

    write = build._write_manifest
    monkeypatch.setattr(build, "_write_manifest", lambda *a: (write(*a), (copy / "notes").write_text("mine")))
    monkeypatch.setattr(build, "_write_graphs", lambda *a: None)
    with pytest.raises(SmolLM3Error, match="notes: no compile wrote it"):
        compile_artifact(tiny_folder(), copy, OTHERS, "cpu")
    assert (copy / "notes").read_text() == "mine"


def test_an_artifact_and_nothing_are_replaced(copy, tmp_path):
    check_replaceable(copy)
    check_replaceable(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")


def publish(output: Path, content: str = "new") -> None:
    with staging.staged(staging.resolved(output)) as folder:
        (folder / content).touch()


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "empty", "folder", "hard link", "fifo"])
def test_what_has_the_locks_name_is_untouched(kind, tmp_path):
    lock, target = tmp_path / ".tiny.lock", tmp_path / "target"
    if kind != "dangling":
        target.write_text(f"mine\n{staging.LOCK_MARK}" if kind != "hard link" else "")
    {
        "link": lambda: lock.symlink_to(target),
        "dangling": lambda: lock.symlink_to(target),
        "file": lambda: lock.write_text("mine"),
        "empty": lock.touch,
        "folder": lock.mkdir,
        "hard link": lambda: os.link(target, lock),
        "fifo": lambda: os.mkfifo(lock),
    }[kind]()
    before = all_files(tmp_path), lock.lstat()
    with pytest.raises(SmolLM3Error, match="tiny.lock: in the way|cannot write there"):
        publish(tmp_path / "tiny")
    assert (all_files(tmp_path), lock.lstat()) == before and not (tmp_path / "tiny").exists()


def test_only_the_private_folder_of_a_killed_compile_goes(tmp_path):
    killed, others = tmp_path / f".tiny.partial-{'0' * 16}", tmp_path / ".tiny.partial-mine"
    for folder in (killed, others, tmp_path / ".tiny.partial-" / ".."):
        folder.mkdir(exist_ok=True, parents=True)
    (tmp_path / ".tiny.lock").write_text(f"{staging.LOCK_MARK}{killed.name}\n")
    publish(tmp_path / "tiny")
    assert others.is_dir() and not killed.exists() and not (tmp_path / ".tiny.lock").exists()
    for name in (others.name, "../x", ".", "", f"{killed.name}/../.tiny.partial-mine"):
        (tmp_path / ".tiny.lock").write_text(f"{staging.LOCK_MARK}{name}\n")
        publish(tmp_path / "tiny")
        assert others.is_dir() and not (tmp_path / ".tiny.lock").exists()
    link = tmp_path / f".tiny.partial-{'1' * 16}"
    link.symlink_to(others)
    (others / "mine").touch()
    (tmp_path / ".tiny.lock").write_text(f"{staging.LOCK_MARK}{link.name}\n")
    publish(tmp_path / "tiny")
    assert (others / "mine").exists()


@pytest.mark.parametrize("stands", [True, False])
def test_a_link_is_followed(stands, tmp_path):
    target, link = tmp_path / "there" / "tiny", tmp_path / "link"
    if stands:
        target.mkdir(parents=True)
    link.symlink_to(target)
    publish(link)
    assert link.is_symlink() and [path.name for path in target.iterdir()] == ["new"]
    assert sorted(path.name for path in target.parent.iterdir()) == ["tiny"]


@pytest.mark.parametrize("output", [".", "..", "/", "../here"])
def test_the_folder_that_one_is_in_is_not_replaced(output, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SmolLM3Error, match="you are in that folder"):
        compile_artifact(tiny_folder(), Path(output), SETTINGS, "cpu")
    assert Path.cwd().is_dir()


def test_a_circle_of_links_and_a_long_name_are_one_line(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for output, said in (
        (tmp_path / "a", "leads to itself"),
        (tmp_path / ("x" * 240), "has 240 bytes, allowed are 229"),
    ):
        with pytest.raises(SmolLM3Error, match=said):
            compile_artifact(tiny_folder(), output, SETTINGS, "cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    publish(tmp_path / ("x" * staging.LONGEST_NAME))


def test_a_result_that_could_not_be_written_is_told_before_the_run(tmp_path, monkeypatch):
    import sys

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import common

    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps("mine"))
    common.check_outputs(kept, tmp_path / "new.json", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json"] and kept.read_text() == '"mine"'
    for path, said in ((tmp_path, "a folder; name a file"), (tmp_path / "no/x", "no such folder")):
        with pytest.raises(SmolLM3Error, match=said):
            common.check_outputs(path)
    if Path("/dev/full").exists():
        full = functools.partial(open, "/dev/full", "wb")
        monkeypatch.setattr(common.tempfile, "TemporaryFile", lambda dir: full())
        with pytest.raises(SmolLM3Error, match="No space left on device"):
            common.check_outputs(tmp_path / "x")
    del sys.modules["common"]
