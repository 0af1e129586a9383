"""Real vLLM 0.13 with vllm-neuron 0.4.1 and the library's own compile and load, on an emulated Neuron device.

Needs `contrib/neuron_emulator/make_venv.sh vllm`, --nxd-source of SDK 2.28, and vllm-neuron's sources by the variable
VLLM_NEURON_SOURCE; asked for with -m emulator.
"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
import running
from places import ROOT, TINY
from reference import make_checkpoint, reference_tokens
from transformers import AutoTokenizer

pytestmark = pytest.mark.emulator
PYTHON = ROOT / ".venv-emulator-vllm/bin/python"
OFFLINE = ROOT / "test/vllm/offline.py"
ENGINE = {
    "max_num_seqs": 4, "max_model_len": 256, "dtype": "float32", "skip_tokenizer_init": True,
    "enable_prefix_caching": False, "tensor_parallel_size": 2,
}  # fmt: skip
ON_HOST = {"on_device_sampling_config": None}
ON_DEVICE = {"on_device_sampling_config": {"dynamic": True, "deterministic": False}}
BLOCK = 32


@pytest.fixture(scope="module")
def release(nxd_releases):
    releases = [release for release in nxd_releases if release.version.startswith("0.8")]
    if not (PYTHON.parents[1] / ".installed").exists() or not releases:
        pytest.skip("needs contrib/neuron_emulator/make_venv.sh vllm, and --nxd-source of NxD Inference 0.8.0")
    return releases[0]


@pytest.fixture(scope="module")
def source(release):
    if "VLLM_NEURON_SOURCE" not in os.environ:
        pytest.skip("needs VLLM_NEURON_SOURCE, the folder of vllm-neuron 0.4.1's sources")
    return os.environ["VLLM_NEURON_SOURCE"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "plain")


def environment(release, source, scratch, **more):
    return running.environment(
        release,
        PYTHONPATH=str(source),
        VLLM_CACHE_ROOT=str(scratch / "cache"),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        BASE_COMPILE_WORK_DIR=f"{scratch}/work/",
        LOCAL_WORLD_SIZE="2",
        **more,
    )


def offline(release, source, scratch, checkpoint, prompts, lengths, override, rounds=1, variables=None, **engine):
    """What each round of offline.py answers; RuntimeError with the end of its log."""
    scratch.mkdir(parents=True, exist_ok=True)
    params = [{"temperature": 0, "max_tokens": n, "ignore_eos": True, "detokenize": False} for n in lengths]
    config = {"override_neuron_config": override}
    job = {
        "engine": {"model": checkpoint, **ENGINE, "additional_config": config, **engine},
        "prompts": prompts, "params": params, "rounds": rounds, "out": str(scratch / "out.json"),
    }  # fmt: skip
    (scratch / "job.json").write_text(json.dumps(job))
    log = scratch / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [PYTHON, OFFLINE, scratch / "job.json"], stdout=file, stderr=file, start_new_session=True, cwd=scratch,
            env=environment(release, source, scratch, VLLM_ENABLE_V1_MULTIPROCESSING="0", **(variables or {})),
        )  # fmt: skip
        try:
            code = process.wait(900)
        finally:
            running.end(process)
    if code:
        raise RuntimeError(f"offline.py ended with {code}:\n{log.read_text()[-6000:]}")
    return json.loads((scratch / "out.json").read_text())


def requests() -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 200 tokens in no order, more than slots, and how many tokens each gets."""
    generator = random.Random(0)
    prompts = [[generator.randrange(1, 256) for _ in range(n)] for n in (7, 90, 1, 33, 128, 16, 200, 64)]
    return prompts, [24, 5, 40, 1, 24, 31, 20, 24]


def expected(checkpoint, prompts, lengths):
    return [reference_tokens(checkpoint, tuple(p), n, ()) for p, n in zip(prompts, lengths, strict=True)]


@pytest.mark.parametrize(
    "override", [ON_HOST, ON_DEVICE, {**ON_DEVICE, "async_mode": True}], ids=["host", "on-device", "on-device-async"]
)
def test_more_requests_than_slots(release, source, tmp_path, checkpoint, override):
    prompts, lengths = requests()
    (answers,) = offline(release, source, tmp_path, checkpoint, prompts, lengths, override)
    assert [answer["tokens"] for answer in answers] == expected(checkpoint, prompts, lengths)


def test_prefix_cache_hits(release, source, tmp_path, checkpoint):
    generator = random.Random(1)
    start = [generator.randrange(1, 256) for _ in range(2 * BLOCK + 5)]
    prompts = [
        start[:length] + [generator.randrange(1, 256) for _ in range(more)]
        for length, more in ((69, 20), (69, 3), (64, 1), (40, 30), (0, 50), (69, 90))
    ]
    lengths = [24, 30, 9, 24, 12, 24]
    rounds = offline(
        release, source, tmp_path, checkpoint, prompts, lengths, ON_HOST, rounds=2, enable_prefix_caching=True,
        block_size=BLOCK,
    )  # fmt: skip
    wanted = expected(checkpoint, prompts, lengths)
    assert [[answer["tokens"] for answer in answers] for answers in rounds] == [wanted, wanted]
    assert [answer["cached"] for answer in rounds[1]] == [64, 64, 64, 64, 32, 128]


@pytest.fixture(scope="module")
def serve_command(release, source, tmp_path_factory):
    """What compile.py --for-vllm prints, as words; the first sets NEURON_COMPILED_ARTIFACTS. At TP 2."""
    scratch = tmp_path_factory.mktemp("artifact")
    shutil.copytree(TINY, scratch / "tiny")
    command = [
        PYTHON, ROOT / "scripts/compile.py", "--model", scratch / "tiny", "--tp", "2", "--batch-size", "4", "--seq-len",
        "256", "--dtype", "float32", "--for-vllm", "--device", "neuron", "--output", scratch / "artifact",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment(release, source, scratch)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return shlex.split(re.search("^Serve it: (.*)$", done.stdout, re.M)[1])


@contextlib.contextmanager
def server(release, source, scratch, command, **variables):
    """The base URL of `vllm serve` once it answers, and its process."""
    name, folder = command[0].split("=", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [PYTHON, "-m", "vllm.entrypoints.cli.main", *command[2:], "--host", "127.0.0.1", "--port", str(port)]
    with open(scratch / "log", "w") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, start_new_session=True, cwd=scratch,
            env=environment(release, source, scratch, **{name: folder, **variables}),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 900
        while not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server ({process.poll()}):\n{(scratch / 'log').read_text()[-6000:]}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        running.end(process)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def complete(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())["choices"][0]["text"]


def test_a_server_starts_from_an_artifact_and_compiles_nothing(release, source, tmp_path, serve_command):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompt = "The square root of 144 is"
    wanted = reference_tokens(str(TINY), tuple(tokenizer(prompt)["input_ids"]), 12, ())
    with server(release, source, tmp_path, serve_command) as (url, _):
        got = complete(url, serve_command[3], prompt)
    assert got == tokenizer.decode(wanted, skip_special_tokens=True)
    assert not (tmp_path / "work").exists()  # where the library would compile


def test_a_failing_execution_is_an_error_and_nothing_hangs(release, source, tmp_path, serve_command):
    with (
        server(release, source, tmp_path, serve_command, NEURON_EMULATOR_FAULTS="fail=8") as (url, process),
        pytest.raises(OSError, match="500|reset|refused|closed"),
    ):
        complete(url, serve_command[3], "The square root of 144 is")
    assert "execution 8 failed" in (tmp_path / "log").read_text()
