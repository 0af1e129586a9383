"""The part of the model's folder that goes upstream, see tools/upstream.py, needs and names nothing else of ours."""

import ast
import re
import sys

import pytest
from places import MODEL, ROOT

sys.path.append(str(ROOT / "tools"))
import upstream

# commands and their flags, artifacts and the CPU runtime: what a reader of a message would not have
OUTSIDE = re.compile(r"scripts/|tools/|artifact|nxd_cpu|(^|\s)--[a-z]")
SRC = MODEL / "src"


def sources():
    folder = [path for name in upstream.PART if name.startswith("src") for path in [MODEL / name]]
    files = [file for path in folder for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [file for file in files if file.suffix == ".py"]


def messages(source: str) -> list[str]:
    """The strings of a module that are no docstrings; an f-string comes in parts."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in strings if id(node) not in docstrings]


def imported(file) -> set:
    """The files of the package that a file imports, anywhere in it."""
    files = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [base / alias.name for alias in node.names]
            files |= {path.with_suffix(".py") for path in (base, *names) if path.with_suffix(".py").is_file()}
    return files


def test_its_imports_stay_inside():
    part = set(sources())
    assert len(part) > 15 and SRC / "check" / "reference.py" in part
    assert {(file.name, other.name) for file in part for other in imported(file) - part} == set()


@pytest.mark.parametrize("file", sources(), ids=lambda file: file.relative_to(SRC).as_posix())
def test_its_messages_name_nothing_outside(file):
    assert [text for text in messages(file.read_text(encoding="utf-8")) if OUTSIDE.search(text)] == []


def test_a_message_that_names_a_script_is_seen():
    said = messages('"""scripts/compile.py"""\nraise ValueError(f"{name}: merge it with scripts/compile.py --merge")')
    assert [text for text in said if OUTSIDE.search(text)] == [": merge it with scripts/compile.py --merge"]
