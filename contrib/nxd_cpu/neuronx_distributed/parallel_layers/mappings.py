# SPDX-License-Identifier: Apache-2.0
"""The collectives by NxD's names. A group of one rank leaves no trace in the graph."""

from neuronx_distributed._cpu import ThreadGroup, all_gather, all_reduce
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_group


def _size(process_group: ThreadGroup | None) -> int:
    return (process_group or get_tensor_model_parallel_group()).size()


def reduce_from_tensor_model_parallel_region(input_, process_group: ThreadGroup | None = None):
    """The sum over the ranks."""
    size = _size(process_group)
    return all_reduce(input_, size) if size > 1 else input_


def gather_from_tensor_model_parallel_region(input_, process_group: ThreadGroup | None = None):
    """The ranks' tensors joined along the last dimension."""
    size = _size(process_group)
    return all_gather(input_, input_.dim() - 1, size) if size > 1 else input_
