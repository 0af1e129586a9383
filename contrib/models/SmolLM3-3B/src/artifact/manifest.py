# SPDX-License-Identifier: Apache-2.0
"""artifact.json: what an artifact was made of, and the size and digest of every file in it."""

import hashlib
import importlib.metadata
import json
import os
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .. import __version__
from ..errors import SmolLM3Error
from ..model.heads import MAX_TP_DEGREE
from ..model.json_files import read_json
from ..weights.files import SHARD_FILE, is_inside
from .settings import Settings

FORMAT = 2
MANIFEST = "artifact.json"
PACKAGES = ("torch", "transformers", "neuronx-distributed", "neuronx-distributed-inference", "neuronx-cc")
KINDS = {
    "place": str, "model": dict, "settings": dict, "versions": dict, "exported_because": str | None, "files": dict,
    "seconds": dict,
}  # fmt: skip
INNER_KINDS = {
    "model": {"name": str, "folder": str, "config_sha256": str, "weights": list, "adapter": dict | None},
    "seconds": {"compile": int | float},
}
OF_DRAFT = {"folder": str, "config_sha256": str}
READ_BY_LIBRARY = ("neuron_config.json", "model.pt")


def read_manifest(path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns the manifest of the artifact in `path`, and its signature, see signature.py.

    Raises SmolLM3Error where it is missing, damaged, of another format, or names what is not in its folder.
    """
    file, (manifest, signature) = path / MANIFEST, _read(path)
    if manifest["format"] != FORMAT:
        raise SmolLM3Error(f"{path}: artifact format {manifest['format']}, this version reads {FORMAT}; compile again")
    _check_kinds(file, "", manifest, KINDS)
    for name, kinds in INNER_KINDS.items():
        _check_kinds(file, f"{name}.", manifest[name], kinds)
    if manifest["model"].get("draft") is not None:
        _check_kinds(file, "model.", manifest["model"], {"draft": dict})
        _check_kinds(file, "model.draft.", manifest["model"]["draft"], OF_DRAFT)
    for name, entry in manifest["files"].items():
        _check_entry(file, name, entry)
    return manifest, signature


def check_replaceable(output: Path) -> None:
    """Raises SmolLM3Error unless a compile may take the place of what is at `output`.

    That is nothing, an empty folder, or an artifact with no other file in it than those that its compile wrote.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise SmolLM3Error(f"{output}: something is there that is not an artifact; choose another --output")
    try:
        files = _read(output)[0].get("files")
    except SmolLM3Error:
        files = None
    if not isinstance(files, dict):
        raise SmolLM3Error(
            f"{output}: its {MANIFEST} is not what a compile wrote, so nothing there is replaced; remove the folder, "
            "or choose another --output"
        )
    written = {Path(file) for file in (*files, MANIFEST)}
    written |= {parent for file in written for parent in file.parents}
    for path in sorted(output.rglob("*")):
        if path.relative_to(output) not in written:
            raise SmolLM3Error(
                f"{path}: no compile wrote it, and it would be lost; move it out of the artifact, or choose another "
                "--output"
            )


def check_settings(path: Path, manifest: dict[str, Any]) -> None:
    """Raises SmolLM3Error for settings that this version has not, and for a file that must be there and is not listed.

    What is not listed has no digest, and nothing would have checked it.
    """
    made_by = manifest["versions"].get("smollm3-neuron")
    known = {field.name for field in fields(Settings)}
    for name in manifest["settings"].keys() - known:
        raise SmolLM3Error(
            f"{path}: made by smollm3-neuron {made_by} with {name}, which {__version__} has not; compile again"
        )
    for name, hint in get_type_hints(Settings).items():
        value = manifest["settings"].get(name)
        if name not in manifest["settings"] or not _fits(value, hint):
            raise SmolLM3Error(f"{path / MANIFEST}: {name} is {value!r:.80}, which no compile wrote; compile again")
    tp_degree = manifest["settings"]["tp_degree"]
    if not 1 <= tp_degree <= MAX_TP_DEGREE:
        raise SmolLM3Error(f"{path / MANIFEST}: tp_degree is {tp_degree}, which no compile wrote; compile again")
    if manifest["settings"]["enable_fused_speculation"] and not manifest["model"].get("draft"):
        raise SmolLM3Error(
            f"{path / MANIFEST}: enable_fused_speculation is on and model.draft names no draft, which no compile "
            "wrote; compile again"
        )
    needed = [*READ_BY_LIBRARY, *(f"weights/{SHARD_FILE.format(rank=rank)}" for rank in range(tp_degree))]
    for name in needed:
        if name not in manifest["files"]:
            raise SmolLM3Error(f"{path / MANIFEST}: {name} is not among its files; compile again")


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value is of a type as the fields of Settings have: int, list[int] | None and the like."""
    if isinstance(hint, UnionType):
        return any(_fits(value, kind) for kind in get_args(hint))
    if get_origin(hint) is list:
        return type(value) is list and all(_fits(item, get_args(hint)[0]) for item in value)
    return type(value) is (get_origin(hint) or hint)


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of a manifest, which must have no "sha256" and no "signature" yet."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Returns the version of each package that an artifact depends on, None where it is not installed."""
    installed: dict[str, str | None] = {"smollm3-neuron": __version__}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns a manifest of any format whose digest is its own, and its signature."""
    file = path / MANIFEST
    if not file.is_file():
        raise SmolLM3Error(f"{path}: no {MANIFEST} in it, so it is not an artifact of scripts/compile.py")
    manifest = read_json(file, "compile again")
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise SmolLM3Error(f"{file}: damaged, it has no 'format'; compile again")
    signature = manifest.pop("signature", None)
    if manifest.pop("sha256", None) != manifest_digest(manifest):
        raise SmolLM3Error(f"{file}: damaged, its digest is not its own; compile again")
    return manifest, signature


def _check_kinds(file: Path, prefix: str, values: dict[str, Any], kinds: dict[str, Any]) -> None:
    for key, kind in kinds.items():
        if key not in values or not isinstance(values[key], kind):
            raise SmolLM3Error(
                f"{file}: {prefix}{key} is {values.get(key)!r:.80}, which no compile wrote; compile again"
            )


def _check_entry(file: Path, name: str, entry: Any) -> None:
    header = entry.get("header") if isinstance(entry, dict) else None
    if not is_inside(name):
        raise SmolLM3Error(f"{file}: it names {name!r}, which is not in its folder; compile again")
    right = isinstance(entry, dict) and type(entry.get("size")) is int
    if header is None:
        right = right and isinstance(entry.get("sha256"), str)
    else:
        right = (
            right
            and isinstance(header, dict)
            and type(header.get("size")) is int
            and isinstance(header.get("sha256"), str)
            and type(entry.get("crc32")) is int
        )
    if not right:
        raise SmolLM3Error(f"{file}: {name} has no size and digest as a compile writes them; compile again")
