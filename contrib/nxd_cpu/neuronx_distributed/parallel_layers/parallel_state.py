# SPDX-License-Identifier: Apache-2.0
"""The tensor parallel group. It has a size; which rank one is depends on the thread."""

import contextlib
from collections.abc import Iterator

from neuronx_distributed._cpu import ThreadGroup

_group: ThreadGroup | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
) -> None:
    """Layers made from now on are parts of a model of `tensor_model_parallel_size` ranks."""
    if max(pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size) > 1:
        raise NotImplementedError("the CPU runtime does not support pipeline, context and expert parallelism")
    global _group
    _group = ThreadGroup(tensor_model_parallel_size)


def destroy_model_parallel() -> None:
    global _group
    _group = None


def model_parallel_is_initialized() -> bool:
    return _group is not None


def get_tensor_model_parallel_group(as_list: bool = False) -> ThreadGroup | list[list[int]]:
    """The group, or with `as_list` its ranks. AssertionError before `initialize_model_parallel`."""
    assert _group is not None, "tensor model parallel group is not initialized"
    return [list(range(_group.size()))] if as_list else _group


@contextlib.contextmanager
def _model_parallel(tensor_model_parallel_size: int) -> Iterator[None]:
    """Layers made inside are parts of a model of that many ranks; then all is as it was."""
    global _group
    before = _group
    initialize_model_parallel(tensor_model_parallel_size)
    try:
        yield
    finally:
        _group = before
