# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads, and the collectives in which they meet.

A collective is a custom op, so it is exported, saved and loaded with the graph. At run time it finds its rank and its
partners through a thread-local: nothing in a graph knows which rank runs it.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_this_thread = threading.local()


class ThreadGroup:
    """What stands for a torch ProcessGroup: a number of ranks, of which the calling thread may be one."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return getattr(_this_thread, "rank", 0)


class _Meeting:
    """Where the ranks of one model exchange tensors. Two sets of slots in turn make one barrier per exchange enough:
    no rank can reach the next but one exchange before all have left this one."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots = ([None] * size, [None] * size)

    @contextlib.contextmanager
    def attend(self, rank: int) -> Iterator[None]:
        before = dict(_this_thread.__dict__)
        _this_thread.__dict__.update(meeting=self, rank=rank, turn=0)
        try:
            yield
        finally:
            _this_thread.__dict__.clear()
            _this_thread.__dict__.update(before)


def _exchange(tensor: Tensor, size: int) -> list[Tensor]:
    """The tensors of all ranks, in rank order."""
    meeting = getattr(_this_thread, "meeting", None)
    if meeting is None or meeting.size != size:
        raise RuntimeError(f"a collective of {size} ranks needs RankThreads({size}) to run in")
    slots = meeting.slots[_this_thread.turn % 2]
    _this_thread.turn += 1
    slots[_this_thread.rank] = tensor
    meeting.barrier.wait()
    return list(slots)


@torch.library.custom_op("nxd_cpu::all_reduce", mutates_args=())
def all_reduce(x: Tensor, size: int) -> Tensor:
    """The sum over the ranks, always added in rank order, so that every rank has the same bits."""
    first, *rest = _exchange(x, size)
    total = first.clone(memory_format=torch.contiguous_format)
    for part in rest:
        total += part
    return total


@all_reduce.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("nxd_cpu::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, size: int) -> Tensor:
    """The ranks' tensors joined along `dim` in rank order."""
    return torch.cat(_exchange(x, size), dim)


@all_gather.register_fake
def _(x: Tensor, dim: int, size: int) -> Tensor:
    return torch.cat([x] * size, dim)


def _serve(jobs: queue.SimpleQueue, rank: int) -> None:
    while (job := jobs.get()) is not None:
        work, meeting, threads, results = job
        torch.set_num_threads(max(1, threads // meeting.size))
        try:
            with meeting.attend(rank), torch.no_grad():
                results.put((rank, work(rank), None))
        except BaseException as error:
            meeting.barrier.abort()
            results.put((rank, None, error))
        del job, work, meeting, results  # a thread that waits for its next job must not keep the model alive


class RankThreads:
    """`size` ranks. Their threads live as long as this object; one rank needs none and runs in the caller's."""

    def __init__(self, size: int):
        self.size = size
        self._lock = threading.Lock()
        self._jobs = [queue.SimpleQueue() for _ in range(size)] if size > 1 else []
        for rank, jobs in enumerate(self._jobs):
            threading.Thread(target=_serve, args=(jobs, rank), name=f"nxd_cpu rank {rank}", daemon=True).start()
        weakref.finalize(self, lambda queues: [jobs.put(None) for jobs in queues], self._jobs)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` on every rank; the results in rank order. The first error that a rank raised is raised here."""
        meeting = _Meeting(self.size)
        if self.size == 1:
            with meeting.attend(0), torch.no_grad():
                return [work(0)]
        results: queue.SimpleQueue = queue.SimpleQueue()
        with self._lock:
            threads = torch.get_num_threads()
            for jobs in self._jobs:
                jobs.put((work, meeting, threads, results))
            try:
                done = [results.get() for _ in self._jobs]
            except BaseException:  # an interrupt: leave no rank behind in a collective
                meeting.barrier.abort()
                raise
            torch.set_num_threads(threads)  # a part of what the ranks set is global to the process
        errors = [error for _, _, error in done if error is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [result for _, result, _ in sorted(done, key=lambda item: item[0])]


@contextlib.contextmanager
def weights_on_meta() -> Iterator[None]:
    """Parallel layers and caches made here have shapes but no memory."""
    _this_thread.weight_device = "meta"
    try:
        yield
    finally:
        del _this_thread.weight_device


def weight_device() -> str:
    return getattr(_this_thread, "weight_device", "cpu")


def refuse(**options: Any) -> None:
    """Raise for every option whose value is true: a part of NxD that this runtime leaves out."""
    for name, value in options.items():
        if value:
            raise NotImplementedError(f"the CPU runtime does not support {name}={value!r}")
