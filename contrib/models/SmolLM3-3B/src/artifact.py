"""compile -> artifact folder -> load.

An artifact is what NxD Inference's `compile` writes (neuron_config.json, model.pt, weights/) with the tokenizer's files and
`artifact.json`, which says what it was made of, with which settings, by which versions and for which place. It appears
under its name only when it is whole.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import shutil
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

from . import __version__, chat, hf_config
from .cpu_graphs import check_loads, obstacle
from .errors import SmolLM3Error
from .quantization import check_quantization
from .sharding import ShardingPlan
from .staging import staged
from .switches import check_encoding

FORMAT = 2
MANIFEST = "artifact.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# of OnDeviceSamplingConfig; do_sample or dynamic: each request brings its own top_k, top_p and temperature
SAMPLING = {
    "do_sample": bool, "dynamic": bool, "deterministic": bool, "top_k": int, "top_p": float, "temperature": float,
    "global_topk": int,
}  # fmt: skip
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
    is_continuous_batching: bool = False
    ctx_batch_size: int | None = None  # None: 1 with continuous batching, else batch_size
    enable_bucketing: bool = False
    context_encoding_buckets: list[int] | None = None  # None: powers of two from 128 on
    token_generation_buckets: list[int] | None = None
    on_device_sampling_config: dict[str, Any] | None = None  # None: logits come back, and the host samples
    vocab_parallel: bool = False
    sequence_parallel_enabled: bool = False
    async_mode: bool = False
    windowed_context_encoding_size: int | None = None
    is_prefix_caching: bool = False  # with the block KV layout
    pa_block_size: int | None = None  # None: 32 with prefix caching
    pa_num_blocks: int | None = None  # None: enough for batch_size requests of seq_len
    quantized: bool = False
    quantization_type: str = "per_tensor_symmetric"
    quantization_dtype: str = "int8"
    modules_to_not_convert: list[str] | None = None

    def checked(self, config: dict[str, Any]) -> "Settings":
        """These settings, complete, for a model with these resolved values; SmolLM3Error where they cannot run."""
        ShardingPlan(self.tp_degree, config["num_attention_heads"], config["num_key_value_heads"])
        if self.torch_dtype not in hf_config.DTYPES:
            raise SmolLM3Error(f"dtype is {self.torch_dtype!r}, allowed is one of {', '.join(hf_config.DTYPES)}")
        context = self.seq_len if self.max_context_length is None else self.max_context_length
        longest = hf_config.longest_sequence(config)
        for name, value, largest in (
            ("batch_size", self.batch_size, 1024),
            ("seq_len", self.seq_len, longest),
            ("max_context_length", context, self.seq_len),
        ):
            least = 1 if name == "batch_size" else 2
            if not least <= value <= largest:
                raise SmolLM3Error(f"{name} is {value}, allowed is a whole number from {least} to {largest}")
        prompts = self.ctx_batch_size
        if prompts is None:
            prompts = 1 if self.is_continuous_batching else self.batch_size
        if not self.is_continuous_batching and prompts != self.batch_size:
            raise SmolLM3Error(
                f"ctx_batch_size is {prompts} and batch_size {self.batch_size}: is_continuous_batching lets them differ"
            )
        if not 1 <= prompts <= self.batch_size:
            raise SmolLM3Error(f"ctx_batch_size is {prompts}, allowed is a whole number from 1 to {self.batch_size}")
        if self.on_device_sampling_config == {}:
            raise SmolLM3Error(f"on_device_sampling_config is empty, name at least one of {', '.join(SAMPLING)}")
        for name, value in (self.on_device_sampling_config or {}).items():
            types = (float, int) if SAMPLING.get(name) is float else (SAMPLING.get(name),)
            if type(value) not in types or not 0 <= value < math.inf or (name == "top_p" and value > 1):
                raise SmolLM3Error(
                    f"on_device_sampling_config has {name} {value!r}, allowed are {', '.join(SAMPLING)}: the first three "
                    "true or false, the rest numbers, top_p up to 1"
                )
        check_quantization(SimpleNamespace(**config, neuron_config=self))
        self._check_buckets("context_encoding_buckets", "max_context_length", context)
        self._check_buckets("token_generation_buckets", "seq_len", self.seq_len)
        block, blocks = self._check_blocks()
        settings = replace(
            self, max_context_length=context, ctx_batch_size=prompts, pa_block_size=block, pa_num_blocks=blocks
        )
        check_encoding(settings)
        return settings

    def keywords(self) -> dict[str, Any]:
        """NeuronConfig's, with torch_dtype by its name."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {**given, "is_block_kv_layout": self.is_prefix_caching}

    def _check_blocks(self) -> tuple[int | None, int | None]:
        """pa_block_size and pa_num_blocks."""
        if not self.is_prefix_caching:
            for name in ("pa_block_size", "pa_num_blocks"):
                if getattr(self, name) is not None:
                    raise SmolLM3Error(
                        f"{name} is {getattr(self, name)}, but is_prefix_caching is off: turn it on or leave the other out"
                    )
            return None, None
        block = 32 if self.pa_block_size is None else self.pa_block_size
        needed = self.batch_size * self.seq_len // max(block, 1)
        return block, needed if self.pa_num_blocks is None else self.pa_num_blocks

    def _check_buckets(self, name: str, limit_name: str, limit: int) -> None:
        buckets = getattr(self, name)
        if buckets is None:
            return
        if not self.enable_bucketing:
            raise SmolLM3Error(f"{name} is {buckets}, but enable_bucketing is off: turn it on or leave the buckets out")
        if not buckets or buckets != sorted(set(buckets)) or buckets[0] < 2 or buckets[-1] != limit:
            raise SmolLM3Error(
                f"{name} is {buckets}, allowed are rising whole numbers of at least 2 that end with {limit_name}, which is "
                f"{limit}"
            )


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

    @property
    def exported_because(self) -> str | None:
        """Why the CPU runtime runs its graphs as they were exported; None: they are compiled ahead of time, or a device's."""
        return self.manifest["exported_because"]

    @property
    def adapter(self) -> str | None:
        """Folder of the PEFT adapter that was merged."""
        return (self.manifest["model"].get("adapter") or {}).get("folder")

    def load(self):
        """The model, ready to generate. `ensure_neuronx` must have been called. SmolLM3Error for what the CPU runtime cannot
        load, such as graphs compiled for a CPU that can do more."""
        from .modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

        model = NeuronSmolLM3ForCausalLM(str(self.path))
        try:
            if self.place == "cpu" and not self.exported_because:
                from .cpu_graphs import run

                model.graphs = run.load(str(self.path))
                model.load_weights(str(self.path))
            else:
                model.load(str(self.path))
        except ValueError as error:
            if self.place == "neuron":
                raise
            raise SmolLM3Error(str(error)) from None
        return model

    def tokenizer(self):
        """The tokenizer that came with the checkpoint; SmolLM3Error where it had none."""
        from transformers import AutoTokenizer

        if not (self.path / "tokenizer.json").is_file():
            raise SmolLM3Error(f"{self.path}: no tokenizer.json in it; the checkpoint had none")
        return AutoTokenizer.from_pretrained(self.path)

    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation_config.json; empty where it had none."""
        path = self.path / "generation_config.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def eos_token_ids(self) -> list[int]:
        """Of generation_config.json, else of the config."""
        eos = self.generation_config().get("eos_token_id")
        if eos is None:
            eos = json.loads((self.path / "neuron_config.json").read_text()).get("eos_token_id")
        return [] if eos is None else eos if isinstance(eos, list) else [eos]

    def graph_files(self) -> list[str]:
        """What `compile` wrote: all but the weights and what was copied from the checkpoint."""
        return [f for f in self.manifest["files"] if not f.startswith("weights/") and f not in TOKENIZER_FILES]


def build_config(folder: Path, settings: Settings):
    """SmolLM3InferenceConfig of a checkpoint folder with these settings."""
    import torch
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    from .modeling_smollm3_3b import SmolLM3InferenceConfig

    settings = settings.checked(hf_config.read_config(folder))
    values = {**settings.keywords(), "torch_dtype": getattr(torch, settings.torch_dtype)}
    if settings.quantized:  # the library wants a path, and reads it only if it is to shard
        values["quantized_checkpoints_path"] = str(folder)
    # the library is told to skip sharding: shard_writer.py does it
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(
        save_sharded_checkpoint=True, skip_sharding=True, **values
    )
    return SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(str(folder)))


def compile_artifact(
    folder: Path,
    output: Path,
    settings: Settings,
    place: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    weights_only: bool = False,
    merge_adapter: Path | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    on_bytes: Callable[[int, int], None] = lambda count, total: None,
    on_part: Callable[[int, int], None] = lambda count, total: None,
) -> Artifact:
    """Compiles the checkpoint in `folder` to the artifact folder `output`; `ensure_neuronx` must have been called.

    What stands there already and is the same is taken as it is. `weights_only` keeps the graphs and shards the weights
    again. `merge_adapter` is the folder of a PEFT adapter that goes into them. `on_step` is called with each step's name
    as it begins, `on_bytes` with (bytes of weights just written, of all), `on_part` with (parts of CPU graphs just compiled
    ahead of time, of all). Every fault of config and checkpoint is told before anything is compiled; nothing stands at
    `output` unless it is whole. Raises SmolLM3Error.
    """
    on_step("checking the checkpoint")
    values = hf_config.read_config(folder)
    settings = settings.checked(values)
    if place == "neuron" and settings.is_continuous_batching and settings.ctx_batch_size != 1:
        raise SmolLM3Error(
            f"ctx_batch_size is {settings.ctx_batch_size}: is_continuous_batching on a device takes 1 prompt at a time"
        )
    if place == "cpu" and settings.quantized:
        raise SmolLM3Error("quantized: the CPU runtime computes with whole weights only; leave it out with --device cpu")
    adapter = None
    if merge_adapter is not None:
        from .adapter import Adapter

        adapter = Adapter(merge_adapter.absolute(), SimpleNamespace(**values))
    model = {"name": name or str(folder), "folder": str(folder), "revision": revision, **_identity(folder)}
    model["adapter"] = adapter and adapter.identity
    made_of = {"format": FORMAT, "place": place, "model": model, "settings": asdict(settings), "versions": versions()}
    made_of["exported_because"] = None
    if place == "cpu":
        made_of["exported_because"] = obstacle(settings.tp_degree, sum(size for _, size, _ in model["weights"]))
    standing = _standing(output, place, made_of, weights_only)
    if standing and not weights_only:
        on_step("nothing to do: the same artifact is there already")
        return standing
    from . import checkpoint

    checkpoint.check_checkpoint(folder, SimpleNamespace(**values))
    _check_json(folder)
    with staged(output) as staging:
        from .shard_writer import shard_bytes, write_shards

        config = build_config(folder, settings)
        seconds = time.perf_counter()
        if weights_only:
            on_step("keeping the graphs")
            for file in standing.graph_files():
                (staging / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(output / file, staging / file)
            made_of["exported_because"] = standing.exported_because
        else:
            from .modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

            on_step(f"compiling for tp_degree {settings.tp_degree}")
            try:
                model = NeuronSmolLM3ForCausalLM(str(folder), config)
            except NotImplementedError as error:  # the library's, or the CPU runtime's, for a setting that it has not
                raise SmolLM3Error(f"{error}; leave it out") from None
            model.compile(str(staging))
            if place == "cpu" and not made_of["exported_because"]:
                from .cpu_graphs.build import compile_ahead

                on_step("compiling the graphs ahead of time for this CPU")
                try:
                    compile_ahead(model.graphs, str(staging), on_part)
                except RuntimeError as error:
                    made_of["exported_because"] = str(error)
        compile_seconds = time.perf_counter() - seconds
        on_step("sharding the weights")
        total = shard_bytes(config)
        weights = write_shards(folder, config, staging / "weights", lambda count: on_bytes(count, total), adapter)
        for file in TOKENIZER_FILES:
            if (folder / file).is_file():
                shutil.copyfile(folder / file, staging / file)
        chat.write_vllm_template(folder, staging)
        on_step("writing artifact.json")
        others = {p.relative_to(staging).as_posix() for p in staging.rglob("*") if p.is_file()} - weights.keys()
        files = {file: {"size": (staging / file).stat().st_size, "sha256": sha256(staging / file)} for file in others}
        manifest = {
            **made_of,
            "seconds": {"compile": round(compile_seconds, 1), "all": round(time.perf_counter() - seconds, 1)},
            "files": dict(sorted((files | weights).items())),
        }
        (staging / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=2) + "\n")
    return open_artifact(output, place)


def _standing(output: Path, place: str, made_of: dict[str, Any], weights_only: bool) -> Artifact | None:
    """The artifact that stands at `output`, if it can be kept: the same one, or with `weights_only` its graphs."""
    if not (output / MANIFEST).is_file():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise SmolLM3Error(f"{output}: something is there that is not an artifact; choose another --output")
        if weights_only:
            raise SmolLM3Error(f"{output}: no artifact there whose graphs could be kept; compile without --weights-only")
        return None
    if not weights_only:
        with contextlib.suppress(SmolLM3Error):
            standing = open_artifact(output, place)
            check_loads(standing)
            return standing if {key: standing.manifest[key] for key in made_of} == made_of else None
        return None
    standing = open_artifact(output, place)
    check_loads(standing)
    wanted = {**made_of["settings"], "config_sha256": made_of["model"]["config_sha256"]}
    there = {**asdict(standing.settings), "config_sha256": standing.manifest["model"]["config_sha256"]}
    for key, value in wanted.items():
        if there[key] != value:
            raise SmolLM3Error(f"{output}: its graphs have {key} {there[key]}, not {value}; compile without --weights-only")
    return standing


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
    if manifest.pop("sha256", None) != _digest(manifest):
        raise SmolLM3Error(f"{path / MANIFEST}: damaged, its digest is not its own; compile again")
    if version != FORMAT:
        raise SmolLM3Error(f"{path}: artifact format {version}, this version reads {FORMAT}; compile again")
    artifact = Artifact(path, manifest)
    if artifact.place != place:
        raise SmolLM3Error(f"{path}: made for {artifact.place!r}, but this is {place!r}; compile it here")
    settings, made_by = artifact.settings, manifest["versions"]
    if tp_degree is not None and settings.tp_degree != tp_degree:
        raise SmolLM3Error(f"{path}: made for tp_degree {settings.tp_degree}, not {tp_degree}; compile it for {tp_degree}")
    for package, here in versions().items():
        if made_by.get(package) != here:
            raise SmolLM3Error(f"{path}: made with {package} {made_by.get(package)}, here is {here}; compile again")
    for file, entry in manifest["files"].items():
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


def _check_json(folder: Path) -> None:
    """SmolLM3Error for a file of the tokenizer's that is cut off or else no JSON."""
    for path in (folder / file for file in TOKENIZER_FILES if file.endswith(".json")):
        try:
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            raise SmolLM3Error(f"{path}: not valid JSON ({error}); download it again") from None


def _identity(folder: Path) -> dict[str, Any]:
    """Digests of the config and the weight index, and the weights' files: what another checkpoint would differ in."""
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    return {
        "config_sha256": sha256(folder / "config.json"),
        "index_sha256": sha256(index) if index.is_file() else None,
        "weights": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files],
    }


def sha256(path: Path, size: int | None = None) -> str:
    """Of the whole file, or of its first `size` bytes."""
    digest = hashlib.sha256()
    for chunk in _read(path, size):
        digest.update(chunk)
    return digest.hexdigest()


def crc32(path: Path) -> int:
    """Of the whole file."""
    value = 0
    for chunk in _read(path):
        value = zlib.crc32(chunk, value)
    return value


def _read(path: Path, size: int | None = None) -> Iterator[bytes]:
    left = path.stat().st_size if size is None else size
    with open(path, "rb") as file:
        while left > 0 and (chunk := file.read(min(left, 1 << 20))):
            yield chunk
            left -= len(chunk)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    """A weights file is checked by its size and header, with `verify` whole; any other file always whole."""
    if not path.is_file():
        raise SmolLM3Error(f"{path}: missing; compile again")
    if path.stat().st_size != entry["size"]:
        raise SmolLM3Error(f"{path}: {path.stat().st_size} bytes, {entry['size']} were written; compile again")
    header = entry.get("header")
    if header and sha256(path, header["size"]) != header["sha256"]:
        raise SmolLM3Error(f"{path}: damaged, the digest of its header differs from {MANIFEST}'s; compile again")
    if (header and verify and crc32(path) != entry["crc32"]) or (not header and sha256(path) != entry["sha256"]):
        raise SmolLM3Error(f"{path}: damaged, its digest differs from {MANIFEST}'s; compile again")
