# SPDX-License-Identifier: Apache-2.0
"""The answers of a batch on disk: a line for each row, kept through a crash. Imports no torch."""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from .rows import BadRow


class Journal:
    """A batch's output, opened to go on where it ended: a context manager.

    `done` has the ids of the rows that are answered in it. Raises SmolLM3Error for a file that is no batch's output,
    one that cannot be written, and one that another batch is writing.
    """

    def __init__(self, path: Path):
        self.path, self.done = path, set[str]()
        self.bad_path = path.with_name(f"{path.stem}.bad{path.suffix}")
        try:
            self._file = open(path, "a+b")  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise SmolLM3Error(f"{path}: cannot be written ({error.strerror}); name another file") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(path)  # the one that held the lock takes an empty output away
        except OSError:
            raise SmolLM3Error(f"{path}: another batch is writing it; wait for its end, or name another file") from None
        self._read()
        self._bad = open(self.bad_path, "w", encoding="utf-8")  # noqa: SIM115  # bad rows are found again

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error) -> None:
        self._bad.close()
        for path in (self.bad_path, self.path):  # the output while the lock on it is held
            if not path.stat().st_size:
                path.unlink()
        self._file.close()

    def _read(self) -> None:
        """Fills `done`, and takes off a last line that a crash left without its end."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                self.done.add(record.get("custom_id") or record["id"])
            except (ValueError, KeyError, AttributeError, TypeError):
                raise SmolLM3Error(f"{self.path}:{number}: no answer of a batch; name another file") from None
            whole += len(line)
        self._file.truncate(whole)

    def write(self, answers: Iterable[dict[str, Any]]) -> None:
        """Appends answers; when it returns they are on the disk."""
        self._file.write(b"".join(json.dumps(answer, ensure_ascii=False).encode() + b"\n" for answer in answers))
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_bad(self, row: BadRow) -> None:
        """Appends a row to the file of bad rows."""
        print(json.dumps(vars(row), ensure_ascii=False), file=self._bad, flush=True)
