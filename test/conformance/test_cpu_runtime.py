"""nxd_cpu and the streaming sharder against the real library: shards equal bit for bit, float32 logits within 1e-5 of
the largest.

Without --nxd-source against what `pytest test/conformance --nxd-source ... --record` wrote into recorded/.
"""

import hashlib
import json
from pathlib import Path

import numpy
import pytest
from places import TINY
from reference import SEQ_LEN, tiny_prompts

from nxd_sources import model_jobs
from nxd_sources.release import run_real

RECORDED = Path(__file__).parent / "recorded" / "tiny.json"
RECORDED_LOGITS = Path(__file__).parent / "recorded" / "tiny_logits.npz"
STEPS = 4  # prefill and three tokens
TOLERANCE = 1e-5
SHARDS = [(tp, fused, "bfloat16") for tp in (1, 2, 4, 8, 16) for fused in (False, True)]
SHARDS += [(2, False, "float32"), (2, True, "float32")]
RANDOM_SHARDS = [
    ("plain", 3, False),
    ("plain", 3, True),
    ("plain", 8, True),
    ("untied", 4, True),
    ("biases", 2, True),
    ("biases", 4, False),
    ("head-dim", 8, False),
    ("odd-vocabulary", 2, False),
    ("odd-vocabulary", 8, True),
    ("9-heads-3-kv", 2, False),
    ("9-heads-3-kv", 4, True),
    ("9-heads-3-kv", 6, False),
    ("12-heads-4-kv", 6, True),
    ("plain", 5, False),
    ("plain", 6, True),
    ("plain", 7, False),
    ("plain", 12, True),
    ("odd-intermediate-biases", 4, False),
]


def shard_job(tp, fused, dtype, checkpoint=str(TINY), prefix=""):
    neuron = {"tp_degree": tp, "batch_size": 1, "seq_len": SEQ_LEN, "fused_qkv": fused, "torch_dtype": dtype}
    name = f"{prefix}tp{tp}-{'fused' if fused else 'split'}-{dtype}"
    return {"name": name, "kind": "shard", "checkpoint": checkpoint, "neuron": neuron}


def random_shard_jobs(checkpoints):
    return [shard_job(tp, fused, "bfloat16", checkpoints[name], f"{name}-") for name, tp, fused in RANDOM_SHARDS]


def logits_job(tp, fused, prompts, forced):
    neuron = {"tp_degree": tp, "batch_size": len(prompts), "seq_len": SEQ_LEN, "fused_qkv": fused}
    return {
        "name": "tiny_logits",
        "kind": "generate",
        "checkpoint": str(TINY),
        "neuron": neuron,
        "prompts": prompts,
        "forced": forced,
        "new_tokens": STEPS,
        "logits": True,
    }


def prompts_to_record():
    """Three prompts of different lengths for one batch, fed with each other's tokens."""
    every = tiny_prompts()
    prompts = [every[0], every[len(every) // 2], every[-1]]
    return {"prompts": prompts, "forced": [(prompt * STEPS)[:STEPS] for prompt in (*prompts[1:], prompts[0])]}


def over_ranks(digests):
    """One short digest per tensor over all ranks: tells which tensor differs, in little space."""
    names = sorted({name for rank in digests for name in rank})
    joined = {name: " ".join(rank.get(name, "absent") for rank in digests) for name in names}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in joined.items()}


def checkpoint_files():
    return {
        name: hashlib.sha256((TINY / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")
    }


def run_checked(release, jobs, out):
    results = run_real(release, jobs, out)
    errors = [result["error"] for result in results.values() if "error" in result]
    assert not errors, errors[0]
    return results


@pytest.fixture(scope="session")
def expected(nxd_releases, record, tmp_path_factory):
    """The real library's "shards" (by job name) and "logits" for "prompts": of a run now, or as recorded."""
    if not nxd_releases:
        recorded = json.loads(RECORDED.read_text())
        if recorded["files"] != checkpoint_files():
            pytest.fail(f"{TINY} is not the checkpoint that was recorded: re-record with --nxd-source ... --record")
        return {**recorded, "logits": model_jobs.load_logits(RECORDED.parent, RECORDED_LOGITS.stem)}
    prompts = prompts_to_record()
    out = tmp_path_factory.mktemp("real")
    results = run_checked(nxd_releases[0], [logits_job(1, False, **prompts), *(shard_job(*s) for s in SHARDS)], out)
    shards = {name: over_ranks(result["digests"]) for name, result in results.items() if "digests" in result}
    found = {"release": nxd_releases[0].version, "files": checkpoint_files(), **prompts, "shards": shards}
    if record:
        RECORDED.write_text(json.dumps(found, indent=0) + "\n")
        RECORDED_LOGITS.write_bytes((out / RECORDED_LOGITS.name).read_bytes())
    return {**found, "logits": model_jobs.load_logits(out, RECORDED_LOGITS.stem)}


@pytest.fixture(scope="session")
def model_cls():
    from smollm3_neuron.machine.runtime import ensure_neuronx

    if ensure_neuronx() != "cpu":
        pytest.skip("the Neuron SDK is installed here: nxd_cpu is not used")
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    return NeuronSmolLM3ForCausalLM


def streaming_sharder(model, folder):
    from smollm3_neuron.weights.shard_writer import write_shards

    write_shards(model.model_path, model.config.checkpoint_config, model.config.neuron_config, folder)


over_sharders = pytest.mark.parametrize("sharder", [model_jobs.library_sharder, streaming_sharder])


def check_shards(ours, real):
    assert sorted(ours) == sorted(real)
    assert [name for name in ours if ours[name] != real[name]] == []


@over_sharders
@pytest.mark.parametrize("job", [shard_job(*shards) for shards in SHARDS], ids=lambda job: job["name"])
def test_shards_are_equal(job, sharder, model_cls, expected, tmp_path):
    digests = model_jobs.shard(model_cls, job, 0, tmp_path, sharder)["digests"]
    check_shards(over_ranks(digests), expected["shards"][job["name"]])


@pytest.fixture(scope="session")
def expected_of_random(nxd_releases, random_checkpoints, tmp_path_factory):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC")
    return run_checked(nxd_releases[0], random_shard_jobs(random_checkpoints), tmp_path_factory.mktemp("random"))


@over_sharders
@pytest.mark.parametrize("index", range(len(RANDOM_SHARDS)), ids=lambda i: "{}-tp{}-{}".format(*RANDOM_SHARDS[i]))
def test_shards_of_other_shapes_are_equal(index, sharder, model_cls, expected_of_random, random_checkpoints, tmp_path):
    job = random_shard_jobs(random_checkpoints)[index]
    digests = model_jobs.shard(model_cls, job, 0, tmp_path, sharder)["digests"]
    check_shards(over_ranks(digests), over_ranks(expected_of_random[job["name"]]["digests"]))


@pytest.mark.parametrize("tp, fused", [(1, False), (2, True), (8, False)], ids=["tp1-split", "tp2-fused", "tp8-split"])
def test_logits_are_close(tp, fused, model_cls, expected, tmp_path):
    def compile_and_load(model):
        model.compile(tmp_path / "compiled")
        model.load(tmp_path / "compiled")

    job = logits_job(tp, fused, expected["prompts"], expected["forced"])
    model_jobs.generate(model_cls, job, 0, tmp_path, compile_and_load)
    for ours, real in zip(model_jobs.load_logits(tmp_path, job["name"]), expected["logits"], strict=True):
        assert ours.shape == real.shape
        assert numpy.abs(ours - real).max() <= TOLERANCE * numpy.abs(real).max()
