"""Digests of files, read a piece at a time."""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path


def sha256(path: Path, size: int | None = None) -> str:
    """Of the whole file, or of its first `size` bytes."""
    digest = hashlib.sha256()
    for chunk in _read(path, size):
        digest.update(chunk)
    return digest.hexdigest()


def crc32(path: Path) -> int:
    """Of the whole file."""
    value = 0
    for chunk in _read(path):
        value = zlib.crc32(chunk, value)
    return value


def _read(path: Path, size: int | None = None) -> Iterator[bytes]:
    left = path.stat().st_size if size is None else size
    with open(path, "rb") as file:
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            yield chunk
            left -= len(chunk)
