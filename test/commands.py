"""Commands of scripts/ as processes of their own that need not import torch and transformers again.

A server process has imported the libraries, see warm.py; each command is a fork of it, with its own arguments,
environment, folder and output, and ends with its own exit code. Everything of this project is imported in the fork.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from places import ROOT

TESTS_OWN = (str(ROOT / "test"), str(ROOT / "contrib"), str(ROOT / "tools"))

_context = multiprocessing.get_context("forkserver")


def _start_server() -> None:
    """Starts the server if it does not run yet; it finds warm.py by PYTHONPATH and would do without it silently."""
    _context.set_forkserver_preload(["warm"])
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT / "test")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if given is not None:
            os.environ["PYTHONPATH"] = given


def _main(script: str, args: list[str], environment: dict[str, str], folder: str, output: str, errors: str) -> None:
    for file, descriptor in ((output, 1), (errors, 2)):
        opened = os.open(file, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    if "warm" not in sys.modules:
        raise RuntimeError("the server has not imported warm.py")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *args]
    sys.path[:] = [os.path.dirname(script), *(path for path in sys.path if not path.startswith(TESTS_OWN))]
    runpy.run_path(script, run_name="__main__")


def run(script: Path | str, *args, timeout: float = 300, cwd: Path | None = None, **environment: str):
    """Runs `python SCRIPT ARGS...`; returns what subprocess.run with captured text returns.

    `environment` is added to this process's. What the interpreter or a library reads at its start, such as
    OMP_NUM_THREADS, has no effect here: subprocess is right for a test of that.
    """
    _start_server()
    arguments = [str(arg) for arg in args]
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        process = _context.Process(
            target=_main,
            args=(
                str(script),
                arguments,
                {**os.environ, **environment},
                str(cwd or os.getcwd()),
                output.name,
                errors.name,
            ),
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([str(script), *arguments], timeout)
        written = [file.read().decode() for file in (output, errors)]
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, *written)
