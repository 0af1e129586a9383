# SPDX-License-Identifier: Apache-2.0
"""From what a user calls a model (a hub id, a folder, "tiny") to a checkpoint folder. Imports no torch."""

import shlex
from pathlib import Path

from ..errors import SmolLM3Error
from ..model.config import INSTEAD, OTHER_FORMATS, file_of_other_format
from ..weights.files import expanded

DEFAULT_MODEL = "HuggingFaceTB/SmolLM3-3B"
REVISIONS = {DEFAULT_MODEL: "a07cc9a04f16550a088caea529712d1d335b0ac1"}  # pinned: a name alone is not an identity
TINY = "tiny"
IMPORTED = (".gguf", ".msgpack")
IMPORT = "import it first: python scripts/import_checkpoint.py {source} FOLDER"
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def tiny_folder() -> Path:
    """Returns the folder of the small trained checkpoint of this repository; it need not be there."""
    return Path(__file__).resolve().parents[2] / "test" / TINY


def locate_model(model: str, revision: str | None = None) -> tuple[Path, str, str | None]:
    """Returns folder, name and revision of `model`; a hub id is downloaded into the hub's own cache.

    `model` is a hub id, a folder or "tiny". Without `revision` that of the hub id is the pinned one, or for an id that
    is not pinned the newest, as None. Raises SmolLM3Error where there is no such model or the hub cannot be reached; it
    never takes another one.
    """
    folder = expanded(model)
    if model == TINY or folder.is_dir():
        return *local_model(model), None
    if folder.suffix in OTHER_FORMATS:
        source = folder.parent if folder.suffix == ".msgpack" else folder
        raise SmolLM3Error(
            f"{model}: {OTHER_FORMATS[folder.suffix]} is not read, only safetensors are; "
            f"{instead_of(folder.suffix, source)}"
        )
    if model.lower().endswith("gguf"):  # a hub id
        of_file = instead_of(".gguf", "FILE.gguf")
        raise SmolLM3Error(
            f"{model}: GGUF is not read, only safetensors are; {INSTEAD}, or download a file and {of_file}"
        )
    if folder.exists():
        raise SmolLM3Error(f"{model}: a checkpoint folder is expected, this is a file")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise SmolLM3Error(
            f"{model}: no such folder; pass a checkpoint folder, a hub id like {DEFAULT_MODEL} or 'tiny'"
        )
    revision = revision or REVISIONS.get(model)
    return _download(model, revision), model, revision


def local_model(model: str) -> tuple[Path, str]:
    """Returns folder and name of `model`, a folder or "tiny". Raises SmolLM3Error where it is neither."""
    if model == TINY:
        if not (tiny_folder() / "config.json").is_file():
            raise SmolLM3Error(f"'tiny' is part of a checkout of this repository; {tiny_folder()} is not there")
        return tiny_folder(), TINY
    folder = expanded(model)
    if not folder.is_dir():
        raise SmolLM3Error(f"{model}: no such folder; pass a checkpoint folder or 'tiny'")
    _check_format(folder)
    return folder.resolve(), str(folder.resolve())


def _check_format(folder: Path) -> None:
    """Raises SmolLM3Error with the command for a folder that can be imported; reading it tells what else is wrong."""
    file = file_of_other_format(folder)
    if file is not None and file.suffix in IMPORTED:
        raise SmolLM3Error(
            f"{folder}: {file.name} is {OTHER_FORMATS[file.suffix]}, only safetensors are read; "
            f"{instead_of(file.suffix, folder)}"
        )


def instead_of(suffix: str, source: str | Path) -> str:
    """What to do with `source`, whose weights are in files of that suffix."""
    return IMPORT.format(source=shlex.quote(str(source))) if suffix in IMPORTED else INSTEAD


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    asked_for = f"{repo_id} at revision {revision}" if revision else repo_id
    otherwise = "pass --model FOLDER with a checkpoint that is already here, or --model tiny"
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(PATTERNS)))
    except RepositoryNotFoundError:
        raise SmolLM3Error(f"{asked_for}: the hub knows no such model, or it needs a login; {otherwise}") from None
    except HFValidationError as error:
        raise SmolLM3Error(f"{repo_id}: not a hub id ({str(error).splitlines()[0]}); {otherwise}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise SmolLM3Error(f"{asked_for}: the hub cannot be reached ({reason}); {otherwise}") from None
