# SPDX-License-Identifier: Apache-2.0
"""One caller at a time: a loaded model has one KV cache."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import SmolLM3Error


@contextlib.contextmanager
def turn(model: Any) -> Iterator[None]:
    """Waits until no other thread has the model's turn, and has it until the block ends.

    Raises SmolLM3Error where this thread has it already, as in a callback: it would wait for itself.
    """
    lock = model.__dict__.setdefault("_turn", threading.RLock())
    with lock:
        if model.__dict__.get("_is_busy"):
            raise SmolLM3Error("the model is in the middle of an answer to this caller: ask again after it")
        model.__dict__["_is_busy"] = True
        try:
            yield
        finally:
            model.__dict__["_is_busy"] = False
