"""What docs/evidence.md says of tests, and what docs/evidence.json has of runs: one held to the other.

The cells of the features are written by hand: each names tests or a reason. What a cell's tests did is written behind
them by `evidence.py`, as is the table of the tiers. In a cell, `*` stands for any characters.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs/evidence.md", ROOT / "docs/evidence.json"
BEGIN, END = "<!-- written by make evidence -->", "<!-- end of what make evidence wrote -->"
MARK = " — "  # between what a cell says and what its tests did
# a refusal by the project's own code, which is the same wherever that code runs: its tests are those of nxd_cpu
BEFORE = re.compile(r"(?:refused|read) before the library is called: ")
NO_TEST = re.compile("not run|not possible")
SUFFIXES = {".py", ".sh", ".json", ".jinja", ".cpp", ".toml", ".npz", ".safetensors"}
# a parameter or a fixture that has one of these names, itself or through others, is the library's sources
SOURCES = {"release", "nxd_releases", "place", "pair"}
# a test's id may begin with where it ran, the name of a feature or cell behind it; nxd_cpu has two forms beside itself
RAN_IN = re.compile(r"(nxd_cpu-in-parts|nxd_cpu-compiled-ahead|nxd_cpu|\d+\.\d+\.\d+)(?:-(.+))?")
# where such a name is a feature or a cell
CELL_FILES = ("test_features.py", "test_real_library.py", "test_hlo.py", "test_emulator.py")
OWN_TIERS = ("test/hlo/", "test/emulator/", "test/vllm/")


@dataclass(frozen=True)
class Place:
    """A column of the features."""

    tiers: tuple[str, ...]  # what runs its tests
    version: str  # in front of the ids of its cells

    def holds(self, file: str, function: str) -> bool:
        """Whether a test function runs in this place."""
        if self.tiers[0] == "default":
            return not file.startswith(OWN_TIERS)
        if self.tiers[0].startswith("sources"):
            return file.startswith("test/conformance/") and function in functions_on_sources(ROOT / file)
        return file.startswith(f"test/{self.tiers[0].partition('-')[0]}/")


CPU = "nxd_cpu"
PLACES = {
    CPU: Place(("default", "slow", "drift"), CPU),
    "source 0.8.0": Place(("sources-0.8.0",), "0.8.0"),
    "source 0.9.0": Place(("sources-0.9.0",), "0.9.0"),
    "HLO, 0.8.0": Place(("hlo-0.8.0",), "0.8.0"),
    "emulated device, 0.8.0": Place(
        ("emulator-0.8.0", "emulator-vllm-0.13-0.8.0", "emulator-vllm-0.16-0.8.0", "emulator-two-releases"), "0.8.0"
    ),
}


@dataclass(frozen=True)
class Claim:
    """One cell: what it says of a feature in a place, "the same" resolved."""

    section: str
    feature: str
    column: str
    said: str

    @property
    def tests(self) -> list[str]:
        return re.findall("`(.*?)`", self.said) if not NO_TEST.match(self.said) else []

    @property
    def place(self) -> Place:
        """Where its tests run."""
        return PLACES[CPU if BEFORE.match(self.said) else self.column]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def is_row(line: str) -> bool:
    return line.startswith("|") and not line.startswith(("| feature |", "| --- "))


def features(text: str) -> tuple[str, str, str]:
    """The page before its features, these, and what is after them."""
    before, heading, rest = text.partition("\n## Features\n")
    section, after_heading, after = rest.partition("\n## ")
    return before + heading, section, after_heading + after


def claims_of(line: str, section: str) -> list[Claim]:
    """The cells of a row."""
    feature, *texts = (cell.partition(MARK)[0] for cell in cells_of(line))
    said, found = "", []
    for column, text in zip(PLACES, texts, strict=True):
        said = said if text == "the same" and column != CPU else text
        found.append(Claim(section, feature, column, said))
    return found


def claims(text: str) -> list[Claim]:
    section, found = "", []
    for line in features(text)[1].splitlines():
        section = line.removeprefix("### ") if line.startswith("### ") else section
        if is_row(line):
            found += claims_of(line, section)
    return found


@cache
def functions_on_sources(file: Path) -> frozenset[str]:
    """The tests in a file that take the library's sources, as parameters or through fixtures of that file."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    arguments = {one.name: {argument.arg for argument in one.args.args} for one in functions}

    def on_sources(name: str) -> bool:
        return name in SOURCES or any(on_sources(one) for one in arguments.get(name, set()) - {name})

    return frozenset(name for name in arguments if name.startswith("test_") and on_sources(name))


def digest(folders: Iterable[str], root: Path = ROOT) -> str:
    """Of the files below `folders` (or of these files) that code is made of: the same in a clone and in an export."""
    of_all = hashlib.sha256()
    for folder in folders:
        path = root / folder
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and file.suffix in SUFFIXES and not file.is_symlink():
                name = file.relative_to(root).as_posix()
                of_all.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return of_all.hexdigest()[:16]


def recorded() -> dict[str, dict]:
    """What docs/evidence.json has, by tier."""
    return content().get("tiers", {})


def content() -> dict:
    """All of docs/evidence.json: the "tiers", and what mutate.py found ("mutants")."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def save(**parts: dict) -> None:
    """Writes parts of docs/evidence.json, the others stay; and the page anew."""
    whole = content() | parts
    text = json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False)
    RECORD.write_text(re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text) + "\n")
    PAGE.write_text(page(PAGE.read_text(), whole["tiers"], whole.get("mutants")))


def ran(name: str, place: Place, record: dict[str, dict]) -> tuple[int, int] | None:
    """How many tests of that name passed in a place, and how many ran; None where that is not known.

    `name` is a function, a file, or the name of a feature or cell, with `*` or without.
    """
    passed = total = 0
    unknown = False
    for tier in place.tiers:
        if "tests" not in (run := record.get(tier, {})):
            unknown = True
            continue
        for file, functions in run["tests"].items():
            for key, counts in functions.items():
                function, _, there = key.removesuffix("]").partition("[")
                if there not in ("", place.version) or not place.holds(file, function):
                    continue
                if fnmatchcase(function, name) or fnmatchcase(Path(file).name, name):
                    passed, total = passed + counts[0], total + sum(counts)
        for cell, counts in run["cells"].get(place.version, {}).items():
            if fnmatchcase(cell, name):
                passed, total = passed + counts[0], total + sum(counts)
    return None if unknown and not total else (passed, total)


def unproven(claim: Claim, record: dict[str, dict]) -> list[str]:
    """What a cell names and what did not run or did not pass in its place, though that place's tiers were run."""
    results = {name: ran(name, claim.place, record) for name in claim.tests}
    return [name for name, result in results.items() if result is not None and not 0 < result[0] == result[1]]


def mark(claim: Claim, record: dict[str, dict]) -> str:
    results = [ran(name, claim.place, record) for name in claim.tests]
    if not results:
        return ""
    known = [result for result in results if result is not None]
    passed, total = (sum(counts) for counts in zip(*known)) if known else (0, 0)
    parts = [f"{passed} passed" if passed == total else f"{passed} of {total} passed"] if known else []
    return MARK + ", ".join(parts + ["not recorded"] * (len(known) < len(results)))


def marked(line: str, record: dict[str, dict]) -> str:
    """A row with what its tests did behind each cell."""
    feature, *texts = (cell.partition(MARK)[0] for cell in cells_of(line))
    found = [text + mark(claim, record) for text, claim in zip(texts, claims_of(line, ""))]
    return f"| {' | '.join([feature, *found])} |"


def tier_rows(record: dict[str, dict]) -> list[str]:
    rows = ["| tier | date | commit | versions | passed | failed | skipped | minutes |", "|" + " --- |" * 8]
    for tier, run in sorted(record.items()):
        if "tests" in run:
            counts = run["counts"]
            versions = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))
            cells = [run["date"], run["commit"], versions, counts["passed"], counts["failed"], counts["skipped"]]
            rows.append(f"| {tier} | {' | '.join(map(str, cells))} | {run['seconds'] / 60:.1f} |")
        else:
            rows.append(f"| {tier} | not run: {run['not run']} |" + " |" * 6)
    return rows


def mutants_line(found: dict | None) -> str:
    """What the tests noticed of small changes of the code, in words."""
    if found is None:
        return "Mutants: not run"
    left = found["survived"] + found["equivalent"]
    return (
        f"[Mutants](../CONTRIBUTING.md#tests), {found['date']}, commit {found['commit']}: of {found['mutants']} small "
        f"changes of the code a test noticed {found['killed']}, and none did {left} ({left / found['mutants']:.1%}): "
        f"{found['equivalent']} that change nothing a test could see, each with the reason in `tools/equivalent.py`, "
        f"and {found['survived']} without a reason."
    )


def page(text: str, record: dict[str, dict], mutants: dict | None = None) -> str:
    """docs/evidence.md with what the record has in the places for it."""
    before, section, after = features(text)
    lines = [marked(line, record) if is_row(line) else line for line in section.split("\n")]
    head, _, rest = before.partition(BEGIN)
    written = "\n".join([BEGIN, "", *tier_rows(record), "", mutants_line(mutants), "", END])
    return head + written + rest.partition(END)[2] + "\n".join(lines) + after
