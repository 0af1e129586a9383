# SPDX-License-Identifier: Apache-2.0
"""Work of somebody else's making, such as a chat template, that may never end."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ..errors import SmolLM3Error

SECONDS = 10.0


class _Stopped(BaseException):
    """Raised in the thread whose time is up."""


def within(seconds: float, what: str, work: Callable[[], Any]) -> Any:
    """Returns what `work()` returns, or raises what it raises.

    Raises SmolLM3Error, which says `what`, where it takes longer; then the thread in which it runs is ended at its next
    step of Python.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome[:] = [work(), None]
        except BaseException as error:
            outcome[:] = [None, error]

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
        thread.join(1)
        raise SmolLM3Error(f"{what} takes longer than {seconds:g} s: it may never end")
    result, error = outcome
    if error is not None:
        raise error
    return result
