# SPDX-License-Identifier: Apache-2.0
"""Compiled parts kept for the next compile, in the user's cache folder.

They are machine code: what is read was written by this user, into a folder of this user's in which no other may write.
"""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from neuronx_distributed_inference import _products

from .run import cpu_features

_KEPT = 64  # of about 1.6 MB
_DIGEST_BYTES = hashlib.sha256().digest_size
_SOURCES = (Path(__file__).with_name("build.py"), Path(_products.__file__))


def toolchain() -> str:
    """What the machine code of a part depends on, but for the part itself."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compiler = get_cpp_compiler()
    kinds = [str(_products.product_dtype(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    return "\n".join(
        [
            f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {kinds}",
            f"{compiler} {get_compiler_version_info(compiler)}",
            json.dumps(config.save_config_portable(), sort_keys=True, default=str),
            " ".join(sorted(cpu_features())),
            *(hashlib.sha256(source.read_bytes()).hexdigest() for source in _SOURCES),
        ]
    )


def folder() -> Path:
    """Where parts are kept."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("NXD_CPU_CACHE") or Path(caches, "nxd_cpu"))


def read(file: str) -> bytes | None:
    """The library kept under a name; None where there is none that is whole and this user's own."""
    with suppress(OSError), _opened() as place:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        with open(descriptor, "rb") as opened:
            digest, library = opened.read(_DIGEST_BYTES), opened.read()
            if _is_own(descriptor) and hashlib.sha256(library).digest() == digest:
                os.utime(descriptor)  # the least used go first
                return library
    return None


def write(file: str, library: bytes) -> None:
    """Keep a library, and no more of them than `_KEPT`. Where that is not possible, nothing is kept."""
    with suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened() as place:
            temporary = f"{secrets.token_hex(8)}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600, dir_fd=place), "wb") as opened:
                opened.write(hashlib.sha256(library).digest() + library)
            os.rename(temporary, file, src_dir_fd=place, dst_dir_fd=place)
            used = {name: os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns for name in os.listdir(place)}
            for name in sorted(used, key=used.__getitem__)[:-_KEPT]:
                os.unlink(name, dir_fd=place)


@contextmanager
def _opened() -> Iterator[int]:
    """The folder, which stays the same one whatever is renamed. OSError where it is not this user's own."""
    place = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_own(place):
            raise PermissionError(f"{folder()} is another user's, or others may write in it")
        yield place
    finally:
        os.close(place)


def _is_own(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
