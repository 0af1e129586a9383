# SPDX-License-Identifier: Apache-2.0
"""The names of the files that hold weights, and the prefix of the names in them. Imports no torch."""

from pathlib import Path, PurePosixPath

from ..errors import SmolLM3Error

INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint; says which file holds which tensor
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"  # of a rank, as NxD Inference names it
PREFIX = "model."  # of every tensor's name in a checkpoint but lm_head.weight's
DRAFT, VERIFIER = "draft_model.", "target_model."  # of every tensor's name in a rank's file that holds two models

LONGEST_PART, LONGEST_PATH = 255, 2048  # bytes of a file's name, and of one in folders


def is_inside(name: str) -> bool:
    """Returns whether a file of this name can be in its folder and stays there.

    It is relative, has no `..` and no NUL, and no part of it is longer than a file system takes.
    """
    path = PurePosixPath(name)
    is_short = len(name.encode()) < LONGEST_PATH and all(len(part.encode()) <= LONGEST_PART for part in path.parts)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name and is_short


def expanded(name: str | Path) -> Path:
    """Returns the path with its `~` replaced. Raises SmolLM3Error where it names a user that is not there."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SmolLM3Error(f"{name}: {error} Write the whole path") from None
