"""How much memory an import takes: at most two copies of the largest tensor and 1 GB, however large it is."""

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import foreign
import pytest
import torch
from places import ROOT
from tokenizers.pre_tokenizers import ByteLevel

from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

sys.path.append(str(ROOT / "scripts"))
from common import make_checkpoint

GB = 10**9
# its own memory, sampled: VmHWM would count the pages of the mapped source, which belong to the page cache
MEASURED = """
import sys, threading
from smollm3_neuron.weights.imports.convert import import_checkpoint
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
at_rest = peak = anonymous()
ended = threading.Event()
def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
done = import_checkpoint(*sys.argv[1:])
ended.set()
watcher.join()
print(done.tensors, done.parameters, at_rest, peak)
"""
# 9 matrices of 41 MB: twice the bound together, and each more than malloc keeps when it is freed
DEEP = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 20_000, "num_hidden_layers": 3}
FORMS = ("flax", "gguf BF16", "gguf Q8_0")


def write(form: str, source: Path, folder: Path) -> Path:
    if form == "flax":
        return foreign.write_flax(source, folder / "flax")
    return foreign.write_gguf(source, folder / "a.gguf", form.split()[1], pre="smaug-bpe")


def imported(source: Path, folder: Path) -> list[int]:
    """(tensors, parameters, anonymous memory at rest, at most) of a process that imports `source`, in bytes."""
    command = [sys.executable, "-c", MEASURED, source, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def equal(one: Path, other: Path) -> bool:
    there = foreign.loaders_of(other)
    return all(torch.equal(load(), there[name]()) for name, load in foreign.loaders_of(one).items())


@pytest.mark.parametrize("form", ["flax", "gguf Q8_0"])
def test_a_checkpoint_is_never_held_whole(form, tmp_path):
    (tmp_path / "source").mkdir()
    make_checkpoint(tmp_path / "source", {**SMOLLM3_3B, **DEEP, "no_rope_layers": None})
    *_, at_rest, peak = imported(write(form, tmp_path / "source", tmp_path), tmp_path / "imported")
    largest = 2 * 20_000 * 1024
    whole = (tmp_path / "imported/model.safetensors").stat().st_size
    # a dequantized part and its float32 values are at most three times PART, 50 MB
    assert peak - at_rest < 2 * largest + 60_000_000 < whole / 2


def big_tokenizer(folder: Path, size: int) -> None:
    """As many tokens and about as many merges as SmolLM3-3B's tokenizer has."""
    letters = sorted(ByteLevel.alphabet())
    pairs = list(itertools.product(letters, repeat=2))
    triples = list(itertools.islice(itertools.product(letters, repeat=3), size - 256 - len(letters) - len(pairs)))
    tokens = [*letters, *map("".join, pairs), *map("".join, triples)]
    merges = [*pairs, *((a + b, c) for a, b, c in triples), *((a, b + c) for a, b, c in triples)]
    added = [
        {"id": at, "content": f"<|{at}|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for at in range(len(tokens), size)
    ]  # fmt: skip
    model = {"type": "BPE", "vocab": {token: at for at, token in enumerate(tokens)}, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))


@pytest.fixture(scope="module")
def of_3bs_shape(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("3b")
    make_checkpoint(folder, SMOLLM3_3B)
    big_tokenizer(folder, SMOLLM3_3B["vocab_size"])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_3bs_shape(form, of_3bs_shape, tmp_path):
    source = write(form, of_3bs_shape, tmp_path)
    began = time.perf_counter()
    tensors, parameters, at_rest, peak = imported(source, tmp_path / "imported")
    seconds, copies = time.perf_counter() - began, 2 * 2 * 128_256 * 2048
    print(
        f"{form}: {seconds:.0f} s, {peak / GB:.2f} GB, {at_rest / GB:.2f} GB of it at rest; bound {copies / GB + 1:.2f}"
    )
    assert (tensors, parameters) == (326, 3_075_098_624)
    assert peak < copies + GB
    assert (tmp_path / "imported/tokenizer.json").is_file()
    assert form == "gguf Q8_0" or equal(of_3bs_shape, tmp_path / "imported")
    shutil.rmtree(tmp_path)
