"""Compiles many times, in forked children of a process that has imported everything: python forker.py CASES.json

The children are killed, denied or starved as each case says; what became of each is printed as JSON. A process of its
own, because a fork after OpenMP has run may hang.
"""

import json
import os
import signal
import sys
from pathlib import Path

import warm  # noqa: F401

from smollm3_neuron.machine.runtime import ensure_neuronx

ensure_neuronx()

from smollm3_neuron.artifact.build import Callbacks, build_config, compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import tiny_folder


def child(case: dict) -> None:
    """Compiles as the case says: kill after so many seconds or so many writes of weights, as another user, ..."""
    writes = 0

    def on_bytes(count: int, total: int) -> None:
        nonlocal writes
        writes += 1
        if writes == case.get("kill_at_write"):
            os.kill(os.getpid(), signal.SIGKILL)

    if "kill_after" in case:
        signal.setitimer(signal.ITIMER_REAL, case["kill_after"])  # SIGALRM ends the process where it is
    if "uid" in case:
        os.setuid(case["uid"])
    try:
        compile_artifact(
            tiny_folder(),
            Path(case["output"]),
            Settings(**case["settings"]),
            "cpu",
            weights_only=case.get("weights_only", False),
            callbacks=Callbacks(on_bytes=on_bytes),
        )
    except SmolLM3Error as error:
        print(error, file=sys.stderr)
        os._exit(2)
    os._exit(0)


def main() -> None:
    build_config(tiny_folder(), Settings(**json.loads(Path(sys.argv[1]).read_text())[0]["settings"]))
    results = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(write, 2)
            try:
                child(case)
            except BaseException as error:
                print(f"Traceback: {error!r}", file=sys.stderr)
                os._exit(1)
        os.close(write)
        with os.fdopen(read, errors="replace") as pipe:
            said = pipe.read()
        results.append({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "said": said.strip()})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
