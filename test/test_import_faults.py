"""scripts/import_checkpoint.py on what is no whole SmolLM3: one line, exit code 2, and nothing is left behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import foreign
import gguf
import msgpack
import numpy as np
import pytest
import torch
from commands import run as run_command
from places import ROOT, TINY
from safetensors.torch import load_file

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import locate_model
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.checkpoint import checkpoint_files
from smollm3_neuron.weights.imports.convert import import_checkpoint

FORMATS = {
    "flax": lambda source, folder: foreign.write_flax(source, folder),
    "gguf": lambda source, folder: foreign.write_gguf(source, folder.with_suffix(".gguf")),
}


def refused(source: Path, tmp_path: Path, *parts: str) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SmolLM3Error) as error:
        import_checkpoint(source, tmp_path / "refused")
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_ends_too_early(form, tmp_path):
    """Wherever it was cut: in the header, in a name, before and in the last tensor."""
    source = FORMATS[form](TINY, tmp_path / "foreign")
    file = source if source.is_file() else source / "flax_model.msgpack"
    whole = file.read_bytes()
    for size in (*range(0, 200, 7), *range(200, 40_000, 2_999), len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(source, tmp_path, str(file), "not a whole", "download it again")
    if form == "flax":
        file.write_bytes(whole + b"\0")
        refused(source, tmp_path, "1 bytes too many")


@pytest.mark.parametrize(
    "content", [b"", b"hello, this is text", b"\x00" * 64, b"PK\x03\x04" * 20, b"\x80", b"\xdf" * 9]
)
def test_a_file_of_another_kind(content, tmp_path):
    (tmp_path / "a.gguf").write_bytes(content)
    refused(tmp_path / "a.gguf", tmp_path, "a.gguf: not a whole GGUF file")
    foreign.copy_beside(TINY, tmp_path / "flax")
    (tmp_path / "flax/flax_model.msgpack").write_bytes(content)
    refused(tmp_path / "flax", tmp_path, str(tmp_path / "flax"))


def packed(tmp_path: Path, tree: dict) -> Path:
    foreign.copy_beside(TINY, tmp_path / "flax")
    with open(tmp_path / "flax/flax_model.msgpack", "wb") as file:
        foreign.pack_tree(file, tree)
    return tmp_path / "flax"


NORM = ("model", "norm", "weight")


def changed_tree(path: tuple[str, ...], value: object) -> dict:
    """tiny's tree, with `value` at `path`; None takes it out."""
    tree = place = foreign.flax_tree(TINY)
    for module in path[:-1]:
        place = place.setdefault(module, {})
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return tree


def ext(shape, dtype: str, data: bytes, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data), use_bin_type=True))


def test_the_tree_of_the_next_test_is_right(tmp_path):
    import_checkpoint(packed(tmp_path, {"params": foreign.flax_tree(TINY)}), tmp_path / "imported")
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "imported/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "path, value, parts",
    [
        (NORM, None, ["norm.weight is missing;"]),
        (NORM, ext((4,), "bfloat16", bytes(8)), ["model/norm/weight has shape (4,)", "asks for (256,)"]),
        (NORM, ext((256,), "bfloat16", bytes(8)), ["not a whole", "8 bytes for an array of shape (256,)"]),
        (NORM, ext((256,), "int8", bytes(256)), ["'int8'", "'bfloat16' or 'float16' or 'float32'"]),
        (NORM, ext((256,), "bfloat16", bytes(512), 3), ["not a whole", "extension type 3"]),
        (NORM, 7, ["model/norm/weight is 7", "holds arrays"]),
        (NORM, {"__msgpack_chunked_array__": True, "shape": {"0": 256}, "chunks": {}}, ["not a whole chunked array"]),
        (("model", "extra", "kernel"), ext((2, 2), "float32", bytes(16)), ["model/extra/kernel is no tensor"]),
        (("step",), 3, ["step is 3", "holds arrays"]),
    ],
)  # fmt: skip
def test_a_flax_tree_that_is_another_models(path, value, parts, tmp_path):
    refused(packed(tmp_path, changed_tree(path, value)), tmp_path, *parts)


def test_a_flax_folder_that_is_not_whole(tmp_path):
    folder = foreign.write_flax(TINY, tmp_path / "flax", shards=3)
    (folder / "flax_model-00002-of-00003.msgpack").unlink()
    refused(folder, tmp_path, "flax_model-00002-of-00003.msgpack: missing, but")
    (folder / "flax_model.msgpack.index.json").write_text("{}")
    refused(folder, tmp_path, "not a weight index")
    (folder / "flax_model.msgpack.index.json").unlink()
    refused(folder, tmp_path, "neither flax_model.msgpack, flax_model.msgpack.index.json nor a .gguf file")
    (folder / "config.json").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"")
    refused(folder, tmp_path, "no config.json there")
    refused(folder / "flax_model.msgpack", tmp_path, "pass a .gguf file, or the folder")


@pytest.mark.parametrize(
    "edit, change, parts",
    [
        (None, lambda n, d, k: None if n == "output_norm.weight" else (d, k), ["norm.weight is missing;"]),
        (None, lambda n, d, k: None if n == "token_embd.weight" else (d, k), ["token_embd.weight is missing"]),
        (None, lambda n, d, k: (d[:4], k) if n == "output_norm.weight" else (d, k), ["has shape (4,)", "for (256,)"]),
        (None, lambda n, d, k: (d[:60], k) if n == "blk.0.attn_k.weight" else (d, k), ["has shape (60, 256)"]),
        (
            None, lambda n, d, k: (d.astype(np.int32), gguf.GGMLQuantizationType.I32) if d.ndim == 1 else (d, k),
            ["attn_norm.weight is I32", "cannot read"],
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), None, ["rope_freqs.weight scales RoPE"]),
        (lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(8, np.float32)), None, ["is no tensor of SmolLM3"]),
        (lambda w: w.add_expert_count(8), None, ["smollm3.expert_count is 8, which SmolLM3 does not have"]),
        (lambda w: w.add_value_length(32), None, ["smollm3.attention.value_length is not the 16 of a head"]),
        (lambda w: w.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16), None, ["one of 2 files", "--merge"]),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), None,
            ["rope_scaling.rope_type is 'longrope'", "supported is"],
        ),
    ],
)  # fmt: skip
def test_a_gguf_file_that_is_another_models(edit, change, parts, tmp_path):
    refused(foreign.write_gguf(TINY, tmp_path / "a.gguf", edit=edit, change=change), tmp_path, "a.gguf", *parts)


def test_a_gguf_file_of_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "a.gguf", tmp_path, "general.architecture is 'llama'", "'smollm3'")


def test_sources_and_folders_that_cannot_be(tmp_path):
    file = foreign.write_gguf(TINY, tmp_path / "a.gguf")
    shutil.copyfile(file, tmp_path / "b.gguf")
    refused(tmp_path, tmp_path, "2 GGUF files are there, name one of them: a.gguf, b.gguf")
    refused(tmp_path / "none", tmp_path, "no such file or folder")
    refused(TINY, tmp_path, "it holds safetensors, which need no import")
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused/mine.txt").write_text("mine")
    refused(file, tmp_path, "there is something already")
    assert [path.name for path in (tmp_path / "refused").iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smollm3_neuron.weights.imports.convert._write", full)
    refused(foreign.write_gguf(TINY, tmp_path / "a.gguf"), tmp_path, "No space left on device; nothing was written")


@pytest.mark.parametrize("missing, form", [("msgpack", "flax"), ("gguf", "gguf")])
def test_a_parser_that_is_not_installed(missing, form, tmp_path, monkeypatch):
    source = FORMATS[form](TINY, tmp_path / "foreign")
    monkeypatch.setitem(sys.modules, missing, None)
    refused(source, tmp_path, f"the package {missing} is not installed", f"pip install {missing}")


def test_a_config_of_another_model_beside_a_gguf_file(tmp_path):
    folder = tmp_path / "foreign"
    foreign.copy_beside(TINY, folder)
    foreign.write_gguf(TINY, folder / "tiny.gguf")
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    refused(folder, tmp_path, "rope_theta is 10000.0, in tiny.gguf it is 5000000.0")


# ---- the commands ----


def run(script: str, *args) -> subprocess.CompletedProcess:
    return run_command(ROOT / f"scripts/{script}.py", *args)


def test_the_command(tmp_path):
    file = foreign.write_gguf(TINY, tmp_path / "a.gguf", "Q8_0")
    done = run("import_checkpoint", file, tmp_path / "im ported")
    assert done.returncode == 0, done.stderr
    assert "2,625,792 parameters in 74 tensors" in done.stdout and "note: it was quantized (Q8_0)" in done.stdout
    assert f"python scripts/compile.py --model '{tmp_path}/im ported'" in done.stdout
    file.write_bytes(file.read_bytes()[:-1])
    done = run("import_checkpoint", file, tmp_path / "second")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "second").exists()


def test_compile_says_the_command(tmp_path):
    folder, file = foreign.write_flax(TINY, tmp_path / "flax"), tmp_path / "a.gguf"
    for source, command in ((folder, folder), (file, file), (folder / "flax_model.msgpack", folder)):
        done = run("compile", "--model", source, "--device", "cpu", "--output", tmp_path / "artifact")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"import it first: python scripts/import_checkpoint.py {command} FOLDER" in done.stderr
    with pytest.raises(SmolLM3Error, match="download a file and import it first: .* FILE.gguf FOLDER"):
        locate_model("ggml-org/SmolLM3-3B-GGUF")


def test_a_folder_with_both_is_read_as_safetensors(tmp_path):
    folder = foreign.write_flax(TINY, tmp_path / "flax")
    foreign.write_gguf(TINY, folder / "a.gguf")
    shutil.copyfile(TINY / "model.safetensors", folder / "model.safetensors")
    assert read_config(folder) == read_config(TINY)
    assert set(checkpoint_files(folder).values()) == {folder / "model.safetensors"}
