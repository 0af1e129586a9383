# SPDX-License-Identifier: Apache-2.0
"""What each format's reader returns: a configuration, tensors under transformers' names, and the files beside them."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ...errors import SmolLM3Error
from ...model.config import CheckpointConfig

BESIDE = ("*.json", "*.jinja", "*.txt")  # configuration and tokenizer, whatever a version of transformers names them


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor: `name` is transformers' without the prefix `model.`, `stored_name` is the file's own, for messages.

    `parts()` reads it: contiguous tensors of `dtype` which, one after the other, are the rows of `shape`. At most two
    copies of the tensor are in memory at any time.
    """

    name: str
    stored_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint whose headers were read.

    `write_beside(folder)` writes config.json and the tokenizer, and returns lines that a user must know.
    """

    format_name: str
    path: Path
    config: CheckpointConfig
    tensors: list[ForeignTensor]
    write_beside: Callable[[Path], list[str]]


def parser(module: str) -> ModuleType:
    """Imports the package that parses a format, which is no dependency of the model."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise SmolLM3Error(
            f"the package {module} is not installed, which reads this format: run `pip install {module}`"
        ) from None


def read_bytes(path: Path, pieces: list[tuple[int, int]]) -> torch.Tensor:
    """Reads `pieces`, each (offset, size) in the file, as one uint8 tensor."""
    data = torch.empty(sum(size for _, size in pieces), dtype=torch.uint8)
    view, position = memoryview(data.numpy()), 0
    with open(path, "rb", buffering=0) as file:
        for offset, size in pieces:
            file.seek(offset)
            while size:
                count = file.readinto(view[position : position + size])
                if not count:
                    raise SmolLM3Error(f"{path}: ends before its last tensor does; download it again")
                position, size = position + count, size - count
    return data


def copy_beside(source: Path, folder: Path) -> None:
    """Copies configuration and tokenizer; an index of weights is of the weights that are not copied."""
    for pattern in BESIDE:
        for file in sorted(source.glob(pattern)):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
