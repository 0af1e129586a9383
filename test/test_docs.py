"""Every code block of the documents runs as it stands, or says above it why it does not; every name in them exists."""

import os
import re
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from places import MODEL, ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("contrib/**/README.md")])
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
ALL_BLOCKS = [(path, match) for path in DOCUMENTS for match in BLOCK.finditer(path.read_text())]
BLOCKS = [(path, match) for path, match in ALL_BLOCKS if match["language"] != "text"]
PRINTED = "printed by the block above"


def name(block) -> str:
    path, match = block
    return f"{path.relative_to(ROOT)}:{match['code'].splitlines()[0][:40]}"


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a fresh clone whose .venv is this interpreter's."""
    for path in ROOT.iterdir():
        if path.name in ("contrib", "scripts", "tools", "test", "Makefile", "pyproject.toml", "README.md"):
            (tmp_path / path.name).symlink_to(path)
    commands = tmp_path / ".venv/bin"
    commands.mkdir(parents=True)
    for command, call in (("python", ""), ("pytest", " -m pytest")):
        (commands / command).write_text(f'#!/bin/sh\nexec {sys.executable}{call} "$@"\n')
        (commands / command).chmod(stat.S_IRWXU)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def test_every_block_is_marked():
    assert len(BLOCKS) > 5
    unmarked = [name(block) for block in BLOCKS if not re.match(r"run$|run: |not run: ", block[1]["mark"] or "")]
    assert unmarked == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b[1]["mark"] == "run"], ids=name)
def test_block(block, checkout):
    path, match = block
    environment = {**os.environ, "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    if match["language"] == "python":
        code = match["code"].replace("/tmp/", f"{checkout}/")
        command, folder = [sys.executable, "-c", code], MODEL
    else:
        command, folder = ["bash", "-euo", "pipefail", "-c", match["code"]], checkout
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = {without_measures(line) for line in done.stdout.splitlines()}
    missing = [line for line in shown_below(block) if without_measures(line) not in printed]
    assert missing == [], done.stdout[-4000:]


def shown_below(block) -> list[str]:
    """The lines of the block of output that follows a block, if there is one."""
    path, match = ALL_BLOCKS[(ALL_BLOCKS.index(block) + 1) % len(ALL_BLOCKS)]
    return match["code"].splitlines() if match["mark"] == PRINTED and path == block[0] else []


def without_measures(line: str) -> str:
    """The line without what differs from run to run: numbers with a fraction, and spaces."""
    return " ".join(re.sub(r"\d+\.\d+(e[-+]\d+)?", "#", line).split())


def test_what_another_document_runs_stands_there():
    for path, match in BLOCKS:
        if found := re.fullmatch(r"run: in (\S+\.md)", match["mark"]):
            there = [m["code"].splitlines() for p, m in BLOCKS if p == path.parent / found[1] and m["mark"] == "run"]
            assert set(match["code"].splitlines()) <= set(sum(there, [])), name((path, match))


def test_output_that_is_shown_follows_a_block_that_runs():
    shown = [at for at, (_, match) in enumerate(ALL_BLOCKS) if match["mark"] == PRINTED]
    assert shown and [ALL_BLOCKS[at - 1][1]["mark"] for at in shown] == ["run"] * len(shown)


def test_what_make_test_runs_is_among_its_paths(request):
    (code,) = [match["code"].strip() for _, match in BLOCKS if match["mark"] == "run: by make test"]
    paths = request.config.getini("testpaths")
    path = code.removeprefix("pytest ")
    assert (ROOT / path).is_file() and any(path.startswith(f"{folder}/") for folder in paths)


def test_the_test_command_is_what_ci_runs():
    of_ci = [match["code"].strip() for _, match in BLOCKS if match["mark"] == "run: .ci/run"]
    assert of_ci == ["make test"] and "make test" in (ROOT / ".ci/run").read_text().splitlines()


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    broken = []
    for link in re.findall(r"\]\((?!https?:)(.*?)\)", prose(path)):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_document_is_linked_from_the_readme():
    linked = {
        (ROOT / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\((.*?)\)", (ROOT / "README.md").read_text())
    }
    assert {path for path in DOCUMENTS if path != ROOT / "README.md"} <= linked


@cache
def text_of_the_code() -> str:
    folders = ("contrib", "scripts", "tools", "test")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sh", ".json")
    ]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    return "\n".join(file.read_text() for file in files)


@cache
def words_of_the_code() -> set[str]:
    return set(re.findall(r"\w+", text_of_the_code()))


def spans(path: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_exists(path):
    """By its path from the root, the document, the model's folder or the package; or by its name alone."""
    missing = []
    for span in spans(path):
        if re.fullmatch(r"[\w./-]+\.(py|md|sh)|(contrib|docs|scripts|src|test|tools)/[\w./-]+", span):
            places = [folder / span for folder in (ROOT, path.parent, MODEL, MODEL / "src")]
            by_name = (
                []
                if "/" in span
                else [f for folder in ("contrib", "scripts", "test", "tools") for f in (ROOT / folder).rglob(span)]
            )
            if not by_name and not any(place.exists() for place in places):
                missing.append(span)
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_the_code_is_one(path):
    """A span like `NAME`, `some_name` or `Class.method` stands in the code."""
    names = [
        span for span in spans(path) if re.fullmatch(r"[A-Za-z_][\w.]*", span) and re.search(r"_|[a-z][A-Z]", span)
    ]
    files = [
        span for span in names if span.rpartition(".")[2] in ("json", "py", "pt", "md", "sh", "jinja", "safetensors")
    ]
    words = [(span, word) for span in names if span not in files for word in span.split(".")]
    assert [span for span, word in words if word not in words_of_the_code()] == []


@cache
def help_of(command: str) -> str:
    runner = ["bash"] if command.endswith(".sh") else [sys.executable]
    return subprocess.run([*runner, ROOT / command, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_that_is_named_is_taken(path):
    unknown = []
    for line in [*spans(path), *re.sub(r"\\\n", "", "\n".join(m["code"] for p, m in BLOCKS if p == path)).splitlines()]:
        found = re.search(r"(?:^|\s)((?:scripts|tools)/\w+\.(?:py|sh))(\s.*)?$", line)
        for flag in re.findall(r"(?<=\s)--[\w-]+", found[2] or "" if found else ""):
            if not re.search(rf"{flag}(?![\w-])", help_of(found[1])):
                unknown.append(f"{found[1]} {flag}")
    assert unknown == []


def test_every_target_of_make_that_is_named_is_one():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    lines = [span for path in DOCUMENTS for span in spans(path)]
    lines += [line for _, match in BLOCKS for line in match["code"].splitlines()]
    named = {found[1] for found in (re.match(r"make ([a-z][\w-]*)", line) for line in lines) if found}
    assert "test" in named and named <= set(targets)
