# SPDX-License-Identifier: Apache-2.0
"""The sources of one release, and running jobs on them with cpu_mode.py."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CONTRIB = Path(__file__).resolve().parents[1]
SMOLLM3 = "smollm3_neuron.modeling_smollm3_3b:NeuronSmolLM3ForCausalLM"


@dataclass(frozen=True)
class Release:
    """The sources of one release; NxDI's version names it."""

    version: str
    nxd: str
    nxdi: str

    @classmethod
    def find(cls, source: str) -> "Release":
        nxd, separator, nxdi = source.partition(":")
        if not separator:
            raise ValueError(f"{source!r} is not of the form NXD_SRC:NXDI_SRC")
        _version_in(nxd, "neuronx_distributed")
        return cls(_version_in(nxdi, "neuronx_distributed_inference"), nxd, nxdi)


def _version_in(folder, package):
    file = Path(folder) / package / "_version.py"
    version = file.is_file() and re.search(r'__version__ = "([\d.]+)', file.read_text())
    if not version:
        raise ValueError(f"{folder} is not a source folder of {package}: {file} is missing or names no version")
    return version[1]


def run_real(release: Release, jobs: list[dict], out: Path, timeout: float = 120) -> dict[str, dict]:
    """Results of cpu_mode.py by job name; RuntimeError if it could not even start."""
    out.mkdir(parents=True, exist_ok=True)
    job_file = out / "jobs.json"
    job_file.write_text(
        json.dumps(
            {
                "sources": [release.nxd, release.nxdi],
                "model": SMOLLM3,
                "out": str(out),
                "timeout": timeout,
                "jobs": jobs,
            }
        )
    )
    with open(out / "log", "w") as log:
        command = [sys.executable, "-m", "nxd_sources.cpu_mode", job_file]
        path = os.pathsep.join(filter(None, [str(CONTRIB), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        try:
            code = process.wait(timeout * (len(jobs) + 1))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise RuntimeError(f"cpu_mode.py on {release.version} ended with {code}:\n{(out / 'log').read_text()[-6000:]}")
    return json.loads((out / "results.json").read_text())
