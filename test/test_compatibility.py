"""The features of docs/evidence.md: every test that a cell names runs in its place, and passed there if it was run."""

import json
import os
import re
import subprocess
import sys
import warnings
from fnmatch import filter as matching
from pathlib import Path
from types import SimpleNamespace

import evidence
import pytest
from evidence import Tier, is_of, outcomes, summed, tiers
from evidence_page import (
    BEFORE,
    CPU,
    NO_TEST,
    PAGE,
    PLACES,
    RECORD,
    Claim,
    claims,
    content,
    digest,
    mark,
    page,
    recorded,
    unproven,
)
from mutate import COVERS
from places import ROOT
from test_features import FEATURES
from test_real_library import RANDOM_CELLS, SLOW_CELLS, TINY_CELLS

sys.path += [str(ROOT / "test/hlo"), str(ROOT / "test/emulator")]

from cells import cells_of
from lowering import CELLS

TEXT = PAGE.read_text()
FILES = sorted([*ROOT.glob("test/**/test_*.py"), *ROOT.glob("contrib/models/*/test/**/test_*.py")])
FEATURE, ON_SOURCE, ON_HLO, ON_DEVICE = "a feature", "source 0.8.0", "HLO, 0.8.0", "emulated device, 0.8.0"
# what "supported" of compatibility.md means: the column in which a cell of its section has tests; None: no cell has
MEANS = {"yes": ON_SOURCE, "on the emulated device": ON_DEVICE, "on the CPU runtime": CPU, "let through": None}
# the rows whose evidence is not a section of the features, and the tiers that are it
BY_TIERS = {
    "SDK 2.28": ["sources-0.8.0"],
    "SDK 2.27": ["sources-0.7.0"],
    "SDK 2.29": ["sources-0.9.0"],
    "SDK 2.31": ["default"],
    "serving with vLLM": ["vllm-0.11-0.8.0", "emulator-vllm-0.13-0.8.0", "emulator-vllm-0.16-0.8.0"],
    "any Linux machine": ["default"],
}


def known_in(claim: Claim) -> set[str]:
    """The names of what runs in the place of a cell's tests: functions, files, features and cells."""
    names = set()
    for file in FILES:
        path, functions = file.relative_to(ROOT).as_posix(), re.findall(r"^def (test_\w+)", file.read_text(), re.M)
        here = {function for function in functions if claim.place.holds(path, function)}
        names |= here | ({file.name} if here else set())
    place = claim.place
    if place.tiers[0].startswith("hlo"):
        return names | {cell.name for cell in CELLS}
    if place.tiers[0].startswith("emulator"):
        return names | {cell.name for cell in cells_of("0.8.0")}
    if place.version != CPU:
        names.update(cell.name for cell in TINY_CELLS + RANDOM_CELLS + SLOW_CELLS)
    return names | {feature.name for feature in FEATURES if not feature.only or place.version in feature.only}


def faults_of(claim: Claim) -> list[str]:
    """What a cell names and what does not run in its place, or that it names nothing and says no reason."""
    if not claim.tests and not NO_TEST.match(claim.said):
        return [f"{claim.column}: {claim.feature}: {claim.said!r} names no test"]
    known = known_in(claim)
    return [f"{claim.column}: {claim.feature}: {test}" for test in claim.tests if not matching(known, test)]


def test_every_feature_has_a_row_and_every_row_all_places():
    heads = [line for line in TEXT.splitlines() if line.startswith("| feature |")]
    assert set(heads) == {f"| feature | {' | '.join(PLACES)} |"} and len(claims(TEXT)) > 30 * len(PLACES)
    of_cpu = {test for claim in claims(TEXT) if claim.column == CPU for test in claim.tests}
    of_sources = {test for claim in claims(TEXT) if claim.column == ON_SOURCE for test in claim.tests}
    for feature in FEATURES:
        tests = of_cpu if CPU in feature.only else of_sources
        assert any(matching([feature.name], test) for test in tests), feature.name


@pytest.mark.parametrize("column", PLACES)
def test_no_cell_is_empty_and_every_test_runs_in_its_place(column):
    assert [fault for claim in claims(TEXT) if claim.column == column for fault in faults_of(claim)] == []


@pytest.mark.parametrize(
    "column, said, right",
    [
        (ON_HLO, "refused: `test_what_is_refused`", False),
        (ON_HLO, "refused before the library is called: `test_what_is_refused`", True),
        (ON_HLO, "`tiny-tp2-split`", True),
        (ON_HLO, "`continuous-batching-tp1`", False),
        (ON_SOURCE, "`test_left_padding`", False),
        (ON_SOURCE, "`test_padding_changes_no_token`", True),
        (ON_SOURCE, "`test_all_rope_is_a_llama`", False),
        (ON_DEVICE, "`test_each_row_has_its_own_adapter`", True),
        (ON_DEVICE, "`test_padding_changes_no_token`", False),
        (CPU, "`continuous-batching-ctx2`", True),
        (CPU, "`windowed-context-tp1`", False),
        (CPU, "", False),
        (CPU, "not run", True),
    ],
)
def test_a_test_of_another_place_is_a_fault(column, said, right):
    assert (faults_of(Claim("", FEATURE, column, said)) == []) == right


def without_the_library(*tests: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "without_the_library", *tests]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "test")}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, env=environment)


def test_what_is_refused_before_the_library_is_called_needs_none_of_it():
    """All tests that such cells name, in one run in which the library's modules cannot be imported."""
    named = {test for claim in claims(TEXT) if BEFORE.match(claim.said) for test in claim.tests}
    given = [f"{file}::{test}" for test in sorted(named) for file in FILES if f"def {test}(" in file.read_text()]
    assert {one.partition("::")[2] for one in given} == named and len(named) > 10
    done = without_the_library(*given)
    assert done.returncode == 0 and re.search(r"\d{3} passed", done.stdout), done.stdout[-4000:] + done.stderr[-2000:]
    done = without_the_library("test/nxd_cpu/test_layers.py")
    assert done.returncode != 0 and "is kept away from this test" in done.stdout


# ---- what ran ----

RUN = {
    "counts": {"passed": 4, "failed": 1, "skipped": 0},
    "tests": {
        "test/conformance/test_padding.py": {"test_padding_changes_no_token[0.8.0]": [2, 0]},
        "test/conformance/test_features.py": {"test_tokens_equal_transformers[0.8.0]": [3, 1]},
    },
    "cells": {"0.8.0": {"buckets-tp1": [1, 0], "buckets-tp2": [1, 1], "window-tp1": [1, 0]}, CPU: {"plain": [1, 0]}},
}


@pytest.mark.parametrize(
    "said, wrong, said_behind",
    [
        ("`buckets-tp1`", [], " — 1 passed"),
        ("`buckets-tp*`", ["buckets-tp*"], " — 2 of 3 passed"),
        ("`window-tp*`, `test_padding_changes_no_token`", [], " — 3 passed"),
        ("`all-rope`", ["all-rope"], " — 0 passed"),
        ("`plain`", ["plain"], " — 0 passed"),  # nxd_cpu's
        ("`test_its_tests_pass`", ["test_its_tests_pass"], " — 0 passed"),
        ("not run", [], ""),
    ],
)
def test_a_cell_is_proven_by_what_passed_in_its_place(said, wrong, said_behind):
    claim, record = Claim("", FEATURE, ON_SOURCE, said), {"sources-0.8.0": RUN, "sources-0.9.0": {"not run": "why"}}
    assert (unproven(claim, record), mark(claim, record)) == (wrong, said_behind)
    elsewhere = Claim("", FEATURE, "source 0.9.0", said)
    assert (unproven(elsewhere, record), mark(elsewhere, record)) == ([], " — not recorded" * bool(said_behind.strip()))


def test_reports_are_summed_by_function_place_and_cell(tmp_path):
    (tmp_path / "report.xml").write_text(
        """<testsuites><testsuite>
        <testcase file="test/test_features.py" name="test_x[0.8.0-plain-tp1]" time="1"/>
        <testcase file="test/test_features.py" name="test_x[0.8.0-plain-tp2]"><failure/></testcase>
        <testcase file="test/test_features.py" name="test_x[nxd_cpu-in-parts-plain-tp1]"/>
        <testcase file="test/a.py" name="test_y[0.8.0-plain-tp1]"/>
        <testcase file="test/a.py" name="test_y[other-0.8.0]"/>
        <testcase file="test/a.py" name="test_y[other-0.8.0]"><error/></testcase>
        <testcase file="test/a.py" name="test_z"><skipped/></testcase></testsuite></testsuites>"""
    )
    assert summed(outcomes(tmp_path / "report.xml")) == {
        "counts": {"passed": 3, "failed": 2, "skipped": 1},
        "tests": {
            "test/a.py": {"test_y": [0, 1], "test_y[0.8.0]": [1, 0]},
            "test/test_features.py": {"test_x[0.8.0]": [1, 1], "test_x[nxd_cpu-in-parts]": [1, 0]},
        },
        "cells": {"0.8.0": {"plain-tp1": [1, 0], "plain-tp2": [0, 1]}, "nxd_cpu-in-parts": {"plain-tp1": [1, 0]}},
    }


def test_a_digest_is_of_code_and_of_nothing_else(tmp_path):
    (tmp_path / "code/deep").mkdir(parents=True)
    (tmp_path / "code/deep/a.py").write_text("a = 1")
    (tmp_path / "one.toml").write_text("")
    first = digest(["code", "one.toml"], tmp_path)
    (tmp_path / "code/a.md").write_text("prose")
    (tmp_path / "code/a.pyc").write_text("")
    assert digest(["code", "one.toml"], tmp_path) == first
    (tmp_path / "code/deep/a.py").rename(tmp_path / "code/deep/b.py")
    assert digest(["code", "one.toml"], tmp_path) != first


def test_each_test_on_the_emulated_device_is_in_one_tier():
    calls = {tier.name: tier.calls[0].split() for tier in tiers() if tier.name.startswith("emulator-")}
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "test/emulator").glob("test_*.py")}
    for vllm in ("emulator-vllm-0.13-0.8.0", "emulator-vllm-0.16-0.8.0"):
        *of_vllm, option, marker = calls[vllm]
        assert [option, marker] == ["-m", "emulator"] and "test/emulator/test_vllm_draft.py" in of_vllm
        for version in ("0.7.0", "0.8.0", "0.9.0"):
            folder, *options = calls[f"emulator-{version}"]
            assert folder == "test/emulator" and options[:2] == ["-m", "emulator"]
            assert options[2::2] == ["--ignore"] * len(of_vllm) and options[3::2] == of_vllm
        assert {file for file in files if "vllm" in Path(file).name} < set(of_vllm) < files


def test_a_record_is_of_the_tests_that_its_tier_has(tmp_path):
    tier = Tier("one", ("test/a.py",), (str(tmp_path),))
    run = {"code": digest(tier.covers), "calls": ["test/a.py"]}
    assert is_of(tier, run) and not is_of(tier, {**run, "calls": ["test/b.py"]})
    assert not is_of(tier, {**run, "code": "another"}) and not is_of(tier, {"not run": "why"})


def test_a_record_names_the_commit_on_which_its_run_began(monkeypatch, tmp_path):
    heads, passed = ["the first"], '<testsuite><testcase file="test/a.py" name="test_a"/></testsuite>'

    def pytest_itself(words, **how):
        (report,) = (word.removeprefix("--junitxml=") for word in words if word.startswith("--junitxml="))
        Path(report).write_text(passed)
        heads.append("the second")
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(evidence, "git", lambda *words: heads[-1])
    monkeypatch.setattr(evidence, "versions", lambda tier, args: {})
    monkeypatch.setattr(evidence.subprocess, "run", pytest_itself)
    run = evidence.run(Tier("one", ("test/a.py",), (str(tmp_path),)), SimpleNamespace(releases={}))
    assert (run["commit"], run["counts"]["passed"], heads[-1]) == ("the first", 1, "the second")


def test_the_page_is_what_the_record_makes_of_it():
    names = [tier.name for tier in tiers()]
    assert {tier for place in PLACES.values() for tier in place.tiers} | set(sum(BY_TIERS.values(), [])) <= set(names)
    assert set(recorded()) == set(names) and RECORD.exists()
    again = "python tools/evidence.py --page writes it again"
    assert page(TEXT, recorded(), content().get("mutants")) == TEXT, again


def test_a_record_that_was_just_made_is_written_as_one_that_was_read():
    run = {**RUN, "date": "2026-12-01", "commit": "abc", "seconds": 60, "versions": {"torch": "2", "jax": "1"}}
    again = json.loads(json.dumps({"one": run}, sort_keys=True))
    assert page(TEXT, {"one": run}) == page(TEXT, again) and "| abc | jax 1, torch 2 | 4 |" in page(TEXT, again)


def test_what_is_written_of_mutants():
    found = {"mutants": 300, "killed": 285, "equivalent": 13, "survived": 2, "date": "2026-12-01", "commit": "abc"}
    line = next(line for line in page(TEXT, {}, found).splitlines() if line.startswith("[Mutants]"))
    assert "commit abc: of 300 small changes of the code a test noticed 285, and none did 15 (5.0%): 13 that" in line
    assert line.endswith("and 2 without a reason.") and "\nMutants: not run\n" in page(TEXT, {})


def test_the_mutants_are_of_this_code():
    found = content().get("mutants")
    if found is None or found["code"] != digest(COVERS):
        warnings.warn("the record of mutants is of other code: python tools/mutate.py FILE --record", stacklevel=1)


@pytest.mark.parametrize("tier", tiers(), ids=lambda tier: tier.name)
def test_the_record_is_of_this_code(tier):
    """A warning: who changes the code cannot always run every tier."""
    run = recorded()[tier.name]
    if "not run" in run:
        warnings.warn(f"tier {tier.name} is not in docs/evidence.json: {run['not run']}", stacklevel=1)
    elif not is_of(tier, run):
        warnings.warn(
            f"tier {tier.name} ran on {run['date']}, on other code than this: make evidence TIERS={tier.name}",
            stacklevel=1,
        )


def test_every_cell_is_proven():
    """By the tiers that are recorded; of the others the test above warns."""
    faults = [f"{c.column}: {c.feature}: {name}" for c in claims(TEXT) for name in unproven(c, recorded())]
    assert faults == []


# ---- what an owner reads ----


def rows() -> list[list[str]]:
    lines = [line for line in (ROOT / "compatibility.md").read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_what_an_owner_reads_is_short_and_says_where_more_is():
    head, _, *table = rows()
    assert head == ["feature", "supported", "limits", "more"] and 20 < len(table) <= 30
    assert [row for row in table if not (row[0] and row[1] and "](docs/evidence.md#" in row[3])] == []


def sections() -> dict[str, str]:
    """The headings below the features, by their anchors."""
    names = dict.fromkeys(claim.section for claim in claims(TEXT))
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-"): name for name in names}


def unsupported(row: list[str], text: str, record: dict[str, dict]) -> str:
    """Why what a row of compatibility.md says has no evidence, or an empty string."""
    feature, supported, _, more = row
    for begin, wanted in BY_TIERS.items():
        if feature.startswith(begin):
            runs = [record[tier] for tier in wanted]
            bad = [run for run in runs if "counts" in run and (run["counts"]["failed"] or not run["counts"]["passed"])]
            return f"{feature}: a test of {wanted} failed" if bad else ""
    section = sections()[re.search(r"docs/evidence\.md#([\w-]+)", more)[1]]
    of_section = [claim for claim in claims(text) if claim.section == section]
    if supported == "refused":
        found = [claim for claim in of_section if claim.said.startswith("refused") and claim.tests]
    else:
        column = MEANS[re.split("[,;]", supported)[0]]
        found = [claim for claim in of_section if claim.tests and not claim.said.startswith("refused")]
        found = [claim for claim in found if claim.column == column] if column else of_section
    proven = [claim for claim in found if not unproven(claim, record)]
    return "" if proven else f"{feature}: nothing of {section} passed where it says {supported!r}"


@pytest.mark.parametrize("row", rows()[2:], ids=lambda row: row[0][:40])
def test_what_is_called_supported_has_passed(row):
    assert unsupported(row, TEXT, recorded()) == ""


def test_what_is_called_supported_without_a_passing_cell_is_a_fault():
    (row,) = [row for row in rows() if row[0] == "`fused_qkv`"]
    failed = json.loads(json.dumps(RUN))
    assert "nothing of fused_qkv passed" in unsupported(row, TEXT, {"sources-0.8.0": failed})
    passed = {f"{name}-tp{tp}-fused-batch2": [1, 0] for name in ("tiny", "plain") for tp in (2, 3)}
    failed["cells"]["0.8.0"] = passed | {"12-heads-4-kv-tp6-fused-batch2": [1, 0]}
    assert unsupported(row, TEXT, {"sources-0.8.0": failed}) == ""
    elsewhere = [row[0], "on the emulated device", *row[2:3], "[evidence](docs/evidence.md#kernel-switches)"]
    assert "nothing of Kernel switches" in unsupported(elsewhere, TEXT, {})
