# SPDX-License-Identifier: Apache-2.0
"""`scripts/compile.py --device hlo`: the graphs that would go to neuronx-cc, with a report. Imports no torch.

The graphs are made in another process, of the interpreter that `make hlo-venv` set up, or, where the Neuron SDK is
installed, of this one.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.roofline import Estimate
from smollm3_neuron.model.config import CheckpointConfig, read_config

from .checks import faults

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-hlo" / "bin" / "python"
REPORT = "report.json"
VARIABLE = "NXD_SOURCE"
NOTHING_COMPILED = "Nothing was compiled: this is the HLO that neuronx-cc would be given. It does not run on a device."
NOT_RECORDED = "what else must hold of the graph: the SDK's own tracer keeps no record of parameters and fallbacks"
HOW_TO_GET_THE_SOURCES = f"""\
--device hlo needs the sources of NxD and of NxD Inference: --nxd-source NXD/src:NXDI/src, or {VARIABLE} in the \
environment. For SDK 2.28: git clone --branch v2.28.0 https://github.com/aws-neuron/neuronx-distributed NXD; \
git clone https://github.com/aws-neuron/neuronx-distributed-inference NXDI; git -C NXDI checkout cd3abf3"""


def interpreter(sources: str | None) -> tuple[str, list[str] | None]:
    """Which Python lowers, with which source folders (None: the SDK's own library)."""
    if importlib.util.find_spec("torch_neuronx"):
        return sys.executable, None
    sources = sources or os.environ.get(VARIABLE)
    if not sources:
        raise SmolLM3Error(HOW_TO_GET_THE_SOURCES)
    nxd, _, nxdi = sources.partition(":")
    for folder, package in ((nxd, "neuronx_distributed"), (nxdi, "neuronx_distributed_inference")):
        if not folder or not (Path(folder) / package / "__init__.py").is_file():
            raise SmolLM3Error(
                f"--nxd-source: {folder!r} holds no {package}; it is NXD/src:NXDI/src, two `src` folders"
            )
    if not PYTHON.is_file():
        raise SmolLM3Error(f"{PYTHON}: not there; run make hlo-venv in {ROOT}")
    return str(PYTHON), [os.path.abspath(nxd), os.path.abspath(nxdi)]


def lower_checkpoint(folder: Path, output: Path, settings: Settings, sources: str | None) -> dict[str, Any]:
    """Lowers the model of the folder's config.json into `output`; returns the report. Raises SmolLM3Error."""
    python, folders = interpreter(sources)
    config = read_config(folder)
    settings = settings.checked(config)
    if output.exists() and not (output / REPORT).is_file():
        raise SmolLM3Error(f"{output}: something is there that --device hlo did not write; choose another --output")
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.absolute().parent) as scratch:
        staging = Path(scratch, "hlo")
        facts = _lower(python, folders, folder, settings, staging)
        report = {
            "settings": asdict(settings),
            "schedule": facts["schedule"],
            "seconds": facts["seconds"],
            "peak_memory": facts["peak_memory"],
            "graphs": _graphs(facts, config, settings),
            "note": NOTHING_COMPILED,
        }
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix != ".hlo":
                path.unlink()
        (staging / REPORT).write_text(json.dumps(report, indent=1))
        (staging / "report.txt").write_text(text(report) + "\n")
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    return report


def _lower(python: str, sources: list[str] | None, folder: Path, settings: Settings, out: Path) -> dict[str, Any]:
    job = {"name": out.name, "checkpoint": str(folder.absolute()), "neuron": settings.keywords()}
    jobs = out.parent / "jobs.json"
    jobs.write_text(json.dumps({"sources": sources, "out": str(out.parent), "jobs": [job]}))
    done = subprocess.run(
        [python, "-m", "neuron_hlo.lower", jobs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "contrib")},
    )
    if not (out / "facts.json").is_file():
        last = done.stderr.strip() or f"it ended with {done.returncode}, as a process does that runs out of memory"
        raise SmolLM3Error(f"lowering failed: {last.splitlines()[-1]}")
    facts = json.loads((out / "facts.json").read_text())
    if "error" in facts:
        raise SmolLM3Error(f"lowering failed: {facts['error'].splitlines()[0]}")
    return facts


def _graphs(facts: dict[str, Any], config: CheckpointConfig, settings: Settings) -> dict[str, dict[str, Any]]:
    of = Estimate(
        config.padded(settings),
        settings.tp_degree,
        settings.seq_len,
        settings.batch_size,
        settings.torch_dtype,
        settings.max_context_length,
        speculation_length=settings.speculation_length,
    )
    planned = {
        "context_encoding_model": (of.prefill_flops, of.prefill_bytes),
        "token_generation_model": (of.decode_flops, of.decode_bytes),
        "speculation_model": (of.verify_flops, of.verify_bytes),
    }
    for found in facts["graphs"].values():
        found["planned_flops"], found["planned_bytes"] = planned[found["submodel"]]
        recorded = "executions" in found
        found["faults"] = faults(found, config.no_rope_layers, asdict(settings)) if recorded else None
    return facts["graphs"]


def text(report: dict[str, Any]) -> str:
    settings = report["settings"]
    lines = [
        NOTHING_COMPILED,
        f"tp_degree {settings['tp_degree']}, batch_size {settings['batch_size']}, seq_len {settings['seq_len']}, "
        f"{settings['torch_dtype']}; lowered in {report['seconds']:.1f} s, "
        f"peak memory {report['peak_memory'] / 1e9:.1f} GB",
    ]
    for name, found in report["graphs"].items():
        kinds = ", ".join(f"{count} {opcode}" for opcode, count in list(found["opcodes"].items())[:12])
        collectives = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items()) or "none"
        rotary = found["keys_rotated"]
        nope = [layer for layer, rotated in enumerate(rotary) if not rotated]
        lines += [
            "",
            f"{name}.hlo: {found['instructions']} instructions",
            f"  operations     {kinds}",
            f"  collectives    {collectives}",
            f"  parameters     {found['parameter_bytes'] / 1e6:,.1f} MB per core",
            f"  per step       {_compared(found['flops'], found['planned_flops'], 1e9, 'GFLOP')}",
            f"                 {_compared(found['bytes_read'], found['planned_bytes'], 1e9, 'GB read')}",
            f"  NoPE layers    {nope} of {len(rotary)}, read back from the graph",
            f"  compiler       {found['compiler_args']}",
        ]
        if found["faults"] is None:
            lines.append(f"  NOT CHECKED    {NOT_RECORDED}")
        lines += [f"  FAULT          {check}: {what}" for check, what in (found["faults"] or {}).items()]
        lines += pattern_lines(found["patterns"])
    return "\n".join(lines)


def pattern_lines(patterns: dict[str, Any]) -> list[str]:
    """What patterns.py found, or that it found nothing."""
    lines = [f"  NOT CHECKED    {name}: {why}" for name, why in patterns["not_checked"].items()]
    for found in patterns["found"]:
        verdict = found["harmless"] or f"{found['effect']}; {found['source']}"
        where = f"{len(found['places'])} times, the first {found['places'][0]}"
        lines.append(f"  {'harmless' if found['harmless'] else 'PATTERN':<14} {found['pattern']}, {where}: {verdict}")
    wrong = {found["pattern"] for found in patterns["found"]}
    absent = len(patterns["checked"]) - len(wrong)
    return [
        *lines,
        f"  patterns       {absent} of {len(patterns['checked'])} that are reported to go wrong are not in it",
    ]


def _compared(found: float, planned: float, unit: float, name: str) -> str:
    return f"{found / unit:,.4g} {name} per core ({found / planned - 1:+.2%} of what plan.py says)"
