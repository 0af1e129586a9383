# SPDX-License-Identifier: Apache-2.0
"""Flax checkpoints as transformers' Flax classes write them: flax_model.msgpack, or several with an index.

Reference: flax.serialization. A file is a MessagePack map of maps down to arrays. An array is extension type 1, which
holds the packed triple of shape, name of the dtype and bytes in C order; a large one may be a map of flat arrays:
{"__msgpack_chunked_array__": true, "shape": {"0": n, ...}, "chunks": {"0": array, ...}}. The `kernel` of a dense layer
is [in, out], transposed against transformers' `weight`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import SmolLM3Error
from ...model.config import CheckpointConfig
from ...model.dtypes import MODEL_DTYPES
from ...model.json_files import read_json
from ..files import PREFIX, is_inside
from .foreign import ForeignCheckpoint, ForeignTensor, copy_beside, parser, read_bytes

SINGLE_FILE = "flax_model.msgpack"
INDEX_FILE = "flax_model.msgpack.index.json"
DTYPES = {name: getattr(torch, name) for name in MODEL_DTYPES}
NDARRAY = 1  # Flax's extension type
CHUNKED = "__msgpack_chunked_array__"
HEAD = 1024  # bytes; more than a map's head, a name or a shape takes
LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "weight": "weight", "bias": "bias"}


@dataclass(frozen=True)
class Array:
    """Where an array lies: `pieces` are (offset, size) in `path`, in order."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[int, int]]


def open_flax(folder: Path, config: CheckpointConfig) -> ForeignCheckpoint:
    """Opens the Flax checkpoint in `folder`, whose config.json is `config`; it reads headers only."""
    arrays: dict[str, Array] = {}
    for path in _files(folder):
        arrays |= _arrays(path)
    tensors = []
    for stored_name, array in arrays.items():
        *modules, leaf = stored_name.split("/")
        modules = modules[1:] if modules[:1] == ["params"] else modules
        name = ".".join([*modules, LEAVES.get(leaf, leaf)]).removeprefix(PREFIX)
        is_kernel = leaf == "kernel" and len(array.shape) == 2
        shape = array.shape[::-1] if is_kernel else array.shape

        def parts(array=array, is_kernel=is_kernel) -> Iterator[torch.Tensor]:
            tensor = read_bytes(array.path, array.pieces).view(array.dtype).reshape(array.shape)
            yield tensor.T.contiguous() if is_kernel else tensor

        tensors.append(ForeignTensor(name, stored_name, shape, array.dtype, parts))

    def write_beside(output: Path) -> list[str]:
        copy_beside(folder, output)
        return []

    return ForeignCheckpoint("Flax", folder, config, tensors, write_beside)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE]
    content = read_json(index, "download the file again")
    try:
        names = sorted(set(content["weight_map"].values()))
        outside = next((name for name in names if not is_inside(name)), None)
    except (KeyError, TypeError, AttributeError) as error:
        raise SmolLM3Error(f"{index}: not a weight index ({error!r}); download the file again") from None
    if outside is not None:
        raise SmolLM3Error(f"{index}: it names {outside!r}, which is not in its folder; download the file again")
    for name in names:
        if not (folder / name).is_file():
            raise SmolLM3Error(f"{folder / name}: missing, but {INDEX_FILE} names it; download it again")
    return [folder / name for name in names]


def _arrays(path: Path) -> dict[str, Array]:
    """Maps the paths of the file's arrays in its tree, joined with "/", to the arrays."""
    msgpack = parser("msgpack")
    try:
        with open(path, "rb") as file:
            cursor = _Cursor(path, file, msgpack.Unpacker)
            tree = cursor.tree()
            size = file.seek(0, 2)
            if cursor.offset != size:
                raise ValueError(f"{size - cursor.offset} bytes too many or too few")
    except (msgpack.UnpackException, ValueError, TypeError, IndexError) as error:
        if isinstance(error, SmolLM3Error):
            raise
        reason = str(error) or "it ends too early"
        raise SmolLM3Error(f"{path}: not a whole Flax checkpoint ({reason}); download it again") from None
    return dict(_flat(path, tree, ""))


def _flat(path: Path, tree: Any, name: str) -> Iterator[tuple[str, Array]]:
    if isinstance(tree, Array):
        yield name, tree
    elif isinstance(tree, dict) and CHUNKED in tree:
        yield name, _joined(path, tree, name)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(path, value, f"{name}/{key}" if name else str(key))
    else:
        raise SmolLM3Error(f"{path}: {name or 'the whole of it'} is {tree!r}, a Flax checkpoint holds arrays")


def _joined(path: Path, tree: dict[str, Any], name: str) -> Array:
    try:
        shape = tuple(tree["shape"][str(dim)] for dim in range(len(tree["shape"])))
        chunks = [tree["chunks"][str(number)] for number in range(len(tree["chunks"]))]
        array = Array(path, shape, chunks[0].dtype, [piece for chunk in chunks for piece in chunk.pieces])
        whole = math.prod(shape) == sum(math.prod(chunk.shape) for chunk in chunks)
        if not whole or {chunk.dtype for chunk in chunks} != {array.dtype}:
            raise ValueError("its chunks are not the array")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise SmolLM3Error(f"{path}: {name} is not a whole chunked array ({error}); download it again") from None
    return array


class _Cursor:
    """Walks a file without reading its arrays: msgpack parses the heads, arrays are skipped over."""

    def __init__(self, path: Path, file: Any, unpacker: type):
        self.path, self.file, self.unpacker, self.offset = path, file, unpacker, 0

    def tree(self) -> Any:
        """Takes the value at the cursor: a dict of values, an Array, or what msgpack makes of it."""
        first = self._peek()[:1]
        if first[0] & 0xF0 == 0x80 or first in (b"\xde", b"\xdf"):  # a map
            return {self._take("unpack"): self.tree() for _ in range(self._take("read_map_header"))}
        if first in (b"\xc7", b"\xc8", b"\xc9") or 0xD4 <= first[0] <= 0xD8:  # an extension type
            return self._array(first[0])
        return self._take("unpack")

    def _array(self, first: int) -> Array:
        size, head = (1 << first - 0xD4, 1) if first >= 0xD4 else self._sized(first - 0xC7)
        kind = self._peek()[head]
        self.offset += head + 1
        end = self.offset + size
        if kind != NDARRAY or self._take("read_array_header") != 3:
            raise ValueError(f"extension type {kind} at byte {self.offset}")
        shape, dtype = tuple(self._take("unpack")), self._take("unpack")
        if dtype not in DTYPES:
            raise SmolLM3Error(f"{self.path}: an array is {dtype!r}, allowed is {' or '.join(map(repr, DTYPES))}")
        count, head = self._sized(self._peek()[0] - 0xC4)  # bin 8, 16, 32
        self.offset += head
        if count != math.prod(shape) * DTYPES[dtype].itemsize or self.offset + count != end:
            raise ValueError(f"{count} bytes for an array of shape {shape} at byte {self.offset}")
        array = Array(self.path, shape, DTYPES[dtype], [(self.offset, count)])
        self.offset = end
        return array

    def _sized(self, power: int) -> tuple[int, int]:
        """Returns a length, which is 1, 2 or 4 bytes behind the type byte, and how many bytes both take."""
        if power not in (0, 1, 2):
            raise ValueError(f"no array at byte {self.offset}")
        return int.from_bytes(self._peek()[1 : 1 + (1 << power)], "big"), 1 + (1 << power)

    def _take(self, method: str) -> Any:
        unpacker = self.unpacker(raw=False, strict_map_key=False)
        unpacker.feed(self._peek())
        value = getattr(unpacker, method)()
        self.offset += unpacker.tell()
        return value

    def _peek(self) -> bytes:
        self.file.seek(self.offset)
        head = self.file.read(HEAD)
        if not head:
            raise ValueError("it ends too early")
        return head
