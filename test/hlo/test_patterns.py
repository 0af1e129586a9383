"""What is reported to go wrong on a device is found in graphs that have it, and in none that only look alike.

That the model's graphs have none of it is in test_hlo.py. Needs `make hlo-venv`; asked for with -m hlo.
"""

import json

import lowering
import pytest
from places import CONTRIB

pytestmark = [pytest.mark.hlo, pytest.mark.skipif(bool(lowering.missing()), reason=str(lowering.missing()))]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("patterns")
    lowering.call(
        lowering.VENV / "bin/python",
        [str(lowering.HERE / "broken_graphs.py"), str(out / "found.json")],
        out / "log",
        300,
        PYTHONPATH=str(CONTRIB),
    )
    return json.loads((out / "found.json").read_text())


def test_each_pattern_is_found_in_its_broken_graph(found):
    # the shorter top-k is short, too, and what adds int64 by index writes it
    also = {"top-k of 2": {"short top-k"}, "integer scatter: 64 bits": {"index_put of int64"}}
    for name, entries in found["broken"].items():
        assert {entry["pattern"] for entry in entries} == {name.partition(":")[0]} | also.get(name, set()), name
        assert [entry for entry in entries if entry["harmless"]] == [], name
        assert all(entry["places"] and entry["effect"] and "http" in entry["source"] for entry in entries)
    assert {name.partition(":")[0] for name in found["broken"]} == set(found["patterns"])


def test_nothing_is_found_in_sound_graphs(found):
    assert {name: entries for name, entries in found["sound"].items() if entries} == {}


def test_each_reason_excuses_what_it_names(found):
    for name, entries in found["harmless"].items():
        assert [entry["pattern"] for entry in entries] == [name.partition(":")[0]] and entries[0]["harmless"]
    assert {entries[0]["harmless"] for entries in found["harmless"].values()} == set(found["reasons"])


def test_without_a_record_of_constants_it_says_so(found):
    unchecked = found["without constants"]
    assert set(unchecked["not_checked"]) == {"integer division", "two least values", "large constant", "index beyond"}
    assert unchecked["found"] == [] and set(unchecked["checked"]) == set(found["patterns"]) - set(
        unchecked["not_checked"]
    )
