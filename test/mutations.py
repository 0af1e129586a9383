"""Seeded mutations of the files that a user may bring, and what becomes of each; used by test_fuzz_*.py."""

import contextlib
import json
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from smollm3_neuron.errors import SmolLM3Error

SECONDS = 10  # of computing; what takes more is a hang, and so is what waits for ever
WAITING = 20  # times as long, since the machine may be busy with something else
ODD = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**40, 2**63, -(2**70), 10**400, 0.5, -0.5, 1e-45, 1e308, 1.5, "", "x",
    "0", "5", "null", "../../x", "/etc/hostname", "a\0b", "\n", "\ud800", "ü", "a" * 300, "{{ 1 / 0 }}", [], {}, [None],
    [0], [-1], [[1]], ["x", 5], [1e308], {"a": 1}, {"": None}, {"content": "x"}, float("nan"), float("inf"),
]  # fmt: skip


class Hang(BaseException):
    """Raised where a function takes longer than it may."""


def cases(seed: str, count: int) -> Iterator[random.Random]:
    """Yields a generator of its own for each case, so that one can be had again alone."""
    for number in range(count):
        yield random.Random(f"{seed} {number}")


def changed(
    rng: random.Random, value: Any, keys: tuple[str, ...] = (), pools: dict[str, Callable] | None = None
) -> Any:
    """Returns a copy of a JSON object with one to three changes anywhere in it.

    `keys` are names that may be added; `pools` has, for a name, what draws a value that is likely for it.
    """
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        if pools and rng.random() < 0.8:
            name = rng.choice(sorted(pools))
            value[name] = pools[name](rng)
        else:
            value = _change(rng, value, keys)
    return value


def _change(rng: random.Random, value: Any, keys: tuple[str, ...]) -> Any:
    node = value
    while isinstance(node, dict | list) and node:
        name = rng.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[name], dict | list) or not node[name] or rng.random() < 0.5:
            break
        node = node[name]
    if not isinstance(node, dict | list) or not node:
        return rng.choice(ODD)
    kind = rng.randrange(6)
    if kind == 0 and isinstance(node, dict) and keys:
        node[rng.choice(keys)] = rng.choice(ODD)
    elif kind == 1:
        del node[name]
    elif kind == 2 and type(node[name]) in (int, float):
        node[name] = rng.choice((-node[name], node[name] + 1, node[name] * 2, node[name] * 10**6, str(node[name])))
    elif kind == 3:
        node[name] = [node[name]]
    elif kind == 4 and isinstance(node, dict):
        node[rng.choice(sorted(node))] = node[name]
    else:
        node[name] = rng.choice(ODD)
    return value


def of(*values: Any) -> Callable[[random.Random], Any]:
    """Returns what draws one of `values`, for a pool."""
    return lambda rng: rng.choice(values)


def written(value: Any) -> bytes:
    """Returns the JSON of a value as a damaged writer may leave it: halves of characters and NaN included."""
    return json.dumps(value).encode()


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Returns the bytes with one fault, as of a disk, a network or an editor."""
    place = rng.randrange(len(content) + 1)
    end = min(len(content), place + rng.randrange(1, 40))
    return rng.choice(
        (
            content[:place],
            content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
            content[:place] + content[end:],
            content[:end] + content[place:],
            content[:place] + b"\xff\xfe" + content[place:],
            content[:place] + b"NaN" + content[end:],
            content[:place] + b"9" * 5000 + content[place:],
            content[:place] + b"[" * 100_000 + content[place:],
            b"\xef\xbb\xbf" + content,
            content[::-1],
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"[" * 100_000,
            b'{"a":' * 100_000,
        )
    )


class Outcomes:
    """Counts what became of mutations. `faults` are those that are wrong, each with how it can be had again."""

    def __init__(self, name: str):
        self.name, self.counts, self.faults = name, Counter(), []

    @property
    def figures(self) -> str:
        """One line for a report."""
        counts = {kind: self.counts[kind] for kind in ("accepted", "refused", "traceback", "hang", "differs")}
        more = {kind: count for kind, count in self.counts.items() if kind not in counts}
        return f"{self.name}: " + ", ".join(f"{count} {kind}" for kind, count in (counts | more).items())

    def of(self, work: Callable[[], Any], shown: Any) -> Any:
        """Runs a function: what it returns, or None where it was refused, by one line, or is at fault."""
        try:
            with limit():
                result = work()
        except SmolLM3Error as error:
            if "\n" in str(error) or len(str(error)) > 1100:
                self.fault("traceback", f"not one line of a length to read: {error}", shown)
            self.counts["refused"] += 1
            return None
        except Hang:
            self.fault("hang", "", shown)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.fault("traceback", f"{error!r:.300} ({frame.filename}:{frame.lineno})", shown)
        else:
            self.counts["accepted"] += 1
            return result
        return None

    def fault(self, kind: str, what: str, shown: Any) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {what}: {shown!r:.1500}")


@contextlib.contextmanager
def limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raises Hang in the block when its time is up."""

    def stop(signum: int, frame: Any) -> None:
        raise Hang

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, WAITING * seconds)}
    before, began = {number: signal.signal(number, stop) for number in timers}, time.process_time()
    try:
        for timer, after in timers.values():
            signal.setitimer(timer, after)
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
    if time.process_time() - began > seconds:
        raise Hang


def check(outcomes: Outcomes, capsys) -> None:
    """Prints the figures and fails where there are faults."""
    with capsys.disabled():
        print(f"\n{outcomes.figures}")
    assert outcomes.faults == [], "\n".join(outcomes.faults[:20])
