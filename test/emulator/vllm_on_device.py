"""Real vLLM with real vllm-neuron and the library's own compile and load: the offline engine and the server.

A pair is one release of vLLM in its environment, the sources of vllm-neuron that ask for it, and NxD Inference's.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import running
from places import ROOT, TINY

from nxd_sources.release import Release

SOURCES = "VLLM_NEURON_SOURCE"
OFFLINE = ROOT / "test/vllm/offline.py"
TIMEOUT = 900  # seconds, of a start and of an engine's whole work
ENGINE = {
    "max_num_seqs": 4, "max_model_len": 256, "dtype": "float32", "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    vllm: str  # "0.13"
    source: Path
    release: Release

    @property
    def python(self) -> Path:
        return ROOT / f".venv-emulator-vllm-{self.vllm}/bin/python"

    def environment(self, scratch: Path, **more: str) -> dict[str, str]:
        given = {
            "PYTHONPATH": str(self.source),
            "VLLM_CACHE_ROOT": str(scratch / "cache"),
            "NEURON_EMULATOR_CACHE": str(scratch / "executables"),
            "BASE_COMPILE_WORK_DIR": f"{scratch}/work/",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LOCAL_WORLD_SIZE": "2",
        }
        return running.environment(self.release, **{**given, **more})


def parameters(config) -> list:
    """A pair for each folder of vllm-neuron's sources that VLLM_NEURON_SOURCE names, or one that is skipped."""
    releases = [release for release in config.nxd_releases if release.version.startswith("0.8")]
    folders = [Path(folder).resolve() for folder in filter(None, os.environ.get(SOURCES, "").split(":"))]
    if not releases or not folders:
        reason = f"needs --nxd-source of NxD Inference 0.8.0, and {SOURCES}, the folders of vllm-neuron's sources"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="vllm")]
    found = []
    for folder in folders:
        wanted = re.search(r"^vllm==(\d+\.\d+)", (folder / "requirements/core.txt").read_text(), re.M)[1]
        pair = Pair(wanted, folder, releases[0])
        reason = f"needs contrib/neuron_emulator/make_venv.sh vllm-{wanted}"
        is_there = (pair.python.parents[1] / ".installed").exists()
        marks = [] if is_there else [pytest.mark.skip(reason=reason)]
        found.append(pytest.param(pair, marks=marks, id=f"vllm-{wanted}"))
    return found


def offline(pair: Pair, scratch: Path, checkpoint, prompts, params, override, rounds=1, **engine):
    """What each round of offline.py answers; RuntimeError with the end of its log."""
    scratch.mkdir(parents=True, exist_ok=True)
    params = [{"temperature": 0, "ignore_eos": True, "detokenize": False, **one} for one in params]
    config = {"override_neuron_config": override}
    job = {
        "engine": {"model": checkpoint, **ENGINE, "additional_config": config, **engine},
        "prompts": prompts, "params": params, "rounds": rounds, "out": str(scratch / "out.json"),
    }  # fmt: skip
    (scratch / "job.json").write_text(json.dumps(job))
    log = scratch / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [pair.python, OFFLINE, scratch / "job.json"], stdout=file, stderr=file, start_new_session=True,
            cwd=scratch, env=pair.environment(scratch, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        )  # fmt: skip
        try:
            code = process.wait(TIMEOUT)
        finally:
            running.end(process)
    if code:
        raise RuntimeError(f"offline.py ended with {code}:\n{log.read_text()[-6000:]}")
    return json.loads((scratch / "out.json").read_text())


def compile_for_server(pair: Pair, scratch: Path, tp: int, *more) -> list[str]:
    """What compile.py --for-vllm prints, as words; the first sets NEURON_COMPILED_ARTIFACTS."""
    shutil.copytree(TINY, scratch / "tiny")
    command = [
        pair.python, ROOT / "scripts/compile.py", "--model", scratch / "tiny", "--tp", str(tp), "--batch-size", "4",
        "--seq-len", "256", "--dtype", "float32", "--for-vllm", "--device", "neuron", "--output", scratch / "artifact",
        *more,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT, env=pair.environment(scratch)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return shlex.split(re.search("^Serve it: (.*)$", done.stdout, re.M)[1])


@dataclass
class Server:
    url: str  # without /v1
    process: subprocess.Popen
    log: Path
    model: str

    def request(self, prompt, max_tokens=12, **more) -> urllib.request.Request:
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body = {**body, "max_tokens": max_tokens, **more}
        return urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )

    def answer(self, prompt, max_tokens=12, **more) -> tuple[int, dict]:
        """The HTTP status and the body."""
        try:
            with urllib.request.urlopen(self.request(prompt, max_tokens, **more), timeout=300) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt, max_tokens=12) -> str:
        status, body = self.answer(prompt, max_tokens)
        assert status == 200 and "choices" in body, (status, body)
        return body["choices"][0]["text"]

    def metric(self, name: str) -> float:
        """The value of a line of /metrics that begins so."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False


@contextlib.contextmanager
def server(pair: Pair, scratch: Path, command: list[str], **variables: str):
    """A Server once it answers; RuntimeError with the end of its log where it never does."""
    scratch.mkdir(parents=True, exist_ok=True)
    name, folder = command[0].split("=", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [pair.python, "-m", "vllm.entrypoints.cli.main", *command[2:], "--host", "127.0.0.1", "--port", str(port)]
    log = scratch / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, start_new_session=True, cwd=scratch,
            env=pair.environment(scratch, **{name: folder, **variables}),
        )  # fmt: skip
    started = Server(f"http://127.0.0.1:{port}", process, log, command[3])
    try:
        deadline = time.monotonic() + TIMEOUT
        while not started.is_healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server ({process.poll()}):\n{log.read_text()[-6000:]}")
            time.sleep(1)
        yield started
    finally:
        running.end(process)
