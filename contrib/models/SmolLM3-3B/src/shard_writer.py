"""The streaming sharder: from the checkpoint's safetensors to the ranks' shard files, a few MB at a time.

It writes what NxD Inference's own sharder would write, byte for byte (names, padding, head layouts, order in the file),
without ever holding the model: tensors stay on the mapped source files, and each rank's file is written once, in order.
"""

import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from safetensors import safe_open

from .checkpoint import PREFIX, check_checkpoint
from .sharding import Output, Part, rank_outputs

SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"
CHUNK = 1 << 20  # bytes; small enough that the checksum reads from the cache what was just converted
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}


def write_shards(
    folder: str | Path, config: Any, output: str | Path, on_bytes: Callable[[int], None] = lambda count: None
) -> dict[str, dict[str, Any]]:
    """Writes every rank's shard file to `output`.

    Returns "weights/" + file name -> {"size", "crc32", "header": {"size", "sha256"}}, for the artifact's manifest: a
    CRC-32 tells any flipped byte, and takes a quarter of the copy's time where a SHA-256 takes three times as much.
    `on_bytes` is called with counts of bytes as they are written, from several threads. Raises SmolLM3Error for a
    checkpoint that does not fit, OSError where the disk does not take it.
    """
    files = check_checkpoint(folder, config)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    # as many at once as there are cores: a rank's time is its copy's
    with ThreadPoolExecutor(min(os.cpu_count() or 1, config.neuron_config.tp_degree)) as pool:
        ranks = range(config.neuron_config.tp_degree)
        entries = list(pool.map(lambda rank: _write_rank(files, config, rank, output, on_bytes), ranks))
    return dict(entries)


def shard_bytes(config: Any) -> int:
    """Bytes of all shard files' tensors, for a progress bar."""
    of = config.neuron_config
    return sum(_nbytes(output, of.torch_dtype) for rank in range(of.tp_degree) for output in _outputs(config, rank))


def _outputs(config: Any, rank: int) -> list[Output]:
    """In the order of the safetensors library: widest dtype first, then by name."""
    of = config.neuron_config
    outputs = rank_outputs(config, rank, of.tp_degree, fused_qkv=of.fused_qkv, vocab_parallel=of.vocab_parallel)
    return sorted(outputs, key=lambda o: (-_dtype(o, of.torch_dtype).itemsize, not o.parts, o.name))


def _write_rank(
    files: dict[str, Path], config: Any, rank: int, folder: Path, on_bytes: Callable[[int], None]
) -> tuple[str, dict[str, Any]]:
    torch_dtype = config.neuron_config.torch_dtype
    outputs = _outputs(config, rank)
    path = folder / SHARD_FILE.format(rank=rank)
    crc32 = 0
    with open(path, "wb", buffering=0) as file, _Source(files) as source:

        def write(data: Any) -> None:
            nonlocal crc32
            view = memoryview(data).cast("B")
            crc32 = zlib.crc32(view, crc32)
            done = 0
            while done < len(view):
                done += file.write(view[done:])
            on_bytes(len(view))

        header = _header(outputs, torch_dtype)
        write(header)
        for output in outputs:
            if not output.parts:
                write(torch.tensor([rank], dtype=torch.int32).numpy())
            for part in output.parts:
                for chunk in _chunks(source[part.source], part, torch_dtype):
                    write(chunk.view(torch.uint8).numpy())
        size = file.tell()
    of_header = {"size": len(header), "sha256": hashlib.sha256(header).hexdigest()}
    return f"weights/{path.name}", {"size": size, "crc32": crc32, "header": of_header}


class _Source:
    """The checkpoint's tensors by their names without prefix, on the mapped files."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self.names = {name.removeprefix(PREFIX): name for name in files}
        self.open: dict[Path, Any] = {}

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *exception) -> None:
        self.open.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self.names[name]
        file = self.files[name]
        if file not in self.open:
            self.open[file] = safe_open(file, framework="pt")
        return self.open[file].get_tensor(name)


def _chunks(tensor: torch.Tensor, part: Part, torch_dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The part's bytes in order: contiguous tensors of at most about CHUNK bytes."""
    if part.dim == 0:
        row = tensor[:1].numel() * torch_dtype.itemsize
        step = max(1, CHUNK // row)
        for first, length in part.spans:
            for at in range(0, length, step):
                count = min(step, length - at)
                if first is None:
                    yield torch.zeros((count, *tensor.shape[1:]), dtype=torch_dtype)
                else:
                    yield tensor[first + at : first + at + count].to(torch_dtype).contiguous()
        return
    width = sum(length for _, length in part.spans)
    step = max(1, CHUNK // (width * torch_dtype.itemsize))
    for at in range(0, len(tensor), step):
        rows = tensor[at : at + step]
        columns = [
            rows.new_zeros((len(rows), length)) if first is None else rows[:, first : first + length]
            for first, length in part.spans
        ]
        yield (columns[0] if len(columns) == 1 else torch.cat(columns, 1)).to(torch_dtype).contiguous()


def _dtype(output: Output, torch_dtype: torch.dtype) -> torch.dtype:
    return torch_dtype if output.parts else torch.int32


def _nbytes(output: Output, torch_dtype: torch.dtype) -> int:
    return torch.Size(output.shape).numel() * _dtype(output, torch_dtype).itemsize


def _header(outputs: list[Output], torch_dtype: torch.dtype) -> bytes:
    """The safetensors header: its length, then JSON padded with spaces to a multiple of 8."""
    entries, offset = {}, 0
    for output in outputs:
        end = offset + _nbytes(output, torch_dtype)
        dtype = DTYPE_NAMES[_dtype(output, torch_dtype)]
        entries[output.name] = {"dtype": dtype, "shape": list(output.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
