"""`padded_intermediate_size`: MLPs padded with zeros give the same tokens; shard files are a padded checkpoint's.

On nxd_cpu, and with --nxd-source on the library's sources; the graphs are in test/hlo.
"""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from places import TINY
from reference import reference_tokens, tiny_prompts
from safetensors.torch import load_file, save_file

from nxd_sources import model_jobs
from nxd_sources.release import run_real

SIZE = 240  # from 192: TP 1, 2, 3, 4 and 8 divide it
PROMPTS = [[7, 3, 201, 90, 14], [5, 9, 33, 121, 200, 17, 61, 2, 88, 150, 34, 99, 240, 18, 77, 45, 6]]
CASES = [("plain", tp) for tp in (1, 2, 3, 4, 8)] + [("tiny", 2), ("biases", 2)]
QUANTIZED = [
    {"quantized": True, "quantization_type": kind, "quantization_dtype": dtype}
    for kind in ("per_tensor_symmetric", "per_channel_symmetric")
    for dtype in ("int8", "f8e4m3")
]
# checkpoint, TP degree, more of NeuronConfig
SHARDS = [("plain", tp, {"fused_qkv": tp == 8}) for tp in (1, 2, 3, 4, 8)] + [("biases", 2, {})]
SHARDS += [("plain", 2, more) for more in QUANTIZED] + [("untied", 8, {**QUANTIZED[2], "fused_qkv": True})]


def generate_job(folder, checkpoint, tp, padded):
    neuron = {"tp_degree": tp, "batch_size": 2, "seq_len": 64}
    return {
        "name": f"{checkpoint}-tp{tp}{'-padded' if padded else ''}",
        "kind": "generate",
        "checkpoint": folder,
        "neuron": {**neuron, "padded_intermediate_size": SIZE} if padded else neuron,
        "prompts": tiny_prompts()[:2] if checkpoint == "tiny" else PROMPTS,
        "new_tokens": 24,
        "logits": True,
    }


def shard_job(folder, checkpoint, tp, more, size=None):
    neuron = {"tp_degree": tp, "batch_size": 1, "seq_len": 64, "torch_dtype": "bfloat16", **more}
    if more.get("quantized"):
        neuron["quantized_checkpoints_path"] = "set where it is needed"
    words = [checkpoint, f"tp{tp}", *(str(value) for value in more.values()), str(size)]
    return {
        "name": "-".join(words),
        "kind": "shard",
        "checkpoint": folder,
        "keep": True,
        "neuron": {**neuron, "padded_intermediate_size": size} if size else neuron,
    }


@pytest.fixture(scope="session")
def folders(random_checkpoints, tmp_path_factory):
    """Checkpoints by name, and "padded-" + name for those whose files hold the zeros."""
    folders = {**{name: random_checkpoints[name] for name in ("plain", "biases", "untied")}, "tiny": str(TINY)}
    for name in ("plain", "biases", "untied"):
        padded = tmp_path_factory.mktemp(f"padded-{name}")
        tensors = load_file(f"{folders[name]}/model.safetensors")
        for key, tensor in tensors.items():
            if "mlp" in key and not key.endswith("down_proj.bias"):
                extra = SIZE - 192
                more = (0, extra) if tensor.dim() == 1 or "down_proj" in key else (0, 0, 0, extra)
                tensors[key] = torch.nn.functional.pad(tensor, more)
        save_file(tensors, padded / "model.safetensors", metadata={"format": "pt"})
        config = json.loads(Path(folders[name], "config.json").read_text())
        (padded / "config.json").write_text(json.dumps({**config, "intermediate_size": SIZE}))
        if Path(folders[name], "generation_config.json").exists():
            shutil.copy(Path(folders[name], "generation_config.json"), padded)
        folders[f"padded-{name}"] = str(padded)
    return folders


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        places = ["nxd_cpu", *metafunc.config.nxd_releases]
        metafunc.parametrize(
            "place", places, ids=[getattr(place, "version", place) for place in places], scope="session"
        )


@pytest.fixture(scope="session")
def generated(place, folders, tmp_path_factory):
    """(results by job, the folder of the logits) of all cases."""
    out = tmp_path_factory.mktemp("generated")
    jobs = [generate_job(folders[name], name, tp, padded) for name, tp in CASES for padded in (False, True)]
    if place != "nxd_cpu":
        return run_real(place, jobs, out), out
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    def run(job):
        def compile_and_load(model):
            model.compile(out / f"{job['name']}-artifact")
            model.load(out / f"{job['name']}-artifact")

        return model_jobs.generate(NeuronSmolLM3ForCausalLM, job, 0, out, compile_and_load)

    return {job["name"]: run(job) for job in jobs}, out


@pytest.mark.parametrize("checkpoint, tp", CASES, ids=[f"{name}-tp{tp}" for name, tp in CASES])
def test_padding_changes_no_token(checkpoint, tp, generated, folders):
    results, out = generated
    name = f"{checkpoint}-tp{tp}"
    for result in (results[name], results[f"{name}-padded"]):
        assert "error" not in result, result["error"]
    job = generate_job(folders[checkpoint], checkpoint, tp, True)
    expected = [reference_tokens(folders[checkpoint], tuple(prompt), 24, ()) for prompt in job["prompts"]]
    assert results[f"{name}-padded"]["tokens"] == expected
    for whole, padded in zip(*(model_jobs.load_logits(out, job) for job in (name, f"{name}-padded")), strict=True):
        assert numpy.abs(padded - whole).max() <= 1e-5 * numpy.abs(whole).max()


def files(folder, job):
    return [Path(folder) / f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(job["neuron"]["tp_degree"])]


def written(job, folder):
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
    from smollm3_neuron.weights.shard_writer import write_shards

    config = model_jobs.build_config(NeuronSmolLM3ForCausalLM, job)
    write_shards(job["checkpoint"], config.checkpoint_config, config.neuron_config, folder)
    return files(folder, job)


@pytest.mark.parametrize("case", SHARDS, ids=lambda case: shard_job("", *case)["name"])
def test_shards_are_those_of_a_padded_checkpoint(case, folders, tmp_path):
    """Of this project's sharder; that it writes the library's bytes is shown in test_cpu_runtime.py and below."""
    ours = written(shard_job(folders[case[0]], *case, SIZE), tmp_path / "ours")
    theirs = written(shard_job(folders[f"padded-{case[0]}"], *case), tmp_path / "theirs")
    assert [a.name for a, b in zip(ours, theirs, strict=True) if a.read_bytes() != b.read_bytes()] == []


@pytest.fixture(scope="session")
def sharded_by_library(nxd_releases, folders, tmp_path_factory):
    """The library's shard files, by release: of the padded checkpoints, and of the others with the setting."""
    jobs = [shard_job(folders[f"padded-{case[0]}"], *case) for case in SHARDS]
    jobs += [shard_job(folders[case[0]], *case, SIZE) for case in SHARDS]
    found = {}
    for release in nxd_releases:
        found[release] = tmp_path_factory.mktemp(release.version)
        errors = [result["error"] for result in run_real(release, jobs, found[release]).values() if "error" in result]
        assert not errors, errors[0]
    return found


@pytest.mark.parametrize("case", SHARDS, ids=lambda case: shard_job("", *case)["name"])
def test_shards_equal_the_librarys(case, sharded_by_library, folders, tmp_path):
    if not sharded_by_library:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC")
    wanted = shard_job(folders[case[0]], *case, SIZE)
    ours = written(wanted, tmp_path)
    for release, folder in sharded_by_library.items():
        for job in (shard_job("", *case), wanted):
            theirs = files(folder / job["name"], wanted)
            differ = [a.name for a, b in zip(ours, theirs, strict=True) if a.read_bytes() != b.read_bytes()]
            assert differ == [], (release.version, job["name"])


@pytest.mark.parametrize(
    "size, tp, named", [(191, 1, "191"), (250, 4, "multiple of tp_degree, 4"), ("240", 2, "'240'"), (240.0, 2, "240.0")]
)
def test_sizes_that_are_not_possible(size, tp, named, folders):
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.errors import SmolLM3Error
    from smollm3_neuron.model.config import read_config

    with pytest.raises(SmolLM3Error, match=f"padded_intermediate_size is .*{named}"):
        Settings(tp, seq_len=64, padded_intermediate_size=size).checked(read_config(folders["plain"]))
