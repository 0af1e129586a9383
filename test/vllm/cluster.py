"""A Ray cluster of two nodes on this machine, on which real vLLM and vllm-neuron run without a device."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from serving import environment

SCRIPTS = Path(sys.executable).parent
TIMEOUT = 600  # seconds, for whatever is waited for
SETTINGS = dict(tp_degree=2, batch_size=4, seq_len=128, torch_dtype="float32", on_device_sampling_config=None)
CORES = (2, 4)  # of the nodes: one replica of TP 2 fits on the first, two on the second


class Cluster:
    """The nodes are started and stopped by Ray's own commands; `session` holds their logs, under a short path: sockets
    are in it, whose paths may have 107 characters."""

    def __init__(self, release, vllm_neuron: str, folder: Path):
        self.folder, self.session = folder, tempfile.TemporaryDirectory(prefix="ray")
        self.env = environment(
            release,
            vllm_neuron,
            folder,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_TMPDIR=self.session.name,
            RAY_ADDRESS="127.0.0.1:6399",
            RAY_DASHBOARD_ADDRESS="http://127.0.0.1:8366",  # which `serve deploy` talks to
        )
        self.nodes: list[psutil.Process] = []
        folder.mkdir(exist_ok=True)

    def start_node(self, cores: int) -> None:
        before = set(raylets())
        joined = ["--address", self.env["RAY_ADDRESS"]]
        first = joined if self.nodes else ["--head", "--port", "6399", "--dashboard-port", "8366"]
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        resources = json.dumps({"neuron_cores": cores})
        command = ["start", *first, "--num-cpus", "8", "--resources", resources, "--object-store-memory", "200000000"]
        run("ray", command, env)
        (new,) = set(raylets()) - before
        self.nodes.append(new)

    def lose_node(self) -> None:
        """Ends the node that was started last, with all of its processes, as when its machine fails."""
        node = self.nodes.pop()
        for process in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def __enter__(self) -> "Cluster":
        for cores in CORES:
            self.start_node(cores)
        return self

    def __exit__(self, *error) -> None:
        while self.nodes:
            self.lose_node()
        run("ray", ["stop", "--force"], self.env)
        self.session.cleanup()


def raylets() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if name_of(process) == "raylet"]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def run(program: str, arguments: list, env: dict[str, str]) -> str:
    """Runs one of Ray's commands; returns what it printed."""
    done = subprocess.run([SCRIPTS / program, *arguments], env=env, text=True, capture_output=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(
            f"{program} {arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def replicas() -> list[psutil.Process]:
    """The processes of vLLM servers that Ray Serve runs; Ray names a process by what it does."""
    return [p for p in psutil.process_iter() if re.match(r"ray::ServeReplica:.*LLMServer", title(p))]


def engines() -> list[psutil.Process]:
    """The processes of Ray Data that hold an engine."""
    return [p for p in psutil.process_iter() if re.match(r"ray::(MapWorker|MapBatches|_MapWorker)", title(p))]


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def wait_for(condition, what: str):
    """Returns what `condition()` returns once that is true. AssertionError where it does not become so."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen within {TIMEOUT} s")


def descendants_environment(process: psutil.Process, name: str) -> set[str]:
    """The values that a variable has in the processes that this one started."""
    values = set()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            values.add(child.environ().get(name))
    return values - {None}


class Memory:
    """Measures twice a second, while it is entered, the private memory of the processes that `find()` returns.

    `peak` is the most that they and their children had together, in bytes.
    """

    def __init__(self, find):
        self.find, self.peak, self.ended = find, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            total = 0
            for process in self.find():
                with contextlib.suppress(psutil.Error):
                    for each in [process, *process.children(recursive=True)]:
                        with contextlib.suppress(psutil.Error):
                            total += each.memory_full_info().uss
            self.peak = max(self.peak, total)

    def __enter__(self) -> "Memory":
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.ended.set()
        self.thread.join()

    def __str__(self) -> str:
        return f"{self.peak / 1e9:.2f} GB of private memory at most"


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
