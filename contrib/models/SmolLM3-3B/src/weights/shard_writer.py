# SPDX-License-Identifier: Apache-2.0
"""The streaming sharder: from the checkpoint's safetensors to the ranks' shard files, a few MB at a time.

It writes what NxD Inference's own sharder would write, byte for byte (names, padding, head layouts, order in the file),
without ever holding the model: tensors stay on the mapped source files, and each rank's file is written once, in order.
"""

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..errors import SmolLM3Error
from ..model.config import CheckpointConfig
from ..model.dtypes import DTYPES, QUANTIZATION_DTYPES
from .adapter import Adapter
from .checkpoint import COMPARED_ROWS, check_checkpoint
from .files import DRAFT, PREFIX, SHARD_FILE, VERIFIER
from .finite import is_finite
from .lazy_rows import QuantizedRows
from .padding import PaddedRows
from .projections import PROJECTIONS
from .quantization import is_quantized, quantized_linears, with_scales
from .rank_layout import Output, Part, rank_outputs

CHUNK = 1 << 20  # bytes; small enough that the checksum reads from the cache what was just converted
DTYPE_NAMES = {getattr(torch, name): dtype.safetensors_name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Model:
    """A checkpoint's folder, its config, and the NeuronConfig that it is sharded for."""

    folder: str | Path
    config: CheckpointConfig
    neuron_config: Any


def write_shards(
    folder: str | Path,
    config: CheckpointConfig,
    neuron_config: Any,
    output: str | Path,
    on_bytes: Callable[[int], None] = lambda count: None,
    adapter: Adapter | None = None,
    draft: Model | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes every rank's shard file to `output`, with `adapter` merged and quantized as the neuron config asks for.

    With a `draft` each file holds both models, with the library's prefixes before their names.

    Returns the files' entries in an artifact's manifest: "weights/" and the file's name, mapped to {"size", "crc32",
    "header": {"size", "sha256"}}. A CRC-32 tells any flipped byte, and takes a quarter of the copy's time where a
    SHA-256 takes three times as much. `on_bytes` is called with counts of bytes as they are written, from several
    threads. Raises SmolLM3Error for a checkpoint that does not fit and for NaN or infinity among what would be written,
    and OSError where the disk does not take it.
    """
    model = Model(folder, config, neuron_config)
    sources = {prefix: _Source(of, adapter if of is model else None) for prefix, of in _models(model, draft).items()}
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    # as many at once as there are cores: a rank's time is its copy's
    with ThreadPoolExecutor(min(os.cpu_count() or 1, neuron_config.tp_degree)) as pool:
        ranks = range(neuron_config.tp_degree)
        return dict(pool.map(lambda rank: _write_rank(sources, rank, output, on_bytes), ranks))


def shard_bytes(config: CheckpointConfig, neuron_config: Any, draft: Model | None = None) -> int:
    """Counts the bytes of all shard files' tensors, for a progress bar."""
    models, ranks = _models(Model("", config, neuron_config), draft), range(neuron_config.tp_degree)
    return sum(_nbytes(output, dtype) for rank in ranks for _, output, dtype in _in_order(models, rank))


def _models(model: Model, draft: Model | None) -> dict[str, Model]:
    """Maps the prefix of its names to each model that a rank holds."""
    return {"": model} if draft is None else {DRAFT: draft, VERIFIER: model}


def _in_order(models: Mapping[str, Any], rank: int) -> list[tuple[str, Output, torch.dtype]]:
    """Lists a rank's tensors with their models' prefixes and their dtypes.

    The order is the safetensors library's: widest dtype first, then by name.
    """
    typed = [
        (prefix, output, dtype)
        for prefix, model in models.items()
        for output, dtype in _outputs(model.config, model.neuron_config, rank)
    ]
    return sorted(typed, key=lambda entry: (-entry[2].itemsize, not entry[1].parts, entry[0] + entry[1].name))


def _outputs(config: CheckpointConfig, neuron_config: Any, rank: int) -> list[tuple[Output, torch.dtype]]:
    """Lists a rank's tensors of a model with their dtypes, in no order."""
    outputs = rank_outputs(
        config.padded(neuron_config),
        rank,
        neuron_config.tp_degree,
        fused_qkv=neuron_config.fused_qkv,
        vocab_parallel=neuron_config.vocab_parallel,
    )
    linears = quantized_linears(config, neuron_config)
    typed = []
    for output in with_scales(outputs, linears, neuron_config.quantization_type == "per_channel_symmetric"):
        if not output.parts:
            dtype = torch.int32
        elif is_quantized(output, linears):
            dtype = getattr(torch, QUANTIZATION_DTYPES[neuron_config.quantization_dtype])
        else:
            dtype = torch.float32 if output.name.endswith(".scale") else neuron_config.torch_dtype
        typed.append((output, dtype))
    return typed


def _write_rank(
    sources: dict[str, "_Source"], rank: int, folder: Path, on_bytes: Callable[[int], None]
) -> tuple[str, dict[str, Any]]:
    """Writes the rank's file and returns its name and entry, see `write_shards`."""
    outputs = _in_order(sources, rank)
    path = folder / SHARD_FILE.format(rank=rank)
    crc32 = 0
    with open(path, "wb", buffering=0) as file:

        def write(data: Any) -> None:
            nonlocal crc32
            view = memoryview(data).cast("B")
            crc32 = zlib.crc32(view, crc32)
            written = 0
            while written < len(view):
                written += file.write(view[written:])
            on_bytes(len(view))

        header = safetensors_header((prefix + output.name, dtype, output.shape) for prefix, output, dtype in outputs)
        write(header)
        for prefix, output, dtype in outputs:
            source = sources[prefix]
            if not output.parts:
                write(torch.tensor([rank], dtype=torch.int32).numpy())
            for part in output.parts:
                for chunk in _chunks(source[part.source], part, dtype):
                    if not is_finite(chunk):
                        raise source.not_finite(part.source, dtype)
                    write(chunk.view(torch.uint8).numpy())
        size = file.tell()
    header_entry = {"size": len(header), "sha256": hashlib.sha256(header).hexdigest()}
    return f"weights/{path.name}", {"size": size, "crc32": crc32, "header": header_entry}


class _Source:
    """The checkpoint's tensors by their names without prefix, on the mapped files: merged and quantized row by row."""

    def __init__(self, model: Model, adapter: Adapter | None):
        config, neuron_config = model.config, model.neuron_config
        files = self.files = check_checkpoint(model.folder, config)
        self.names = {name.removeprefix(PREFIX): name for name in files}
        if config.tie_word_embeddings:
            self.names["lm_head.weight"] = self.names["embed_tokens.weight"]
        self.open = {file: safe_open(file, framework="pt") for file in set(files.values())}
        self.config, self.neuron_config, self.adapter = config, neuron_config, adapter
        self.linears = quantized_linears(config, neuron_config)
        self.quantized: dict[str, QuantizedRows] = {}
        self.lock = threading.Lock()

    def __getitem__(self, name: str) -> Any:
        linear, _, kind = name.rpartition(".")
        if linear not in self.linears or kind == "bias":
            return self._merged(name, self.neuron_config.torch_dtype)
        with self.lock:  # the scales are computed once for all ranks
            if linear not in self.quantized:
                weight = self._merged(f"{linear}.weight", torch.float32)
                self.quantized[linear] = QuantizedRows(
                    weight, self.neuron_config.quantization_type, self.neuron_config.quantization_dtype
                )
        return self.quantized[linear] if kind == "weight" else self.quantized[linear].scale

    def not_finite(self, name: str, dtype: torch.dtype) -> SmolLM3Error:
        """Says of a tensor that came out with NaN or infinity where they come from."""
        linear, _, kind = name.rpartition(".")
        name = self.names[f"{linear}.weight" if kind == "scale" else name]
        file = self.files[name]
        tensor = self.open[file].get_tensor(name)
        if not all(is_finite(rows) for rows in tensor.contiguous().split(COMPARED_ROWS)):
            return SmolLM3Error(f"{file}: {name} has NaN or infinity among its values; download it again")
        if self.adapter is not None:
            return SmolLM3Error(f"{self.adapter.folder}: merged into {name} it gives NaN or infinity; copy it again")
        dtype_name = str(dtype).removeprefix("torch.")
        return SmolLM3Error(f"{file}: {name} has values that are too large for {dtype_name}; take another --dtype")

    def _merged(self, name: str, dtype: torch.dtype) -> Any:
        stored_name = self.names[name]
        tensor = self.open[self.files[stored_name]].get_tensor(stored_name)
        if self.adapter is not None:
            tensor = self.adapter.merged(name, tensor, dtype)
        return self._padded(name, tensor)

    def _padded(self, name: str, tensor: Any) -> Any:
        """Pads a tensor of an MLP with zeros to `padded_intermediate_size`; returns any other as it is."""
        size = self.config.padded(self.neuron_config).intermediate_size
        if size == self.config.intermediate_size:
            return tensor
        for projection in PROJECTIONS:
            has_size = name.endswith(f"{projection.name}.weight") or (
                projection.cut_dim == 0 and name.endswith(f"{projection.name}.bias")
            )
            if has_size and projection.cut_features == "intermediate_size":
                return PaddedRows(tensor, projection.cut_dim, size)
        return tensor


def _chunks(tensor: Any, part: Part, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the part's bytes in order: contiguous tensors of at most about CHUNK bytes."""
    if part.dim == 0:
        row_bytes = torch.Size(tensor.shape[1:]).numel() * dtype.itemsize
        step = max(1, CHUNK // row_bytes)
        for first, length in part.spans:
            for offset in range(0, length, step):
                count = min(step, length - offset)
                if first is None:
                    yield torch.zeros((count, *tensor.shape[1:]), dtype=dtype)
                else:
                    yield tensor[first + offset : first + offset + count].to(dtype).contiguous()
        return
    width = sum(length for _, length in part.spans)
    step = max(1, CHUNK // (width * dtype.itemsize))
    for offset in range(0, len(tensor), step):
        chunk = tensor[offset : offset + step]
        columns = [
            chunk.new_zeros((len(chunk), length)) if first is None else chunk[:, first : first + length]
            for first, length in part.spans
        ]
        yield (columns[0] if len(columns) == 1 else torch.cat(columns, 1)).to(dtype).contiguous()


def _nbytes(output: Output, dtype: torch.dtype) -> int:
    return torch.Size(output.shape).numel() * dtype.itemsize


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> bytes:
    """Makes the header of a file that holds `tensors`, (name, dtype, shape), in this order.

    It is its length, then JSON padded with spaces to a multiple of 8.
    """
    entries, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, dtype, shape in tensors:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
