"""Stand-ins for closed modules: what is known is imported as such, whichever way it is asked for; the rest is inert."""

import sys

import pytest

from nxd_sources import inert

ROOT = "closed_for_this_test"


@pytest.fixture
def closed():
    """A finder for one closed package with one module that is stood in for; how often its modules were asked for."""
    made = []

    def modules():
        made.append(1)
        return {f"{ROOT}.proto.messages_pb2": {"Message": int}}

    finder = inert.Finder([ROOT], modules)
    sys.meta_path.append(finder)
    yield made
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == ROOT]:
        del sys.modules[name]


def test_a_known_module_is_imported_by_name_from_its_package(closed):
    package = __import__(f"{ROOT}.proto", fromlist=["messages_pb2", "other_pb2"])
    assert package.messages_pb2.Message is int
    assert isinstance(package.other_pb2, inert.Inert)
    assert closed == [1]


def test_the_modules_are_made_when_the_first_one_is_imported(closed):
    import importlib.util

    assert importlib.util.find_spec(ROOT) is not None and closed == []
    __import__(ROOT)
    assert closed == [1]


def test_iterating_over_what_is_inert_ends():
    for thing in (inert.inert("thing"), inert.inert("thing")()):
        with pytest.raises(TypeError):
            list(thing)
