"""Would the tests notice? Changes the code in one place at a time and runs the tests that cover that place.

    python tools/mutate.py build/mutants.json --count 300

The package is imported anew in a fork for each mutant, with the change in its source; none of its files is written.
What the tests said is kept in the JSON file, and a run goes on where the one before it ended: what was noticed is not
made again, what was not noticed is. A mutant that no test notices is printed at the end, as is the share of them;
equivalent.py has those that cannot be noticed, each with the reason. With --record the figures go into the record that
docs/evidence.md is written from.
"""

import argparse
import ast
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from equivalent import EQUIVALENT
from evidence import git
from evidence_page import digest, save
from mutants import Mutant, functions, mutants, mutated

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "contrib/models/SmolLM3-3B/src"
FILES = (
    "modeling_smollm3_3b.py", "model/rope.py", "model/windows.py", "weights/rank_layout.py", "weights/shard_writer.py",
    "weights/checkpoint.py", "generate/generation.py", "check/validation.py", "check/drift.py",
)  # fmt: skip
# what runs in pytest's own process: a command is another one, and sees no mutant
TESTS = (
    "contrib/models/SmolLM3-3B/test/unit", "test/nxd_cpu/test_model.py", "test/nxd_cpu/test_sliding_window.py",
    "test/conformance/test_cpu_runtime.py", "test/conformance/test_padding.py", "test/conformance/test_quantization.py",
    "test/test_validation.py", "test/test_judging.py", "test/test_validate_by_hand.py", "test/test_draft_by_hand.py",
    "test/test_drift.py", "test/test_streamed_reference.py", "test/test_not_a_number.py",
    "test/test_generation_config.py", "test/test_config.py", "test/test_nothing_lost.py", "test/test_not_mixed_up.py",
)  # fmt: skip
# what a mutant's tests may take, beside what they took: what takes longer does not end, and is noticed by that
SECONDS, TIMES = 60, 10
FIRST = 12  # tests that are run at first, the quickest ones
LONGEST = 0.3  # seconds of a test; a change that only longer ones notice counts as unnoticed
# a change in one of them makes the recorded figures old
COVERS = ("contrib/models/SmolLM3-3B", "contrib/nxd_cpu", "test", "tools/mutate.py", "tools/mutants.py")


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module of the package other code, with `names` beside it."""

    def __init__(self, file: str, tree: ast.Module, **names):
        self.name = "smollm3_neuron." + file.removesuffix(".py").replace("/", ".")
        self.path, self.names = PACKAGE / file, names
        self.code = compile(tree, str(self.path), "exec")

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, origin=str(self.path)) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__dict__.update(self.names, __file__=str(self.path))
        exec(self.code, module.__dict__)


class Map:
    """A plugin of pytest: by test, how long it took and which functions of FILES, or whole modules, it ran."""

    def __init__(self):
        self.called: set[str] = set()
        self.tests: dict[str, dict] = {}
        for file in FILES:
            tree = ast.parse((PACKAGE / file).read_text())
            for name, part in (("", tree), *functions(tree)):
                at = 1 if ast.get_docstring(part) and len(part.body) > 1 else 0
                part.body[at:at] = ast.parse(f"noted_call({f'{file}:{name}'!r})").body
            sys.meta_path.insert(0, Instead(file, ast.fix_missing_locations(tree), noted_call=self.note))

    def note(self, name: str) -> None:
        self.called.add(name)

    def pytest_runtest_protocol(self, item):
        self.called = set()

    def pytest_runtest_logreport(self, report):
        row = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "functions": [], "passed": True})
        row["seconds"] += report.duration
        row["passed"] &= report.passed
        row["functions"] = sorted({*row["functions"], *self.called})


def quiet_pytest(arguments: list[str], plugins: list) -> int:
    import pytest

    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins)


def forked(work, seconds: float) -> int | None:
    """What `work` returned in a process of its own, and None where that took longer; its output is dropped."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        code = 99
        try:
            code = int(work())
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def test_files() -> list[str]:
    """The files of TESTS."""
    paths = [ROOT / test for test in TESTS]
    files = [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    return [file.relative_to(ROOT).as_posix() for file in files]


def mapped(file: Path) -> dict[str, dict]:
    """The map of the tests as they are; what `file` has of a test's file holds as long as that one does not change."""
    known = json.loads(file.read_text()) if file.exists() else {}
    for test in test_files():
        code = hashlib.sha256((ROOT / test).read_bytes()).hexdigest()
        if known.get(test, {}).get("code") == code:
            continue

        def work(test=test, code=code, known=known) -> int:
            plugin = Map()
            exit_code = quiet_pytest(["--maxfail=1000", str(ROOT / test)], [plugin])
            file.write_text(json.dumps(known | {test: {"code": code, "tests": plugin.tests}}))
            return exit_code

        print(f"the map of {test}: exit code {forked(work, 3600)}", flush=True)
        known = json.loads(file.read_text())
    rows = {name: row for test in test_files() for name, row in known[test]["tests"].items()}
    return {name: row for name, row in rows.items() if row["passed"] and row["seconds"] <= LONGEST}


def covering(tests: dict[str, dict], file: str, mutant: Mutant) -> dict[str, float]:
    """The tests that call the mutant's function, the quickest first; of a module's own lines those that run any."""
    name = f"{file}:{mutant.function}"

    def calls(functions: list[str]) -> bool:
        return name in functions or (not mutant.function and any(one.startswith(name) for one in functions))

    found = {test: row["seconds"] for test, row in tests.items() if calls(row["functions"])}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def allowed(seconds: Iterable[float]) -> float:
    return SECONDS + TIMES * sum(seconds)


def check_unchanged(tests: dict[str, dict]) -> None:
    """Ends the run where the tests fail on the code as it is, run as for a mutant: they would notice anything."""
    chosen = [str(ROOT / name) for name in sorted(tests, key=lambda name: tests[name]["seconds"])]
    code = forked(lambda: quiet_pytest(chosen, []), allowed(row["seconds"] for row in tests.values()))
    if code != 0:
        sys.exit(f"error: without a mutant the tests end with exit code {code}, 0 is needed: run them and see why")


def outcome(tests: dict[str, float], file: str, mutant: Mutant) -> str:
    """What `tests`, with the seconds that each took, say of a mutant."""

    def work(chosen: list[str]) -> int:
        sys.meta_path.insert(0, Instead(file, mutated((PACKAGE / file).read_text(), mutant)))
        return quiet_pytest([str(ROOT / test) for test in chosen], [])

    for chosen in filter(None, ([*tests][:FIRST], [*tests][FIRST:])):
        code = forked(lambda chosen=chosen: work(chosen), allowed(tests[test] for test in chosen))
        if code is None:
            return "killed: took too long"
        if code:
            return "killed"
    return "survived" if tests else "not covered"


def sample(count: int) -> list[tuple[str, Mutant]]:
    """So many of all mutants, the same ones for the same code."""
    everything = [(file, mutant) for file in FILES for mutant in mutants((PACKAGE / file).read_text())]
    print(f"{len(everything)} mutants are possible in {len(FILES)} files, {min(count, len(everything))} are made")
    # by chance, but most are the same ones where the code has changed a little
    return sorted(everything, key=lambda one: hashlib.sha256(name_of(*one).encode()).digest())[:count]


def name_of(file: str, mutant: Mutant) -> str:
    return f"{file}: {mutant.name}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="FILE", help="where results are kept; beside it the tests' map")
    parser.add_argument("--count", type=int, default=300, help="how many mutants (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/evidence.json and its page")
    return parser.parse_args()


def import_libraries() -> None:
    """All that every fork would import again, but nothing of the package."""
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import transformers

    for name in (
        "SmolLM3ForCausalLM",
        "LlamaForCausalLM",
        "AutoTokenizer",
        "PreTrainedTokenizerFast",
        "GenerationConfig",
    ):
        getattr(transformers, name)
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert not any(name.startswith("smollm3_neuron") for name in sys.modules)


def figures(results: dict[str, str], names: list[str]) -> dict[str, int]:
    left = {name for name in names if not results[name].startswith("killed")}
    explained = len(left & set(EQUIVALENT))
    return {
        "mutants": len(names), "killed": len(names) - len(left), "equivalent": explained,
        "survived": len(left) - explained,
    }  # fmt: skip


def main() -> None:
    args = parse_args()
    if args.record and git("status", "--porcelain", "--", *COVERS):
        sys.exit(f"error: --record names a commit: commit what is changed of {', '.join(COVERS)}")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = sample(args.count)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    import_libraries()
    tests = mapped(args.results.with_suffix(".map.json"))
    check_unchanged(tests)
    for number, (file, mutant) in enumerate(chosen):
        key = name_of(file, mutant)
        if results.get(key, "").startswith("killed") or (key in results and key in EQUIVALENT):
            continue
        began = time.monotonic()
        results[key] = outcome(covering(tests, file, mutant), file, mutant)
        args.results.write_text(json.dumps(results, indent=0))
        print(
            f"{number} {results[key]} in {time.monotonic() - began:.0f} s: {mutant.line}: {key}",
            flush=True,
        )
    names = [name_of(*one) for one in chosen]
    for name in names:
        if not results[name].startswith("killed") and name not in EQUIVALENT:
            print(f"unnoticed: {name}")
    found = figures(results, names)
    print(", ".join(f"{count} {name}" for name, count in found.items()))
    if args.record:
        today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        save(mutants={**found, "date": today, "commit": git("rev-parse", "--short=12", "HEAD"), "code": digest(COVERS)})


if __name__ == "__main__":
    main()
