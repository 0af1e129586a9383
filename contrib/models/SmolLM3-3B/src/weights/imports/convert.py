# SPDX-License-Identifier: Apache-2.0
"""Makes a folder of safetensors of a Flax or GGUF checkpoint, with the memory of a few tensors."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import SmolLM3Error
from ...model.config import read_config_file
from ..checkpoint import expected_shapes
from ..files import PREFIX, SINGLE_FILE, expanded
from ..shard_writer import safetensors_header
from . import flax
from .flax import open_flax
from .foreign import ForeignCheckpoint, ForeignTensor
from .gguf import open_gguf

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Imported:
    """What was written: `notes` are lines that a user must know."""

    format_name: str
    tensors: int
    parameters: int
    size: int
    notes: list[str]


def import_checkpoint(
    source: str | Path, folder: str | Path, on_bytes: Callable[[int, int], None] = lambda count, total: None
) -> Imported:
    """Writes `source`, a .gguf file or a folder that holds a Flax or GGUF checkpoint, to the new folder `folder`.

    Every tensor keeps its dtype (float32, float16, bfloat16); a quantized one becomes bfloat16. `on_bytes` is called
    with the count just written and the total. Memory: two copies of the largest tensor, and at most 1 GB. Raises
    SmolLM3Error for what is not a whole SmolLM3 checkpoint, and then `folder` is as it was.
    """
    source, folder = expanded(source), expanded(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SmolLM3Error(f"{folder}: there is something already; name a folder that does not exist")
    checkpoint = _open(source)
    tensors = _checked(checkpoint)
    total = sum(_size(tensor) for tensor in tensors)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as staging:
            output = Path(staging) / "checkpoint"
            output.mkdir()
            notes = checkpoint.write_beside(output)
            _write(tensors, output / SINGLE_FILE, lambda count: on_bytes(count, total))
            output.rename(folder)
    except OSError as error:
        raise SmolLM3Error(f"{error.filename or folder}: {error.strerror}; nothing was written to {folder}") from error
    return Imported(checkpoint.format_name, len(tensors), sum(_count(tensor) for tensor in tensors), total, notes)


def _open(source: Path) -> ForeignCheckpoint:
    if source.is_file():
        if source.suffix == ".gguf":
            return open_gguf(source, None)
        raise SmolLM3Error(
            f"{source}: pass a .gguf file, or the folder of a Flax or GGUF checkpoint with its config.json"
        )
    if not source.is_dir():
        raise SmolLM3Error(f"{source}: no such file or folder; pass a .gguf file, or the folder of a checkpoint")
    if next(source.glob("*.safetensors"), None) is not None:
        raise SmolLM3Error(
            f"{source}: it holds safetensors, which need no import; pass it to scripts/compile.py --model"
        )
    if (source / flax.INDEX_FILE).is_file() or (source / flax.SINGLE_FILE).is_file():
        return open_flax(source, read_config_file(source / "config.json"))
    files = sorted(source.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0], source)
    if files:
        names = ", ".join(file.name for file in files)
        raise SmolLM3Error(f"{source}: {len(files)} GGUF files are there, name one of them: {names}")
    raise SmolLM3Error(f"{source}: neither {flax.SINGLE_FILE}, {flax.INDEX_FILE} nor a .gguf file is there")


def _checked(checkpoint: ForeignCheckpoint) -> list[ForeignTensor]:
    """Returns the tensors, widest dtype first so that each is aligned.

    Raises SmolLM3Error where they are not those that the config asks for.
    """
    expected = expected_shapes(checkpoint.config)
    by_name: dict[str, ForeignTensor] = {}
    for tensor in checkpoint.tensors:
        if tensor.name in by_name:
            raise SmolLM3Error(
                f"{checkpoint.path}: {tensor.stored_name} is {by_name[tensor.name].stored_name} once more"
            )
        if tensor.name not in (*expected, HEAD):
            raise SmolLM3Error(
                f"{checkpoint.path}: {tensor.stored_name} is no tensor of a SmolLM3 with this configuration"
            )
        by_name[tensor.name] = tensor
    for name, shape in expected.items():
        if name not in by_name:
            missing = [other for other in expected if other not in by_name]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SmolLM3Error(f"{checkpoint.path}: {name} is missing{more}; it does not fit its configuration")
        if by_name[name].shape != shape:
            raise SmolLM3Error(
                f"{checkpoint.path}: {by_name[name].stored_name} has shape {by_name[name].shape} as {name}, its "
                f"configuration asks for {shape}"
            )
    return sorted(by_name.values(), key=lambda tensor: -tensor.dtype.itemsize)


def _count(tensor: ForeignTensor) -> int:
    return torch.Size(tensor.shape).numel()


def _size(tensor: ForeignTensor) -> int:
    return _count(tensor) * tensor.dtype.itemsize


def _write(tensors: list[ForeignTensor], path: Path, on_bytes: Callable[[int], None]) -> None:
    names: list[tuple[str, Any, Any]] = [
        (tensor.name if tensor.name == HEAD else PREFIX + tensor.name, tensor.dtype, tensor.shape) for tensor in tensors
    ]
    with open(path, "wb") as file:
        file.write(safetensors_header(names, {"format": "pt"}))
        for tensor in tensors:
            for part in tensor.parts():
                data = memoryview(part.view(torch.uint8).numpy()).cast("B")
                file.write(data)
                on_bytes(len(data))
