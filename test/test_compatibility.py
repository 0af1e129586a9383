"""The features of docs/evidence.md: no cell is empty; every test that a cell names exists and runs in its place."""

import re
import sys
from fnmatch import filter as matching
from pathlib import Path

import pytest
from test_features import CPU, FEATURES
from test_real_library import RANDOM_CELLS, SLOW_CELLS, TINY_CELLS

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "test/hlo"), str(ROOT / "test/emulator")]

from cells import cells_of
from lowering import CELLS

PLACES = {
    "nxd_cpu": CPU, "source 0.8.0": "0.8.0", "source 0.9.0": "0.9.0", "HLO, 0.8.0": "HLO",
    "emulated device, 0.8.0": "emulated",
}  # fmt: skip


def rows() -> list[list[str]]:
    section = (ROOT / "docs/evidence.md").read_text().split("\n## Features\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]


def cells() -> list[tuple[str, str, str]]:
    """(feature, place, what it says), with "the same" resolved."""
    found = []
    for feature, *said in rows()[2:]:
        for place, text in zip(PLACES.values(), said, strict=True):
            found.append((feature, place, found[-1][2] if text == "the same" and place != CPU else text))
    return found


def known_in(place: str) -> set[str]:
    files = [*ROOT.glob("test/**/test_*.py"), *ROOT.glob("contrib/models/*/test/**/test_*.py")]
    names = {file.name for file in files}
    names.update(name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M))
    if place == "HLO":
        return names | {cell.name for cell in CELLS}
    if place == "emulated":
        return names | {cell.name for cell in cells_of("0.8.0")}
    if place != CPU:
        names.update(cell.name for cell in TINY_CELLS + RANDOM_CELLS + SLOW_CELLS)
    return names | {feature.name for feature in FEATURES if not feature.only or place in feature.only}


def test_every_feature_has_a_row_and_every_row_all_places():
    assert rows()[0] == ["feature", *PLACES] and len(rows()) > 30
    of_cpu = {test for _, place, said in cells() if place == CPU for test in re.findall("`(.*?)`", said)}
    of_sources = {test for _, place, said in cells() if place == "0.8.0" for test in re.findall("`(.*?)`", said)}
    for feature in FEATURES:
        tests = of_cpu if CPU in feature.only else of_sources
        assert any(matching([feature.name], test) for test in tests), feature.name


@pytest.mark.parametrize("place", PLACES.values())
def test_no_cell_is_empty_and_every_test_exists(place):
    known = known_in(place)
    for feature, at, said in cells():
        tests = re.findall("`(.*?)`", said)
        if at == place:
            assert tests or re.match("not run|not possible", said), f"{feature}: {said!r}"
            assert [test for test in tests if not matching(known, test)] == [], feature


def test_what_an_owner_reads_is_short_and_says_where_more_is():
    lines = [line for line in (ROOT / "compatibility.md").read_text().splitlines() if line.startswith("|")]
    head, _, *table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["feature", "supported", "limits", "more"] and 20 < len(table) <= 30
    assert [row for row in table if not (row[0] and row[1] and re.search(r"\]\(.*\)", row[3]))] == []
