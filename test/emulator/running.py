"""Starts emulated.py in .venv-emulator for a list of jobs."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from places import ROOT

from nxd_sources.release import Release

HERE = Path(__file__).resolve().parent
PYTHON = ROOT / ".venv-emulator" / "bin" / "python"
PROCESSES = 2


def missing() -> str | None:
    """Why nothing can be run here."""
    if not (ROOT / ".venv-emulator/.installed").exists():
        return "needs .venv-emulator: make emulator-venv"


def environment(release: Release, **more: str) -> dict[str, str]:
    return {**os.environ, "NXD_SOURCE": f"{release.nxd}:{release.nxdi}", "OMP_NUM_THREADS": "1", **more}


def end(process: subprocess.Popen) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(release: Release, jobs: list[dict], out: Path, timeout: float = 120) -> dict[str, dict]:
    """Results by job name; `timeout` in seconds is for each job. RuntimeError where not even a job could be begun."""
    out.mkdir(parents=True, exist_ok=True)
    job_file = out / "jobs.json"
    job_file.write_text(json.dumps({"paths": [str(HERE)], "out": str(out), "processes": PROCESSES, "jobs": jobs}))
    with open(out / "log", "w") as log:
        process = subprocess.Popen(
            [PYTHON, HERE / "emulated.py", job_file],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment(release, NEURON_EMULATOR_CACHE=str(out.parent / "executables")),
        )
        try:
            code = process.wait(60 + timeout * len(jobs))
        finally:
            end(process)
    if code:
        raise RuntimeError(f"emulated.py on {release.version} ended with {code}:\n{(out / 'log').read_text()[-6000:]}")
    return {job["name"]: json.loads((out / job["name"] / "result.json").read_text()) for job in jobs}
