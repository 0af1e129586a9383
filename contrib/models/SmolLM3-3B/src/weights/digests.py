"""Digests of files, read a piece at a time."""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path


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


def _read(path: Path, size: int | None = None) -> Iterator[bytes]:
    remaining = path.stat().st_size if size is None else size
    with open(path, "rb") as file:
        while remaining > 0 and (chunk := file.read(min(remaining, 1 << 20))):
            yield chunk
            remaining -= len(chunk)
