"""A compile publishes one artifact after another while a user loads: each load is of one of them, or is refused."""

import json
import random
import shutil
import threading
import time
from collections import Counter

import pytest
from safetensors.torch import load_file, save_file

from smollm3_neuron.artifact import build
from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.artifact.staging import staged
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

SETTINGS = Settings(tp_degree=1, seq_len=32, torch_dtype="float32")
PROMPT = [5, 6, 7, 8, 100, 3, 9]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Two whose graphs and weights both differ, and one with the graphs of the first and the weights of the second."""
    ensure_neuronx()
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")
        first = build.compile_artifact(tiny_folder(), folder / "first", SETTINGS, "cpu").path
        other = shutil.copytree(tiny_folder(), folder / "checkpoint")
        config = json.loads((other / "config.json").read_text())
        config["no_rope_layers"] = [1 - flag for flag in config["no_rope_layers"]]
        (other / "config.json").write_text(json.dumps(config))
        weights = load_file(other / "model.safetensors")
        weights = {name: tensor.flip(0).contiguous() if "mlp" in name else tensor for name, tensor in weights.items()}
        save_file(weights, other / "model.safetensors", {"format": "pt"})
        second = build.compile_artifact(other, folder / "second", SETTINGS, "cpu").path
    mixed = shutil.copytree(first, folder / "mixed")
    shutil.rmtree(mixed / "weights")
    shutil.copytree(second / "weights", mixed / "weights")
    return first, second, mixed


def answer(artifact) -> tuple[int, ...]:
    return tuple(generate(artifact.load(), [PROMPT], 6)[0].tokens)


def publish(artifacts, target, done: threading.Event) -> None:
    """As a compile does, at times that nobody could foresee."""
    rng, number = random.Random(0), 0
    while not done.is_set():
        number += 1
        with staged(target) as staging:
            shutil.copytree(artifacts[number % 2], staging, dirs_exist_ok=True)
        done.wait(rng.random() ** 2)


def race(artifacts, target, seconds: float) -> Counter:
    """Loads for so long; what each load was of."""
    names = dict(zip((answer(open_artifact(path, "cpu")) for path in artifacts), ("of the first", "of the second")))
    assert len(names) == 2
    shutil.copytree(artifacts[0], target)
    done, loads = threading.Event(), Counter()
    publisher = threading.Thread(target=publish, args=(artifacts, target, done))
    publisher.start()
    began = time.monotonic()
    try:
        while time.monotonic() - began < seconds:
            try:
                loads[names.get(answer(open_artifact(target, "cpu")), "mixed")] += 1
            except SmolLM3Error as error:
                assert "a compile replaced it while it was read" in str(error)
                loads["refused"] += 1
    finally:
        done.set()
        publisher.join()
    return loads


def shown(loads: Counter, capsys) -> None:
    kinds = ("of the first", "of the second", "refused", "mixed")
    with capsys.disabled():
        print(f"\n{sum(loads.values())} loads: " + ", ".join(f"{loads[kind]} {kind}" for kind in kinds))


def test_a_mixed_load_would_be_seen(artifacts, monkeypatch):
    from smollm3_neuron.artifact import folder

    monkeypatch.setattr(folder, "_check_file", lambda *_: None)
    answers = [answer(open_artifact(path, "cpu")) for path in artifacts]
    assert len(set(answers)) == 3


def test_no_load_of_three_seconds_is_mixed(artifacts, tmp_path, capsys):
    loads = race(artifacts, tmp_path / "artifact", 3)
    shown(loads, capsys)
    assert not loads["mixed"]


@pytest.mark.slow
def test_no_load_of_a_minute_is_mixed(artifacts, tmp_path, capsys):
    loads = race(artifacts, tmp_path / "artifact", 60)
    shown(loads, capsys)
    assert not loads["mixed"] and loads["of the first"] and loads["of the second"] and loads["refused"]
