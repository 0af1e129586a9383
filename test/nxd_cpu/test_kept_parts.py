"""Parts compiled side by side and kept in the user's cache: what is taken from it, and what is not."""

import os
import stat

import pytest


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The folder of kept parts, with one in it."""
    from nxd_cpu_compiler import cache

    monkeypatch.setenv("NXD_CPU_CACHE", str(tmp_path / "parts"))
    cache.write("one.so", b"library")
    assert cache.read("one.so") == b"library"
    return tmp_path / "parts"


def test_a_part_that_others_could_have_written_is_not_taken(parts, monkeypatch):
    from nxd_cpu_compiler import cache

    assert parts.stat().st_mode & 0o777 == 0o700
    for path in (parts, parts / "one.so"):
        path.chmod(path.stat().st_mode | stat.S_IWGRP)
        assert cache.read("one.so") is None
        path.chmod(path.stat().st_mode & ~stat.S_IWGRP)
        assert cache.read("one.so") == b"library"
    (parts / "link.so").symlink_to("one.so")
    assert cache.read("link.so") is None
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache.read("one.so") is None


def test_a_folder_that_others_could_have_made_takes_no_part(parts):
    from nxd_cpu_compiler import cache

    parts.rename(parts.with_name("moved"))
    parts.symlink_to("moved")
    cache.write("two.so", b"another")
    assert cache.read("one.so") is None and not (parts / "two.so").exists()


def test_a_damaged_part_is_not_taken(parts):
    from nxd_cpu_compiler import cache

    path = parts / "one.so"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.read("one.so") is None


def test_the_parts_least_used_go_first(parts, monkeypatch):
    from nxd_cpu_compiler import cache

    monkeypatch.setattr(cache, "_KEPT", 2)
    cache.write("two.so", b"two")
    os.utime(parts / "one.so", (0, 0))
    os.utime(parts / "two.so", (1, 1))
    cache.read("one.so")
    cache.write("three.so", b"three")
    assert sorted(os.listdir(parts)) == ["one.so", "three.so"]


def test_what_stops_a_process_of_the_compile_is_told():
    from nxd_cpu_compiler.processes import side_by_side

    done = []
    side_by_side({"one": lambda: None, "two": lambda: None, "three": lambda: None}, done.append)
    assert sorted(done) == ["one", "three", "two"]
    with pytest.raises(RuntimeError, match="a process of the compile was ended"):
        side_by_side({"killed": lambda: os._exit(9), "other": lambda: None}, done.append)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        side_by_side({"failing": lambda: 1 / 0}, done.append)
