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
    """Run every job, in as many processes as there are cores and memory for. `on_done` is called with each job's name.

    Each process has its share, so that what torch prepares for its first job is prepared once. RuntimeError of the same
    text if a job raises one, or says what else it raises; also if a process is killed. The others are ended.
    """
    context, names, count = multiprocessing.get_context("fork"), list(jobs), _at_once()
    running = {}
    try:
        for share in filter(None, (names[first::count] for first in range(count))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=({name: jobs[name] for name in share}, sender))
            process.start()
            sender.close()
            running[receiver] = share, process
        while running:
            for receiver in wait(list(running)):
                left, process = running[receiver]
                on_done(_done(receiver))
                del left[0]
                if not left:
                    process.join()
                    del running[receiver]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _run(jobs: Mapping[str, Callable[[], Any]], sender: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the process that was forked are not in this one
    for name, job in jobs.items():
        fault = None
        try:
            job()
        except Exception as error:
            fault = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        sender.send((name, fault))


def _done(receiver: Connection) -> str:
    try:
        name, fault = receiver.recv()
    except EOFError:
        name, fault = "", "a process of the compile was ended"
    if fault:
        raise RuntimeError(fault)
    return name


def _at_once() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return max(1, min(len(os.sched_getaffinity(0)), free // _MEMORY))
