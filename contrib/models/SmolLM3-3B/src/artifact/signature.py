# SPDX-License-Identifier: Apache-2.0
"""Who compiled an artifact's machine code: a key of the user's signs the manifest, which has every file's digest.

An owner and a mode would not do: `tar` and `cp` give a stranger's files to whoever unpacks them. The key stays in the
user's configuration folder, so that an artifact may be moved or copied by its user and no other's passes for it.
"""

import contextlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

KEY_BYTES = 32


def sign(digest: str) -> str | None:
    """Returns this user's signature of a manifest's digest; None where no key can be kept."""
    try:
        return _signature(_key() or _new_key(), digest)
    except OSError:
        return None


def is_signed_here(digest: str, signature: object) -> bool:
    """Returns whether this user signed the manifest with this digest."""
    try:
        key = _key()
    except OSError:
        return False
    return (
        key is not None
        and isinstance(signature, str)
        and hmac.compare_digest(_signature(key, digest).encode(), signature.encode(errors="replace"))
    )


def _signature(key: bytes, digest: str) -> str:
    return hmac.digest(key, digest.encode(), "sha256").hex()


def key_file() -> Path:
    """Returns where the user's key is kept."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder, "smollm3_neuron", "key")


def _key() -> bytes | None:
    """Returns the user's key, or None where there is none. Raises PermissionError for one that others may know."""
    path = key_file()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        key = file.read(KEY_BYTES + 1)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(key) != KEY_BYTES:
        raise PermissionError(f"{path}: not {KEY_BYTES} bytes that only its user can read")
    return key


def _new_key() -> bytes:
    """Makes the user's key; where another process just made it, that one counts."""
    path = key_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # readable by the user only
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # whole or not at all
    finally:
        os.unlink(temporary)
    key = _key()
    if key is None:
        raise FileNotFoundError(path)
    return key
