# SPDX-License-Identifier: Apache-2.0
"""A folder that appears under its name only when it is whole."""

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import SmolLM3Error

LOCK_MARK = "a lock of smollm3_neuron\n"  # the next line of the file names the private folder
LONGEST_NAME = 255 - len("..partial-") - 16
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


def resolved(output: Path) -> Path:
    """Returns the folder that `output` means, links followed.

    Raises SmolLM3Error for one that cannot be replaced: the folder that the user is in, or one around it, a circle of
    links, and a name too long for the names beside it.
    """
    try:
        real, here = Path(os.path.realpath(output)), Path(os.path.realpath("."))
        is_circle = real.is_symlink()
    except OSError as error:
        raise SmolLM3Error(f"{output}: {error.strerror}; choose another --output") from None
    if is_circle:
        raise SmolLM3Error(f"{output}: a link that leads to itself; choose another --output")
    if here.is_relative_to(real):
        raise SmolLM3Error(
            f"{output}: you are in that folder, which an artifact would replace; name a new folder with --output"
        )
    size = len(os.fsencode(real.name))
    if size > LONGEST_NAME:
        raise SmolLM3Error(
            f"{output}: its name has {size} bytes, allowed are {LONGEST_NAME}; choose a shorter --output"
        )
    return real


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Gives a private folder beside `output` that takes its name when the block ends without an error.

    What a killed process left beside it goes; no other file is opened for writing or removed, and no link followed.
    Raises SmolLM3Error where nothing can be written, or another process is writing to the same `output`.
    """
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(output)
    except OSError as error:
        raise SmolLM3Error(f"{output.parent}: cannot write there ({error.strerror}); choose another --output") from None
    staging = output.with_name(f".{output.name}.partial-{secrets.token_hex(8)}")
    work_dir = os.environ.get("BASE_COMPILE_WORK_DIR")
    try:
        _take_over(lock, output, staging)
        os.environ["BASE_COMPILE_WORK_DIR"] = f"{staging}/.work/"  # the library's default is shared by all of /tmp
        (staging / "artifact").mkdir()
        yield staging / "artifact"
        if output.exists():
            _exchange(staging / "artifact", output)
        else:
            (staging / "artifact").rename(output)
    except OSError as error:
        if error.errno is None:
            raise
        raise SmolLM3Error(f"{error.filename or output}: {error.strerror}; nothing was written to {output}") from error
    finally:
        if work_dir is None:
            os.environ.pop("BASE_COMPILE_WORK_DIR", None)
        else:
            os.environ["BASE_COMPILE_WORK_DIR"] = work_dir
        shutil.rmtree(staging, ignore_errors=True)
        os.unlink(_lock_file(output))
        os.close(lock)


def _exchange(new: Path, old: Path) -> None:
    """Gives each the other's name at once, so that a kill leaves one of them whole under it.

    Where the file system cannot do that, it takes two steps.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None or renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE):
        old.rename(new.with_name("replaced"))
        new.rename(old)


def _lock_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.lock")


def _lock(output: Path) -> int:
    """Returns the open lock file of `output`, held.

    Raises SmolLM3Error where another process holds it, or a file of that name is not a lock of ours.
    """
    path = _lock_file(output)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        is_new = False
        try:
            lock = os.open(path, flags)
        except FileNotFoundError:
            try:
                lock, is_new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
            except FileExistsError:
                continue
        try:
            if _is_held(lock, path, output):
                status = os.fstat(lock)
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
                if not is_new and not (is_ours and _content(lock).startswith(LOCK_MARK)):
                    raise SmolLM3Error(f"{path}: in the way, and no lock of ours; move it, or choose another --output")
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _is_held(lock: int, path: Path, output: Path) -> bool:
    """Locks the open file. Returns False where another process removed it between our open and our lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SmolLM3Error(f"{output}: another compile is writing it; wait for it or choose another --output") from None
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), os.lstat(path))
    return False


def _content(lock: int) -> str:
    return os.pread(lock, 4096, 0).decode(errors="replace")


def _take_over(lock: int, output: Path, staging: Path) -> None:
    """Removes the private folder that a killed process named in the lock, names ours there, and makes it."""
    _, _, left = _content(lock).partition(LOCK_MARK)
    if re.fullmatch(re.escape(f".{output.name}.partial-") + "[0-9a-f]{16}", left.strip()):
        shutil.rmtree(output.with_name(left.strip()), ignore_errors=True)
    text = f"{LOCK_MARK}{staging.name}\n".encode()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
    staging.mkdir(mode=0o700)
