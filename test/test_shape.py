"""The shape of the code: how long files and functions are, who imports whom, by which name, and that ruff checks it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from places import CONTRIB, MODEL, ROOT

FILE_LINES, FUNCTION_LINES, RUNTIME_FILE_LINES = 400, 60, 300
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
RUNTIME = CONTRIB / "nxd_cpu"
NOT_SOURCES = {"artifacts", "acceptance", "build"}


def sources(root: Path = ROOT) -> list[Path]:
    """Every *.py of a checkout, but for virtual environments and what commands write."""
    folders = [
        path for path in root.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_SOURCES
    ]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def is_test(file: Path, root: Path = ROOT) -> bool:
    return "test" in file.relative_to(root).parts[:-1]


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


parsed = cache(ast.parse)  # by the text, which several tests read


def lines_in(file: Path) -> int:
    return len(text(file).splitlines())


def long_functions(file: Path) -> list[str]:
    functions = (node for node in ast.walk(parsed(text(file))) if isinstance(node, FUNCTIONS))
    lengths = [(function.name, function.end_lineno - function.lineno + 1) for function in functions]
    return [f"{file}: {name}: {length}" for name, length in lengths if length > FUNCTION_LINES]


def imported_modules(file: Path) -> Iterator[str]:
    """The modules that a file imports by absolute names, anywhere in it."""
    for node in ast.walk(parsed(text(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def names_of_test_modules(root: Path = ROOT) -> set[str]:
    """The names under which files of the test folders could be imported."""
    files = [file for file in sources(root) if is_test(file, root)]
    packages = {file.parent.name for file in files if file.name == "__init__.py"}
    return {"test", "conftest"} | packages | {file.stem for file in files if file.name != "__init__.py"}


def imports_from_tests(root: Path = ROOT) -> list[str]:
    """What outside the test folders imports from them, or puts one of them on a path."""
    names, faults = names_of_test_modules(root), []
    for file in sources(root):
        if is_test(file, root):
            continue
        siblings = {other.stem for other in file.parent.glob("*.py")}
        own = names - siblings
        faults += [f"{file}: imports {name}" for name in imported_modules(file) if name.split(".")[0] in own]
        if "sys.path" in text(file) or "PYTHONPATH" in text(file):
            faults += [f"{file}: {line}: a test folder on a path" for line in paths_to_tests(file)]
    return faults


def paths_to_tests(file: Path) -> list[str]:
    """The statements that mention a test folder together with a path of modules."""
    statements = (
        node for node in ast.walk(parsed(text(file))) if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr))
    )
    suspects = [node for node in statements if "sys.path" in ast.unparse(node) or "PYTHONPATH" in strings(node)]
    return [ast.unparse(node) for node in suspects if any("test" in constant.split("/") for constant in strings(node))]


def strings(node: ast.AST) -> list[str]:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_no_file_is_too_long():
    assert len(sources()) > 100
    limits = {file: RUNTIME_FILE_LINES if file.is_relative_to(RUNTIME) else FILE_LINES for file in sources()}
    assert [(str(file), lines_in(file)) for file, limit in limits.items() if lines_in(file) > limit] == []


def test_no_function_is_too_long():
    assert [fault for file in sources() for fault in long_functions(file)] == []


def test_the_cpu_runtimes_size_is_reported():
    """How many lines there are in all is said, and is no limit: `pytest -rP` shows it."""
    lengths = [lines_in(file) for file in RUNTIME.rglob("*.py")]
    assert lengths
    print(f"nxd_cpu: {sum(lengths)} lines in {len(lengths)} files, the longest has {max(lengths)}")


def test_nothing_outside_the_tests_imports_from_them():
    assert imports_from_tests() == []


@pytest.mark.parametrize(
    "code",
    [
        "def late():\n    from reference import model\n",
        "import test.reference\n",
        "import sys\nsys.path.append('/a/test')\n",
        "environment = {'PYTHONPATH': 'test/conformance'}\n",
    ],
)
def test_an_import_from_the_tests_is_seen(code, tmp_path):
    for folder in ("test", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "test/reference.py").touch()
    file = tmp_path / "scripts/command.py"
    file.write_text("from reference_of_ours import model\nimport sys\nsys.path.append('contrib')\n")
    assert imports_from_tests(tmp_path) == []
    file.write_text(code)
    assert len(imports_from_tests(tmp_path)) == 1


def test_a_long_function_is_seen(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def short():\n    pass\n\n\ndef long():\n" + "    x = 1\n" * FUNCTION_LINES)
    assert long_functions(file) == [f"{file}: long: {FUNCTION_LINES + 1}"]


CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "getrusage"}
OWN_TIERS = {"hlo", "emulator", "vllm"}


def functions_with_a_clock(file: Path) -> list[str]:
    """The tests of a file that look at a clock, but for slow ones: those report what they measured."""
    functions = [node for node in parsed(text(file)).body if isinstance(node, FUNCTIONS) and node.name[:5] == "test_"]
    quick = [node for node in functions if not any("slow" in ast.unparse(mark) for mark in node.decorator_list)]
    return [f"{file}: {node.name}" for node in quick if CLOCKS & set(re.findall(r"\w+", ast.unparse(node)))]


def test_no_test_depends_on_the_time_that_something_takes():
    files = [file for file in sources() if is_test(file) and not OWN_TIERS & set(file.parts)]
    assert [fault for file in files if file.name != "test_shape.py" for fault in functions_with_a_clock(file)] == []


def test_a_clock_in_a_test_is_seen(tmp_path):
    file = tmp_path / "test_it.py"
    code = "def test_it():\n    start = time.perf_counter()\n    assert time.perf_counter() - start < 1\n"
    file.write_text(code + "\n\n@pytest.mark.slow\n" + code.replace("test_it", "test_slow"))
    assert functions_with_a_clock(file) == [f"{file}: test_it"]


def test_the_package_has_one_name():
    """Its folder is called `src`; that name is for whoever copies the folder, and nothing here imports it."""
    importing = [file for file in sources() if "src" in {name.split(".")[0] for name in imported_modules(file)}]
    assert importing == []


def test_one_file_alone_loads_the_package_by_its_path():
    conftest = MODEL / "test/conftest.py"
    loading = [file for file in sources() if "spec_from_" + "file_location" in text(file)]
    assert loading == [conftest]


def test_make_test_runs_ruff_first():
    makefile = (ROOT / "Makefile").read_text()
    assert "\ntest: lint\n" in makefile
    lint = makefile.split("\nlint: ")[1].split("\n\n")[0]
    assert "ruff check ." in lint and "ruff format --check ." in lint
