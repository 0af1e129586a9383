# SPDX-License-Identifier: Apache-2.0
"""Work done side by side in processes that are forks of this one, so that nothing is handed to them or loaded again."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_MEMORY = 1 << 30  # that a C++ compiler and torch's own compiler take, at most


def side_by_side(jobs: Mapping[str, Callable[[], Any]], on_done: Callable[[str], None]) -> None:
    """Run every job, as many at a time as there are cores and memory for. `on_done` is called with its name after each.

    RuntimeError of the same text if a job raises one, or says what else it raises; also if its process is
    killed. The others are ended.
    """
    context, waiting, running = multiprocessing.get_context("fork"), dict(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < _at_once():
                name = next(iter(waiting))
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(waiting.pop(name), sender))
                process.start()
                sender.close()
                running[receiver] = name, process
            for receiver in wait(list(running)):
                name, process = running[receiver]
                _check(receiver, process)
                del running[receiver]
                on_done(name)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _run(job: Callable[[], Any], sender: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the process that was forked are not in this one
    try:
        job()
    except Exception as error:
        sender.send(str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}")
    else:
        sender.send(None)


def _check(receiver: Connection, process: Any) -> None:
    try:
        fault = receiver.recv()
    except EOFError:
        fault = "a process of the compile was ended"
    process.join()
    if fault:
        raise RuntimeError(fault)


def _at_once() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return max(1, min(len(os.sched_getaffinity(0)), free // _MEMORY))
