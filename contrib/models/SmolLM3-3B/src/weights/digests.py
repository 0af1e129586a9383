# SPDX-License-Identifier: Apache-2.0
"""Digests of files, read a piece at a time."""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # 4 MB of a file, in milliseconds
LONGEST_HEADER = 100_000_000  # that safetensors takes


def sha256(path: Path, size: int | None = None) -> str:
    """Returns the SHA-256 of the file, or of its first `size` bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    for chunk in _read(path, size):
        digest.update(chunk)
    return digest.hexdigest()


def crc32(path: Path) -> int:
    """Returns the CRC-32 of the file."""
    checksum = 0
    for chunk in _read(path):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def sampled_sha256(path: Path) -> str:
    """Returns the SHA-256 of a safetensors file's header and of SAMPLES pieces spread over the rest of it."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        header = min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER)
        digest.update(file.read(header))
        first, last = 8 + header, max(8 + header, size - SAMPLE_BYTES)
        for offset in sorted({first + (last - first) * piece // (SAMPLES - 1) for piece in range(SAMPLES)}):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def shard_entry(path: Path) -> dict[str, Any]:
    """Returns the entry of a rank's safetensors file in an artifact's manifest, as `write_shards` makes it."""
    with open(path, "rb") as file:
        header = 8 + min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER)
    size = path.stat().st_size
    return {"size": size, "crc32": crc32(path), "header": {"size": header, "sha256": sha256(path, header)}}


def _read(path: Path, size: int | None = None) -> Iterator[bytes]:
    remaining = path.stat().st_size if size is None else size
    with open(path, "rb") as file:
        while remaining > 0 and (chunk := file.read(min(remaining, 1 << 20))):
            yield chunk
            remaining -= len(chunk)
