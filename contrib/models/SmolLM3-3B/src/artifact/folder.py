# SPDX-License-Identifier: Apache-2.0
"""An artifact folder: its manifest, the check that it is whole, and loading it.

An artifact is what NxD Inference's `compile` writes (neuron_config.json, model.pt, weights/) with the tokenizer's files
and `artifact.json`, which says what it was made of, with which settings, by which versions and for which place.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import SmolLM3Error
from ..generate.chat import VLLM_TEMPLATE
from ..model.config import token_ids
from ..model.json_files import read_json
from ..weights.digests import crc32, sha256
from ..weights.files import SHARD_FILE, VERIFIER
from .compiled_graphs import load_graphs
from .manifest import MANIFEST, READ_BY_LIBRARY, check_settings, manifest_digest, read_manifest, versions
from .settings import Settings
from .signature import is_signed_here
from .tokenizer import GENERATION_CONFIG, TEMPLATES, TOKENIZER_FILES, load_tokenizer


@dataclass(frozen=True)
class Artifact:
    """An artifact folder whose manifest was read and whose files were checked, see `open_artifact`."""

    path: Path
    manifest: dict[str, Any]
    is_signed: bool = False  # by this user, see signature.py
    generation: tuple[int, ...] | None = (
        None  # tells what stands at `path` from any other artifact there, before or later
    )

    @property
    def settings(self) -> Settings:
        """What shapes its graphs."""
        return Settings(**self.manifest["settings"])

    @property
    def place(self) -> str:
        """ "cpu", "neuron" or, on an emulated Neuron device, "emulated": where its graphs run."""
        return self.manifest["place"]

    @property
    def exported_because(self) -> str | None:
        """Why the CPU runtime runs its graphs as they were exported.

        None where they are compiled ahead of time, or a device's.
        """
        if self.has_foreign_code:
            return "the machine code in it is another user's or machine's; compile again here to have your own"
        return self.manifest["exported_because"]

    @property
    def has_foreign_code(self) -> bool:
        """Whether it holds machine code for the CPU that this user did not compile: nothing opens that."""
        return self.place == "cpu" and self.manifest["exported_because"] is None and not self.is_signed

    @property
    def adapter(self) -> str | None:
        """The folder of the PEFT adapter that was merged, or None."""
        return (self.manifest["model"].get("adapter") or {}).get("folder")

    @property
    def alterations(self) -> dict[str, Any]:
        """What makes its model another than the checkpoint's, as `check.streamed_reference` takes it."""
        settings = self.settings
        return {
            "adapter": self.adapter,
            "quantized": settings if settings.quantized else None,
            "rope_table": settings.seq_len if settings.rope_precision == "float64" else None,
        }

    @property
    def vocab_size(self) -> int:
        """How many logits the model returns."""
        return self._json("neuron_config.json")["vocab_size"]

    def load(self):
        """Returns the model, ready to generate; `ensure_neuronx` must have been called.

        Raises SmolLM3Error for what the CPU runtime cannot load, such as graphs compiled for a CPU that can do more,
        and where a compile put another artifact in this one's place: graphs and weights come from one.
        """
        try:
            model = self._loaded()
        except Exception:
            self._check_generation()
            raise
        self._check_generation()
        return model

    def _loaded(self):
        from ..modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

        model = NeuronSmolLM3ForCausalLM(str(self.path))
        if self.place == "cpu" and not self.exported_because:
            model.graphs = load_graphs(self.path)
            model.load_weights(str(self.path))
            return model
        try:
            model.load(str(self.path))
        except ValueError as error:
            if self.place != "cpu":
                raise
            raise SmolLM3Error(str(error)) from None
        return model

    def tokenizer(self):
        """Returns the tokenizer that came with the checkpoint; code of a checkpoint's own never runs.

        Raises SmolLM3Error where it had none, or one that transformers has not.
        """
        if not self._has("tokenizer.json"):
            raise SmolLM3Error(f"{self.path}: no tokenizer.json in it; the checkpoint had none")
        with tempfile.TemporaryDirectory() as folder:  # which holds what the manifest lists, and nothing else
            for file in self.manifest["files"]:
                if file in TOKENIZER_FILES or file.startswith(f"{TEMPLATES}/"):
                    Path(folder, file).parent.mkdir(exist_ok=True)
                    Path(folder, file).symlink_to((self.path / file).resolve())
            self._check_generation()
            tokenizer = load_tokenizer(Path(folder), named=self.path)
        self._check_generation()
        tokenizer.name_or_path = str(self.path)
        return tokenizer

    def generation_config(self) -> dict[str, Any]:
        """Returns the checkpoint's generation_config.json, or an empty dictionary where it had none."""
        return self._json(GENERATION_CONFIG) if self._has(GENERATION_CONFIG) else {}

    def eos_token_ids(self) -> list[int]:
        """Returns the end-of-sequence token ids of generation_config.json, or else of the config."""
        eos = self.generation_config().get("eos_token_id")
        if eos is None:
            eos = self._json("neuron_config.json").get("eos_token_id")
        return token_ids(f"{self.path}: eos_token_id", eos)

    def _json(self, file: str) -> dict[str, Any]:
        self._check_generation()
        value = read_json(self.path / file, "compile again", any_number=file in READ_BY_LIBRARY)
        self._check_generation()
        if not isinstance(value, dict):
            raise SmolLM3Error(f"{self.path / file}: a JSON object is expected; compile again")
        return value

    def _check_generation(self) -> None:
        if _generation(self.path) != self.generation:
            raise SmolLM3Error(f"{self.path}: a compile replaced it while it was read; run this again")

    def _has(self, file: str) -> bool:
        """Whether the manifest lists the file: nothing has checked any other."""
        return file in self.manifest["files"]

    def graph_files(self) -> list[str]:
        """Returns the files that `compile` wrote: all but the weights and what was copied from the checkpoint."""
        files = self.manifest["files"]
        copied = (*TOKENIZER_FILES, VLLM_TEMPLATE)
        return [file for file in files if not file.startswith(("weights/", f"{TEMPLATES}/")) and file not in copied]


def open_artifact(path: Path, place: str, *, tp_degree: int | None = None, verify: bool = False) -> Artifact:
    """Returns the artifact in `path` if it is whole and made for this place, these versions and `tp_degree`.

    `place` is "neuron", "emulated" or "cpu"; a `tp_degree` of None is any. `verify` reads the weights, too. Raises
    SmolLM3Error that says what differs.
    """
    if not path.is_dir():
        raise SmolLM3Error(f"{path}: no such artifact; make one with python scripts/compile.py --output {path}")
    generation = _generation(path)
    manifest, signature = read_manifest(path)
    if manifest["place"] != place:
        raise SmolLM3Error(f"{path}: made for {manifest['place']!r}, but this is {place!r}; compile it here")
    check_settings(path, manifest)
    artifact = Artifact(path, manifest, is_signed_here(manifest_digest(manifest), signature), generation)
    made_for = artifact.settings.tp_degree
    if tp_degree is not None and made_for != tp_degree:
        raise SmolLM3Error(f"{path}: made for tp_degree {made_for}, not {tp_degree}; compile it for {tp_degree}")
    for package, installed in versions().items():
        made_with = manifest["versions"].get(package)
        if made_with != installed:
            raise SmolLM3Error(f"{path}: made with {package} {made_with}, here is {installed}; compile again")
    try:
        for file, entry in manifest["files"].items():
            if not (path / file).resolve().is_relative_to(path.resolve()):
                raise SmolLM3Error(f"{path / file}: a link that leads out of the artifact; compile again")
            _check_file(path / file, entry, verify)
        for rank in range(made_for):
            _check_rank(path / "weights" / SHARD_FILE.format(rank=rank), rank, artifact.settings)
    except (SmolLM3Error, OSError):
        artifact._check_generation()
        raise
    artifact._check_generation()
    return artifact


def _generation(path: Path) -> tuple[int, ...] | None:
    """Returns what is another for every artifact that was ever at `path`; None where there is none."""
    try:
        status = (path / MANIFEST).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size


def _check_rank(path: Path, rank: int, settings: Settings) -> None:
    """Checks that the file's weights are of this rank: the files of two ranks have one size and one header."""
    prefix = VERIFIER if settings.enable_fused_speculation else ""
    with safe_open(path, framework="numpy") as shard:
        found = int(shard.get_tensor(f"{prefix}rank_util.rank")[0])
    if not 0 <= found < settings.tp_degree:
        raise SmolLM3Error(f"{path}: damaged, its rank is {found}; compile again")
    if found != rank:
        raise SmolLM3Error(f"{path}: the weights of rank {found} are in it, not those of rank {rank}; compile again")


def _check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    """Checks a weights file by its size and header, or with `verify` whole, and any other file always whole."""
    if not path.is_file():
        raise SmolLM3Error(f"{path}: missing; compile again")
    if path.stat().st_size != entry["size"]:
        raise SmolLM3Error(f"{path}: {path.stat().st_size} bytes, {entry['size']} were written; compile again")
    header = entry.get("header")
    if header and sha256(path, header["size"]) != header["sha256"]:
        raise SmolLM3Error(f"{path}: damaged, the digest of its header differs from {MANIFEST}'s; compile again")
    if (header and verify and crc32(path) != entry["crc32"]) or (not header and sha256(path) != entry["sha256"]):
        raise SmolLM3Error(f"{path}: damaged, its digest differs from {MANIFEST}'s; compile again")
