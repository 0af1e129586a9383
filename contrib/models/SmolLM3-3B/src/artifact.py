"""compile -> artifact folder -> load.

An artifact is what NxD Inference's `compile` writes (neuron_config.json, model.pt, weights/) with the tokenizer's files and
`artifact.json`, which says what it was made of, with which settings, by which versions and for which place. It appears
under its name only when it is whole.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

from . import __version__, checkpoint, hf_config
from .errors import SmolLM3Error
from .sharding import ShardingPlan

FORMAT = 1
MANIFEST = "artifact.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
PACKAGES = ("torch", "transformers", "neuronx-distributed", "neuronx-distributed-inference", "neuronx-cc")


@dataclass(frozen=True)
class Settings:
    """What shapes the graphs, named as in NeuronConfig. The defaults fit a trn1.2xlarge."""

    tp_degree: int = 2
    batch_size: int = 1
    seq_len: int = 2048
    max_context_length: int | None = None  # None: seq_len
    torch_dtype: str = "bfloat16"
    fused_qkv: bool = False

    def checked(self, config: dict[str, Any]) -> "Settings":
        """These settings, complete, for a model with these resolved values; SmolLM3Error where they cannot run."""
        ShardingPlan(self.tp_degree, config["num_attention_heads"], config["num_key_value_heads"])
        if self.torch_dtype not in hf_config.DTYPES:
            raise SmolLM3Error(f"dtype is {self.torch_dtype!r}, allowed is one of {', '.join(hf_config.DTYPES)}")
        context = self.seq_len if self.max_context_length is None else self.max_context_length
        longest = config["max_position_embeddings"]
        for name, value, largest in (
            ("batch_size", self.batch_size, 1024),
            ("seq_len", self.seq_len, longest),
            ("max_context_length", context, self.seq_len),
        ):
            least = 1 if name == "batch_size" else 2
            if not least <= value <= largest:
                raise SmolLM3Error(f"{name} is {value}, allowed is a whole number from {least} to {largest}")
        return Settings(**{**asdict(self), "max_context_length": context})


@dataclass(frozen=True)
class Artifact:
    """An artifact folder whose manifest was read and whose files were checked, see `open_artifact`."""

    path: Path
    manifest: dict[str, Any]

    @property
    def settings(self) -> Settings:
        return Settings(**self.manifest["settings"])

    @property
    def place(self) -> str:
        """ "cpu" or "neuron": where its graphs run."""
        return self.manifest["place"]

    def load(self):
        """The model, ready to generate. `ensure_neuronx` must have been called."""
        from .modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

        model = NeuronSmolLM3ForCausalLM(str(self.path))
        model.load(str(self.path))
        return model

    def tokenizer(self):
        """The tokenizer that came with the checkpoint; SmolLM3Error where it had none."""
        from transformers import AutoTokenizer

        if not (self.path / "tokenizer.json").is_file():
            raise SmolLM3Error(f"{self.path}: no tokenizer.json in it; the checkpoint had none")
        return AutoTokenizer.from_pretrained(self.path)

    def eos_token_ids(self) -> list[int]:
        """Of generation_config.json, else of the config."""
        for name in ("generation_config.json", "neuron_config.json"):
            if (self.path / name).is_file():
                eos = json.loads((self.path / name).read_text()).get("eos_token_id")
                if eos is not None:
                    return eos if isinstance(eos, list) else [eos]
        return []


def build_config(folder: Path, settings: Settings):
    """SmolLM3InferenceConfig of a checkpoint folder with these settings."""
    import torch
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    from .modeling_smollm3_3b import SmolLM3InferenceConfig

    values = {**asdict(settings), "torch_dtype": getattr(torch, settings.torch_dtype)}
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(save_sharded_checkpoint=True, **values)
    return SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(str(folder)))


def compile_artifact(
    folder: Path,
    output: Path,
    settings: Settings,
    place: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Artifact:
    """Compiles the checkpoint in `folder` to the artifact folder `output`; `ensure_neuronx` must have been called.

    `on_step` is called with each step's name as it begins. Every fault of config and checkpoint is told before anything
    is compiled; nothing stands at `output` unless it is whole. Raises SmolLM3Error.
    """
    on_step("checking the checkpoint")
    values = hf_config.read_config(folder)
    settings = settings.checked(values)
    files = checkpoint.check_checkpoint(folder, SimpleNamespace(**values))
    if output.exists() and not (output / MANIFEST).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise SmolLM3Error(f"{output}: something is there that is not an artifact; choose another --output")
    with _staging(output) as staging:
        from .modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

        config = build_config(folder, settings)
        on_step(f"compiling and sharding for tp_degree {settings.tp_degree}")
        seconds = time.perf_counter()
        NeuronSmolLM3ForCausalLM(str(folder), config).compile(str(staging))
        seconds = time.perf_counter() - seconds
        for file in TOKENIZER_FILES:
            if (folder / file).is_file():
                shutil.copyfile(folder / file, staging / file)
        on_step("writing artifact.json")
        manifest = {
            "format": FORMAT,
            "place": place,
            "model": {"name": name or str(folder), "folder": str(folder), "revision": revision, **_identity(folder, files)},
            "settings": asdict(settings),
            "versions": versions(),
            "seconds": round(seconds, 1),
            "files": {path.relative_to(staging).as_posix(): _entry(path) for path in _files_in(staging)},
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return open_artifact(output, place)


def open_artifact(path: Path, place: str, *, tp_degree: int | None = None, verify: bool = False) -> Artifact:
    """The artifact in `path` after checking that it is whole and made for this place, these versions and `tp_degree`.

    `verify` reads the weights too. Raises SmolLM3Error that says what differs.
    """
    if not path.is_dir():
        raise SmolLM3Error(f"{path}: no such artifact; make one with python scripts/compile.py --output {path}")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format"]
    except FileNotFoundError:
        raise SmolLM3Error(f"{path}: no {MANIFEST} in it, so it is not an artifact of scripts/compile.py") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SmolLM3Error(f"{path / MANIFEST}: damaged ({error!r}); compile again") from None
    if version != FORMAT:
        raise SmolLM3Error(f"{path}: artifact format {version}, this version reads {FORMAT}; compile again")
    try:
        artifact = Artifact(path, manifest)
        settings, files, made_by = artifact.settings, manifest["files"], manifest["versions"]
        made_for = manifest["place"]
    except (KeyError, TypeError) as error:
        raise SmolLM3Error(f"{path / MANIFEST}: damaged ({error!r}); compile again") from None
    if made_for != place:
        raise SmolLM3Error(f"{path}: made for {made_for!r}, but this is {place!r}; compile it here")
    if tp_degree is not None and settings.tp_degree != tp_degree:
        raise SmolLM3Error(f"{path}: made for tp_degree {settings.tp_degree}, not {tp_degree}; compile it for {tp_degree}")
    for package, here in versions().items():
        if made_by.get(package) != here:
            raise SmolLM3Error(f"{path}: made with {package} {made_by.get(package)}, here is {here}; compile again")
    for file, entry in files.items():
        _check_file(path / file, entry, verify)
    return artifact


def versions() -> dict[str, str | None]:
    """Of everything that an artifact depends on; None: not installed."""
    found: dict[str, str | None] = {"smollm3-neuron": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A private folder beside `output` that takes its name on success; one compile at a time, what a killed one left goes."""
    output = output.absolute()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = open(output.parent / f".{output.name}.lock", "w")
    except OSError as error:
        raise SmolLM3Error(f"{output.parent}: cannot write there ({error.strerror}); choose another --output") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SmolLM3Error(f"{output}: another compile is writing it; wait for it or choose another --output") from None
        for left in output.parent.glob(f".{output.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
        work_dir = os.environ.get("BASE_COMPILE_WORK_DIR")
        os.environ["BASE_COMPILE_WORK_DIR"] = f"{staging}/.work/"  # the library's default is shared by all of /tmp
        try:
            (staging / "artifact").mkdir()
            yield staging / "artifact"
            if output.exists():
                output.rename(staging / "replaced")
            (staging / "artifact").rename(output)
        except OSError as error:
            if error.errno is None:
                raise
            raise SmolLM3Error(f"{error.filename or output}: {error.strerror}; nothing was written to {output}") from error
        finally:
            if work_dir is None:
                del os.environ["BASE_COMPILE_WORK_DIR"]
            else:
                os.environ["BASE_COMPILE_WORK_DIR"] = work_dir
            shutil.rmtree(staging, ignore_errors=True)
            (output.parent / f".{output.name}.lock").unlink(missing_ok=True)


def _identity(folder: Path, files: dict[str, Path]) -> dict[str, str]:
    """Digests of the config and of the weights' names, files and sizes: what another checkpoint would differ in."""
    names = sorted((name, path.name, path.stat().st_size) for name, path in files.items())
    return {
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights_sha256": hashlib.sha256(json.dumps(names).encode()).hexdigest(),
    }


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_310(file)


def _sha256_310(file) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise SmolLM3Error(f"{path}: missing; compile again")
    if path.stat().st_size != entry["size"]:
        raise SmolLM3Error(f"{path}: {path.stat().st_size} bytes, {entry['size']} were written; compile again")
    if (verify or path.suffix != ".safetensors") and _sha256(path) != entry["sha256"]:
        raise SmolLM3Error(f"{path}: damaged, its digest differs from {MANIFEST}'s; compile again")
