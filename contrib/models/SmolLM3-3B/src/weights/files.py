# SPDX-License-Identifier: Apache-2.0
"""The names of the files that hold weights, and the prefix of the names in them. Imports no torch."""

from pathlib import PurePosixPath

INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint; says which file holds which tensor
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"  # of a rank, as NxD Inference names it
PREFIX = "model."  # of every tensor's name in a checkpoint but lm_head.weight's


def is_inside(name: str) -> bool:
    """Returns whether a file of this name stays in its folder: it is relative and has no `..` and no NUL."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
