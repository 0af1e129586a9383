"""CPU graphs compiled ahead of time give the tokens of the exported ones; they are compiled only where it pays."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smollm3_neuron.artifact.build import Callbacks, compile_artifact
from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 24
SETTINGS = Settings(tp_degree=1, seq_len=64, torch_dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture
def worth_it(monkeypatch):
    from nxd_cpu_compiler import build

    monkeypatch.setattr(build, "LEAST_BYTES", 0)


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def ahead(tmp_path_factory, progress):
    """`tiny` at TP 1, compiled ahead of time: it is not by default."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler here: the exported graphs are what runs")
    from nxd_cpu_compiler import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LEAST_BYTES", 0)
        output = tmp_path_factory.mktemp("ahead") / "tiny"
        return compile_artifact(
            tiny_folder(), output, SETTINGS, "cpu", callbacks=Callbacks(on_part=lambda *part: progress.append(part))
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("exported") / "tiny", SETTINGS, "cpu")


@pytest.fixture(scope="module")
def prompts():
    from transformers import AutoTokenizer

    held_out = json.loads((tiny_folder() / "prompts.json").read_text())["held_out"][:6]
    return AutoTokenizer.from_pretrained(tiny_folder())([entry["prompt"] for entry in held_out])["input_ids"]


def test_the_same_tokens_and_logits(ahead, exported, prompts):
    from smollm3_neuron.generate.generation import generate

    assert ahead.exported_because is None and "MB of weights are too few" in exported.exported_because
    found, expected = (
        generate(artifact.load(), prompts, NEW_TOKENS, keep_logits=True, suppress_tokens=artifact.eos_token_ids())
        for artifact in (ahead, exported)
    )
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    for one, other in zip(found, expected):
        logits, wanted = torch.stack(one.logits), torch.stack(other.logits)
        assert not torch.equal(logits, wanted)  # sums in another order, so it is another program
        assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def validate(artifact, **environment: str) -> dict:
    """What scripts/validate.py finds."""
    found = artifact.path.parent / "found.json"
    command = [sys.executable, ROOT / "scripts/validate.py", artifact.path, "--device", "cpu", "--json", found]
    command += ["--max-new-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(found.read_text())


def test_it_is_right(ahead):
    assert validate(ahead)["verdict"] == "identical"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_right_or_near_ties(dtype, ahead, worth_it, tmp_path):
    settings = replace(SETTINGS, torch_dtype=dtype, batch_size=2, fused_qkv=True)
    artifact = compile_artifact(tiny_folder(), tmp_path / "tiny", settings, "cpu")
    assert artifact.exported_because is None and validate(artifact)["verdict"] in ("identical", "near tie")


def test_one_part_per_kind_of_layer_and_bucket(ahead, progress):
    """Two submodels: before the layers, RoPE, NoPE, after the layers."""
    assert progress == [(0, 8), *[(1, 8)] * 8]
    assert sum(file.endswith(".so") for file in ahead.manifest["files"]) == 8


@pytest.mark.parametrize("layers", [4, 16])
def test_depth_adds_no_part(layers, tmp_path):
    from nxd_cpu_compiler.build import plan
    from smollm3_neuron.artifact.build import build_config
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    config = json.loads((tiny_folder() / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "no_rope_layers": [1, 1, 1, 0] * (layers // 4), "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {}
    graphs = NeuronSmolLM3ForCausalLM(str(tmp_path), build_config(tmp_path, SETTINGS)).get_builder().trace()
    for graph in graphs:
        steps = plan(graph, kinds, {})["steps"]
        files = [step["file"] for step in steps]
        rope, nope = files[1], files[4]
        assert files[1:-1] == [rope, rope, rope, nope] * (layers // 4) and len(set(files)) == 4
    assert len(kinds) == 8


def test_weights_are_mapped_once_for_all_parts(ahead):
    loaded = ahead.load().traced_model
    first, second = (arguments[0] for arguments in loaded._arguments.values())
    shared = {tensor.data_ptr() for tensor in first if tensor is not None} & {
        t.data_ptr() for t in second if t is not None
    }
    named = [name for graph in loaded._graphs.values() for name, _ in graph.arguments() if name]
    assert len(shared) == len(set(named)) and len(named) == 2 * len(set(named))
    weight = next(tensor for tensor in first if tensor is not None)
    places = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "tp0_sharded_checkpoint" in line
    ]
    spans = [[int(end, 16) for end in place[0].split("-")] for place in places]
    assert any(begin <= weight.data_ptr() < end for begin, end in spans)


def test_kept_graphs_stay_compiled(ahead, worth_it, tmp_path):
    copy, steps = shutil.copytree(ahead.path, tmp_path / "copy"), []
    compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", callbacks=Callbacks(on_step=steps.append))
    assert steps[-1].startswith("nothing to do")
    again = compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", weights_only=True)
    assert again.manifest["files"] == ahead.manifest["files"] and again.exported_because is None
    again.load()


def test_a_damaged_part_is_named(ahead, tmp_path):
    copy = shutil.copytree(ahead.path, tmp_path / "copy")
    part = next(copy.glob("compiled/*.so"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(SmolLM3Error, match=f"{part.name}: damaged"):
        open_artifact(copy, "cpu")


def test_another_cpu_is_refused_and_compiled_for(ahead, worth_it, monkeypatch, tmp_path):
    from nxd_cpu_compiler import build, run

    copy = shutil.copytree(ahead.path, tmp_path / "copy")
    features = run.cpu_features()
    lost = min(features)
    monkeypatch.setattr(run, "cpu_features", lambda: features - {lost})
    with pytest.raises(SmolLM3Error, match=f"compiled for a CPU with {lost}, which this one lacks: compile again"):
        ahead.load()
    with pytest.raises(SmolLM3Error, match=f"compiled for a CPU with {lost}"):
        compile_artifact(tiny_folder(), copy, SETTINGS, "cpu", weights_only=True)

    def stop(*arguments):
        raise RuntimeError("it was compiled again")

    monkeypatch.setattr(build, "compile_ahead", stop)
    assert compile_artifact(tiny_folder(), copy, SETTINGS, "cpu").exported_because == "it was compiled again"


def test_parts_are_compiled_once(ahead, worth_it, monkeypatch, tmp_path):
    from nxd_cpu_compiler import build

    def stop(*arguments):
        raise RuntimeError("it was compiled")

    monkeypatch.setattr(build, "_compile", stop)
    progress = []
    callbacks = Callbacks(on_part=lambda *part: progress.append(part))
    again = compile_artifact(tiny_folder(), tmp_path / "tiny", SETTINGS, "cpu", callbacks=callbacks)
    assert again.exported_because is None and progress == [(0, 8), *[(1, 8)] * 8]
    assert {file: again.manifest["files"][file] for file in again.graph_files() if file.startswith("compiled/")} == {
        file: ahead.manifest["files"][file] for file in ahead.graph_files() if file.startswith("compiled/")
    }
    other = compile_artifact(tiny_folder(), tmp_path / "other", replace(SETTINGS, seq_len=96), "cpu")
    assert other.exported_because == "it was compiled"


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.weight = factor, torch.nn.Parameter(torch.empty(4, device="meta"))

    def forward(self, x):
        return [x * self.weight * self.factor]


def test_another_model_in_the_place_of_a_loaded_one(tmp_path):
    """The loader keeps a library for good, by its path."""
    from neuronx_distributed_inference._graph import export_graph

    from nxd_cpu_compiler.build import compile_ahead
    from nxd_cpu_compiler.run import load

    folder, ones = tmp_path / "artifact", torch.ones(4)
    for factor in (2.0, 3.0):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        compile_ahead([export_graph(Scaled(factor), "tag", 1, [ones])], str(folder))
        assert load(str(folder))[0](ones, ones).tolist() == [factor] * 4


def test_a_token_outside_the_vocabulary_is_refused(ahead):
    """Machine code would end the process."""
    from smollm3_neuron.generate.generation import generate

    for token in (512, -1):
        with pytest.raises(SmolLM3Error, match=f"prompt 1 has tokens from .*{token}.*allowed is 0 to 511"):
            generate(ahead.load(), [[5], [5, token]], 1)


def test_what_cannot_be_loaded_is_named(ahead, tmp_path):
    from nxd_cpu_compiler import run

    folder = shutil.copytree(ahead.path, tmp_path / "copy")
    next(folder.glob("compiled/*.so")).write_text("not a library")
    with pytest.raises(ValueError, match="cannot be loaded .*: compile again"):
        run.load(str(folder))


def test_the_default_is_what_pays():
    from nxd_cpu_compiler.build import LEAST_BYTES, obstacle

    assert "at tp_degree 2 ranks are threads" in obstacle(2, LEAST_BYTES)
    assert f"{(LEAST_BYTES - 1) / 1e6:.1f} MB" in obstacle(1, LEAST_BYTES - 1)


def test_a_compiler_that_cannot_be_run_is_none(tmp_path):
    from torch._inductor import config

    from nxd_cpu_compiler.build import LEAST_BYTES, obstacle

    with config.patch({"cpp.cxx": (None, str(tmp_path))}):  # a folder: as CXX has it
        assert "no C++ compiler was found" in obstacle(1, LEAST_BYTES)


def test_a_fault_of_torch_without_a_message_has_one(worth_it, monkeypatch, tmp_path):
    from torch._inductor.exc import InductorError

    from nxd_cpu_compiler import build

    def fail(*arguments, **options):
        raise InductorError(AssertionError(), None)

    monkeypatch.setattr(build, "obstacle", lambda *arguments: None)
    monkeypatch.setattr(torch._inductor, "aot_compile", fail)
    artifact = compile_artifact(tiny_folder(), tmp_path / "tiny", replace(SETTINGS, seq_len=96), "cpu")
    assert artifact.exported_because.startswith("torch could not compile them: AssertionError")


def test_a_cache_that_torch_cannot_make_is_named(tmp_path):
    """In a process of its own: torch makes it as it is imported."""
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "main.py").write_text(f"""
import common
from pathlib import Path
from smollm3_neuron.artifact.build import Callbacks, Settings, compile_artifact
from smollm3_neuron.machine.runtime import ensure_neuronx
ensure_neuronx()
from nxd_cpu_compiler import build
build.LEAST_BYTES = 0
output = Path({str(tmp_path / "tiny")!r})
common.run(lambda: compile_artifact(Path({str(tiny_folder())!r}), output, Settings(tp_degree=1), "cpu"))
""")
    paths = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(file), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and f"{file}: cannot write torch's cache there" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(
    "compiler, said",
    [
        (None, r"no C\+\+ compiler was found"),
        (
            "case $* in *--version*) echo 'g++ 12' ;; "
            "*) echo 'x.h:1: fatal error: omp.h: No such file' >&2; exit 1 ;; esac",
            r"the C\+\+ compiler .*/g\+\+ failed: .*fatal error: omp.h: No such file",
        ),
    ],
)
def test_without_a_compiler_that_works_the_exported_graphs_run(compiler, said, worth_it, prompts, exported, tmp_path):
    """In a process of its own: torch looks for the compiler once."""
    if compiler:
        (tmp_path / "g++").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "g++").chmod(stat.S_IRWXU)
    code = f"""
import json
from pathlib import Path
from smollm3_neuron.artifact.build import Callbacks, Settings, compile_artifact
from smollm3_neuron.machine.runtime import ensure_neuronx
ensure_neuronx()
from nxd_cpu_compiler import build
from smollm3_neuron.generate.generation import generate
build.LEAST_BYTES = 0
settings = Settings(tp_degree=1, seq_len=64, torch_dtype="float32")
artifact = compile_artifact(Path({str(tiny_folder())!r}), Path({str(tmp_path / "tiny")!r}), settings, "cpu")
rows = generate(artifact.load(), {prompts[:2]}, 8)
print(json.dumps([artifact.exported_because, sorted(artifact.manifest["files"]), [row.tokens for row in rows]]))
"""
    environment = {**os.environ, "CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    because, files, tokens = json.loads(done.stdout.splitlines()[-1])
    assert re.search(said, because) and "\n" not in because
    assert files == sorted(exported.manifest["files"])
    from smollm3_neuron.generate.generation import generate

    assert tokens == [row.tokens for row in generate(exported.load(), prompts[:2], 8)]
