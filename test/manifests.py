"""Artifacts as somebody else, or another version, would have written them: other files, a manifest that fits them."""

import json
from pathlib import Path

from smollm3_neuron.artifact import signature
from smollm3_neuron.artifact.folder import MANIFEST, manifest_digest
from smollm3_neuron.weights.digests import sha256


def rewrite(folder: Path, added: dict[str, bytes] | None = None, signed: bool = False, **changes) -> None:
    """Writes files and the manifest that lists them with right digests, unsigned as whoever makes an artifact can."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in ("sha256", "signature"):
        manifest.pop(name, None)
    for name, content in (added or {}).items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"size": len(content), "sha256": sha256(folder / name)}
    manifest |= changes
    digest = manifest_digest(manifest)
    written = {**manifest, "sha256": digest, "signature": signature.sign(digest) if signed else "0" * 64}
    (folder / MANIFEST).write_text(json.dumps(written))
