"""An artifact is whole or is not there: killed, damaged, starved, denied, made for something else."""

import contextlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from manifests import rewrite
from places import ROOT

from smollm3_neuron.artifact import staging
from smollm3_neuron.artifact.build import Callbacks, compile_artifact
from smollm3_neuron.artifact.folder import MANIFEST, open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

SETTINGS = {"tp_degree": 2, "seq_len": 32, "torch_dtype": "float32"}
KILLED = {-9, -14}


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("good") / "tiny", Settings(**SETTINGS), "cpu").path


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def fork(tmp_path: Path, cases: list[dict]) -> list[dict]:
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, Path(__file__).parent / "forker.py", tmp_path / "cases.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def left_behind(folder: Path, name: str) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(f".{name}."))


def test_without_a_generation_config_the_end_is_the_configs(copy):
    """neuron_config.json has it, which the library writes with an Infinity in it."""
    assert "Infinity" in (copy / "neuron_config.json").read_text()
    files = json.loads((copy / MANIFEST).read_text())["files"]
    rewrite(copy, files={name: entry for name, entry in files.items() if name != "generation_config.json"})
    assert open_artifact(copy, "cpu").eos_token_ids() == [3]


@pytest.mark.parametrize("call", ["generate", "validate", "benchmark", "inspect_layers", "inspect_layers --bisect"])
def test_every_command_that_loads_verifies_when_asked(call, copy, monkeypatch):
    command, *flags = call.split()
    shard = copy / "weights/tp0_sharded_checkpoint.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import common

    monkeypatch.setattr(common, "quiet", lambda: None)
    prompt = ["1+1="] if command == "generate" else []
    monkeypatch.setattr(sys, "argv", [command, str(copy), *prompt, *flags, "--verify"])
    with pytest.raises(SmolLM3Error, match="tp0_sharded_checkpoint.safetensors: damaged"):
        importlib.import_module(command).main()
    open_artifact(copy, "cpu")  # which nothing else would tell


def test_a_killed_compile_leaves_nothing_that_loads(tmp_path):
    """One child after the other, killed at a random time, 25 of them; afterwards nothing is there, or a whole artifact.

    Those that were done before their time do not count; the next ones get less of it.
    """
    clock = random.Random(0)
    output = tmp_path / "tiny"
    case, killed, longest = {"output": str(output), "settings": SETTINGS}, 0, 3.0
    while killed < 25:
        results = fork(tmp_path, [{**case, "kill_after": clock.uniform(0.01, longest)} for _ in range(25 - killed)])
        assert {result["status"] for result in results} <= KILLED | {0}
        killed += sum(result["status"] in KILLED for result in results)
        longest /= 2
    assert [result["status"] for result in fork(tmp_path, [case])] == [0]
    open_artifact(output, "cpu", verify=True).load()
    assert left_behind(tmp_path, "tiny") == []


def test_a_compile_killed_while_it_replaces_an_artifact(copy, tmp_path):
    clock = random.Random(1)
    case = {"output": str(copy), "settings": SETTINGS, "weights_only": True}
    writes = 2 * 85
    cases = [{**case, "kill_at_write": clock.randrange(1, writes)} for _ in range(30)]
    results = fork(tmp_path, cases)
    assert {result["status"] for result in results} == {-9}
    open_artifact(copy, "cpu", verify=True).load()
    assert [result["status"] for result in fork(tmp_path, [case])] == [0]
    assert left_behind(tmp_path, "copy") == []


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_a_truncated_or_missing_file_is_named(good, tmp_path):
    for number, name in enumerate(files_of(good)):
        for change in ("truncate", "remove", "lengthen"):
            folder = shutil.copytree(good, tmp_path / f"{number}{change}")
            file = folder / name
            if change == "remove":
                file.unlink()
            else:
                content = file.read_bytes()
                file.write_bytes(content[:-2] if change == "truncate" else content + b"\0")
            with pytest.raises(SmolLM3Error, match=Path(name).name.replace(".", r"\.")):
                open_artifact(folder, "cpu")
            shutil.rmtree(folder)


def test_the_weights_of_another_rank_are_named(copy):
    """The files of two ranks have one size and one header: nothing but their own rank tells them apart unread."""
    shards = [copy / f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in (0, 1)]
    first, second = (shard.read_bytes() for shard in shards)
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    with pytest.raises(SmolLM3Error, match="tp0_.*: the weights of rank 1 are in it, not those of rank 0; compile"):
        open_artifact(copy, "cpu")


def test_a_flipped_byte_is_caught(good, copy):
    place = random.Random(2)
    for name in files_of(good):
        file = copy / name
        size = file.stat().st_size
        header = int.from_bytes(file.read_bytes()[:8], "little") + 8 if name.startswith("weights/") else size
        for offset in {0, 7, header - 1, *(place.randrange(header) for _ in range(5))}:
            flip(file, offset)
            with pytest.raises(SmolLM3Error, match="damaged|bytes|format"):
                open_artifact(copy, "cpu")
            flip(file, offset)
        if size > header:  # the weights themselves: only --verify reads them, but for the rank, which is the last
            for offset in {header, size - 1, *(place.randrange(header, size - 4) for _ in range(5))}:
                flip(file, offset)
                with pytest.raises(SmolLM3Error, match="damaged") if offset == size - 1 else contextlib.nullcontext():
                    open_artifact(copy, "cpu")
                with pytest.raises(SmolLM3Error, match=f"{file.name}: damaged"):
                    open_artifact(copy, "cpu", verify=True)
                flip(file, offset)
    open_artifact(copy, "cpu", verify=True)


def test_made_for_something_else(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    with pytest.raises(SmolLM3Error, match="made for tp_degree 2, not 4; compile it for 4"):
        open_artifact(copy, "cpu", tp_degree=4)
    for made_for, here in (("cpu", "neuron"), ("emulated", "neuron"), ("neuron", "emulated")):
        rewrite(copy, place=made_for)
        with pytest.raises(SmolLM3Error, match=f"made for '{made_for}', but this is '{here}'"):
            open_artifact(copy, here)
    rewrite(copy, place="cpu")
    rewrite(copy, versions={**manifest["versions"], "torch": "2.0.0"})
    with pytest.raises(SmolLM3Error, match="made with torch 2.0.0, here is"):
        open_artifact(copy, "cpu")
    rewrite(copy, versions=manifest["versions"], format=0)
    with pytest.raises(SmolLM3Error, match="artifact format 0, this version reads 2"):
        open_artifact(copy, "cpu")


def test_folders_that_are_no_artifacts(tmp_path):
    with pytest.raises(SmolLM3Error, match="no such artifact"):
        open_artifact(tmp_path / "none", "cpu")
    with pytest.raises(SmolLM3Error, match="no artifact.json in it"):
        open_artifact(tmp_path, "cpu")
    (tmp_path / "file").write_text("something of the user's")
    with pytest.raises(SmolLM3Error, match="something is there that is not an artifact"):
        compile_artifact(tiny_folder(), tmp_path, Settings(**SETTINGS), "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_same_again_is_recognised(copy):
    steps = []
    before = files_of(copy), (copy / "model.pt").stat().st_mtime_ns
    compile_artifact(tiny_folder(), copy, Settings(**SETTINGS), "cpu", callbacks=Callbacks(on_step=steps.append))
    assert steps[-1].startswith("nothing to do") and before == (files_of(copy), (copy / "model.pt").stat().st_mtime_ns)


def test_weights_only_keeps_the_graphs(copy, tmp_path):
    other = shutil.copytree(tiny_folder(), tmp_path / "other")
    weights = copy / "weights/tp1_sharded_checkpoint.safetensors"
    before, graphs = weights.read_bytes(), (copy / "model.pt").read_bytes()
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-4096:] = content[-8192:-4096]
    (other / "model.safetensors").write_bytes(content)
    again = compile_artifact(other, copy, Settings(**SETTINGS), "cpu", weights_only=True)
    assert weights.read_bytes() != before and (copy / "model.pt").read_bytes() == graphs
    again.load()
    with pytest.raises(SmolLM3Error, match="its graphs have seq_len 32, not 64; compile without --weights-only"):
        compile_artifact(other, copy, Settings(**{**SETTINGS, "seq_len": 64}), "cpu", weights_only=True)
    with pytest.raises(SmolLM3Error, match="no artifact there whose graphs could be kept"):
        compile_artifact(other, tmp_path / "none", Settings(**SETTINGS), "cpu", weights_only=True)


def test_two_compiles_to_one_folder_do_not_meet(tmp_path):
    with staging.staged(tmp_path / "tiny") as folder:
        (result,) = fork(tmp_path, [{"output": str(tmp_path / "tiny"), "settings": SETTINGS}])
        assert result["status"] == 2 and "another compile is writing it" in result["said"]
        (folder / "mine").touch()
    assert files_of(tmp_path / "tiny") == ["mine"] and left_behind(tmp_path, "tiny") == []


@pytest.mark.parametrize("at_once", [True, False])
def test_a_replaced_artifact_is_there_at_any_time(at_once, tmp_path, monkeypatch):
    """In one call of the kernel, so that no kill can come between; in two where a file system has no such call."""
    output, steps, rename = tmp_path / "tiny", [], Path.rename
    for content in ("old", "new"):
        with monkeypatch.context() as patch:
            if content == "new":
                patch.setattr(Path, "rename", lambda path, to: steps.append(to.name) or rename(path, to))
                if not at_once:
                    patch.setattr(staging, "RENAME_EXCHANGE", 1 << 30)  # refused: invalid argument
            with staging.staged(output) as folder:
                (folder / content).touch()
    assert files_of(output) == ["new"] and left_behind(tmp_path, "tiny") == []
    assert steps == ([] if at_once else ["replaced", "tiny"])


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root can mount the small disk that this test fills")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_clear_line(tmp_path):
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(small_disk(tmp_path / size, size)) for size in ("64k", "900k", "4m", "9m")]
        for result in fork(tmp_path, [{"output": str(disk / "tiny"), "settings": SETTINGS} for disk in disks]):
            assert result["status"] == 2 and "No space left on device" in result["said"] and "\n" not in result["said"]
        assert [list(disk.iterdir()) for disk in disks] == [[]] * 4


@pytest.fixture
def locked():
    """A folder that everybody can read: pytest takes that right away from its own ones whenever it starts."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_without_permission_nothing_is_written(locked, tmp_path):
    nobody = 65534
    cases = [
        {"output": str(locked / "tiny"), "settings": SETTINGS, "uid": nobody},
        {"output": str(locked / "deep/tiny"), "settings": SETTINGS, "uid": nobody},
    ]
    if subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0":
        pytest.skip("only root can become another user")
    for result in fork(tmp_path, cases):
        assert result["status"] == 2 and "cannot write there (Permission denied)" in result["said"], result
    assert list(locked.iterdir()) == []


def test_a_device_encodes_one_prompt_at_a_time(tmp_path):
    settings = Settings(**{**SETTINGS, "batch_size": 4, "is_continuous_batching": True, "ctx_batch_size": 2})
    with pytest.raises(SmolLM3Error, match="ctx_batch_size is 2: .* on a device takes 1 prompt at a time"):
        compile_artifact(tiny_folder(), tmp_path / "artifact", settings, "neuron")
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    "draft, fused, said",
    [
        (["a"], False, "model.draft is ['a'], which no compile wrote"),
        (0, False, "model.draft is 0, which no compile wrote"),
        ({"config_sha256": "a"}, True, "model.draft.folder is None, which no compile wrote"),
        ({"folder": "a", "config_sha256": []}, True, "model.draft.config_sha256 is [], which no compile wrote"),
        (None, True, "enable_fused_speculation is on and model.draft names no draft, which no compile wrote"),
    ],
)
def test_a_manifest_whose_draft_no_compile_wrote(draft, fused, said, copy):
    manifest = json.loads((copy / "artifact.json").read_text())
    settings = {**manifest["settings"], "enable_fused_speculation": fused}
    rewrite(copy, model={**manifest["model"], "draft": draft}, settings=settings)
    with pytest.raises(SmolLM3Error, match=f"^[^\n]*{re.escape(said)}; compile again$"):
        open_artifact(copy, "cpu")
