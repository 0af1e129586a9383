"""A folder that appears under its name only when it is whole."""

import contextlib
import ctypes
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..errors import SmolLM3Error

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Gives a private folder beside `output` that takes its name when the block ends without an error.

    What a killed process left beside it goes. Raises SmolLM3Error where nothing can be written, or another process is
    writing to the same `output`.
    """
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(output)
    except OSError as error:
        raise SmolLM3Error(f"{output.parent}: cannot write there ({error.strerror}); choose another --output") from None
    with lock:
        for leftover in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
        work_dir = os.environ.get("BASE_COMPILE_WORK_DIR")
        os.environ["BASE_COMPILE_WORK_DIR"] = f"{staging}/.work/"  # the library's default is shared by all of /tmp
        try:
            (staging / "artifact").mkdir()
            yield staging / "artifact"
            if output.exists():
                _exchange(staging / "artifact", output)
            else:
                (staging / "artifact").rename(output)
        except OSError as error:
            if error.errno is None:
                raise
            raise SmolLM3Error(
                f"{error.filename or output}: {error.strerror}; nothing was written to {output}"
            ) from error
        finally:
            if work_dir is None:
                del os.environ["BASE_COMPILE_WORK_DIR"]
            else:
                os.environ["BASE_COMPILE_WORK_DIR"] = work_dir
            shutil.rmtree(staging, ignore_errors=True)
            os.unlink(lock.name)


def _exchange(new: Path, old: Path) -> None:
    """Gives each the other's name at once, so that a kill leaves one of them whole under it.

    Where the file system cannot do that, it takes two steps.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None or renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE):
        old.rename(new.with_name("replaced"))
        new.rename(old)


def _lock(output: Path) -> TextIO:
    """Returns the open lock file of `output`, held. Raises SmolLM3Error where another process holds it."""
    while True:
        lock = open(output.parent / f".{output.name}.lock", "w")  # noqa: SIM115 (the caller closes it)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise SmolLM3Error(
                f"{output}: another compile is writing it; wait for it or choose another --output"
            ) from None
        # the one who held it may have removed the file between our open and our lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                return lock
        lock.close()
