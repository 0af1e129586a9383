"""tools/mutants.py: which small changes it makes, where, and that each is one change of the code; its figures."""

import ast

import pytest
from equivalent import EQUIVALENT
from mutants import functions, mutants, mutated
from mutate import FILES, PACKAGE, TESTS, figures, name_of
from places import ROOT

SOURCE = '''
LIMIT: int = 3


class Box:
    """With 1 + 1 in its words."""

    def first(self, rows: list[int] = ()) -> int:
        if not rows and LIMIT > 2:
            raise ValueError(f"{1 + 1} rows")
        self.store(rows, keep=True)
        return min(rows[0], -LIMIT) if rows else 0


def path(folder, name):
    return folder / (name + ".py")
'''


def test_each_mutant_is_one_change():
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    found = mutants(SOURCE)
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        after = ast.unparse(mutated(SOURCE, mutant)).splitlines()
        changed = [pair for pair in zip(before, after, strict=True) if len(set(pair)) > 1]
        assert len(changed) == 1, mutant


@pytest.mark.parametrize(
    "function, what",
    [
        ("", "3 -> 4"),
        ("Box.first", "LIMIT > 2 -> LIMIT >= 2"),
        ("Box.first", "not rows and LIMIT > 2 -> not rows or LIMIT > 2"),
        ("Box.first", "not rows -> rows"),
        ("Box.first", "if not rows and LIMIT > 2: -> if True:"),
        ("Box.first", "self.store(...) without keep=True"),
        ("Box.first", "self.store(rows, keep=True) -> pass"),
        ("Box.first", "True -> False"),
        ("Box.first", "min(rows[0], -LIMIT) -> max(rows[0], -LIMIT)"),
        ("Box.first", "-LIMIT -> LIMIT"),
        ("Box.first", "min(rows[0], -LIMIT) if rows else 0 -> 0"),
        ("Box.first", "return min(rows[0], -LIMIT) if rows else 0 -> return None"),
        ("path", "return folder / (name + '.py') -> return None"),
    ],
)
def test_what_is_changed(function, what):
    assert (function, what) in {(mutant.function, mutant.what) for mutant in mutants(SOURCE)}


def test_what_no_test_is_about_stays():
    """Annotations, words, messages of errors, and operators between texts and paths."""
    everything = {(mutant.function, mutant.what) for mutant in mutants(SOURCE)}
    assert not [what for _, what in everything if "int" in what or "1 + 1" in what]
    assert [what for function, what in everything if function == "path"] == [
        "return folder / (name + '.py') -> return None"
    ]
    assert [name for name, _ in functions(ast.parse(SOURCE))] == ["path", "Box.first"]


def test_what_is_explained_is_a_mutant_that_is_made():
    possible = {name_of(file, mutant) for file in FILES for mutant in mutants((PACKAGE / file).read_text())}
    assert set(EQUIVALENT) <= possible and all(reason.endswith(".") for reason in EQUIVALENT.values())
    assert [test for test in TESTS if not (ROOT / test).exists()] == []


def test_a_mutant_is_noticed_explained_or_left(monkeypatch):
    monkeypatch.setitem(EQUIVALENT, "b", "Why.")
    monkeypatch.setitem(EQUIVALENT, "a", "It is noticed all the same.")
    said = {"a": "killed", "b": "survived", "c": "not covered", "d": "killed: took too long", "e": "survived"}
    assert figures(said, list("abcd")) == {"mutants": 4, "killed": 2, "equivalent": 1, "survived": 1}
