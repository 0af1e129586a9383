"""Would the tests notice? Changes the code in one place at a time and runs the tests that cover that place.

    python tools/mutate.py build/mutants.json --count 300

The package is imported anew in a fork for each mutant, with the change in its source; no file is written. What the
tests said is kept in the JSON file, and a run goes on where the one before it ended. A mutant that no test notices is
printed at the end, as is the share of them; EQUIVALENT has those that cannot be noticed, each with the reason.
"""

import argparse
import ast
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from pathlib import Path

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
    "test/conformance/test_cpu_runtime.py", "test/conformance/test_features.py", "test/conformance/test_padding.py",
    "test/conformance/test_quantization.py", "test/test_validation.py", "test/test_drift.py",
    "test/test_streamed_reference.py",
    "test/test_sampling.py", "test/test_not_a_number.py", "test/test_generation_config.py", "test/test_tp_degrees.py",
    "test/test_adapter.py", "test/test_config.py", "test/test_nothing_lost.py", "test/test_not_mixed_up.py",
)  # fmt: skip
SECONDS = 240  # of a mutant's tests; what takes longer does not end, and is noticed by that
FIRST = 12  # tests that are run at first, the quickest ones
# file:function:change -> why no test can notice it
EQUIVALENT: dict[str, str] = {}


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
    """A plugin of pytest: by test, how long it took and which functions of FILES it called."""

    def __init__(self):
        self.called: set[str] = set()
        self.tests: dict[str, dict] = {}
        for file in FILES:
            tree = ast.parse((PACKAGE / file).read_text())
            for name, function in functions(tree):
                at = 1 if ast.get_docstring(function) and len(function.body) > 1 else 0
                function.body[at:at] = ast.parse(f"noted_call({f'{file}:{name}'!r})").body
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


def mapped(file: Path) -> dict[str, dict]:
    """The map of the tests as they are, made once."""
    if not file.exists():

        def work() -> int:
            plugin = Map()
            code = quiet_pytest(
                ["--maxfail=1000", *(str(ROOT / test) for test in TESTS if (ROOT / test).exists())], [plugin]
            )
            file.write_text(json.dumps(plugin.tests))
            return code

        print("the map of the tests: ", end="", flush=True)
        print(f"exit code {forked(work, 3600)}")
    return {name: row for name, row in json.loads(file.read_text()).items() if row["passed"]}


def covering(tests: dict[str, dict], file: str, mutant: Mutant) -> list[str]:
    """The tests that call the mutant's function, the quickest first; of a module's own lines those that call any."""

    def calls(functions: list[str]) -> bool:
        if mutant.function:
            return f"{file}:{mutant.function}" in functions
        return any(function.startswith(f"{file}:") for function in functions)

    found = [name for name, row in tests.items() if calls(row["functions"])]
    return sorted(found, key=lambda name: tests[name]["seconds"])


def outcome(tests: list[str], file: str, mutant: Mutant) -> str:
    def work(chosen: list[str]) -> int:
        sys.meta_path.insert(0, Instead(file, mutated((PACKAGE / file).read_text(), mutant)))
        return quiet_pytest([str(ROOT / test) for test in chosen], [])

    for chosen in filter(None, (tests[:FIRST], tests[FIRST:])):
        code = forked(lambda chosen=chosen: work(chosen), SECONDS)
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


def report(results: dict[str, str], chosen: list[tuple[str, Mutant]]) -> str:
    """The result in words, with the mutants that nothing noticed and nothing explains."""
    names = [name_of(file, mutant) for file, mutant in chosen]
    left = [name for name in names if not results[name].startswith("killed")]
    unexplained = [name for name in left if name not in EQUIVALENT]
    share = f"{len(left)} survive ({len(left) / len(names):.1%}), {len(unexplained)} of them unexplained"
    return "\n".join([*(f"unnoticed: {name}" for name in unexplained), f"{len(names)} mutants, {share}"])


def main() -> None:
    args = parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = sample(args.count)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    import_libraries()
    tests = mapped(args.results.with_suffix(".map.json"))
    for number, (file, mutant) in enumerate(chosen):
        key = name_of(file, mutant)
        if key in results:
            continue
        began = time.monotonic()
        results[key] = outcome(covering(tests, file, mutant), file, mutant)
        args.results.write_text(json.dumps(results, indent=0))
        print(
            f"{number} {results[key]} in {time.monotonic() - began:.0f} s: {mutant.line}: {key}",
            flush=True,
        )
    print(report(results, chosen))


if __name__ == "__main__":
    main()
