# SPDX-License-Identifier: Apache-2.0
"""Compiles a checkpoint to an artifact folder, which appears under its name only when it is whole."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from ..model.config import DRAFT_TYPES, CheckpointConfig, fields_for_transformers, read_config
from ..model.draft import read_draft
from ..weights.digests import sampled_sha256, sha256, shard_entry
from ..weights.files import INDEX_FILE
from .compiled_graphs import check_graphs, compile_graphs, reason_to_keep_exported
from .folder import Artifact, open_artifact
from .manifest import FORMAT, MANIFEST, check_replaceable, manifest_digest, versions
from .settings import Settings
from .signature import sign
from .staging import resolved, staged
from .tokenizer import TEMPLATES, TOKENIZER_FILES, check_generation_config, write_tokenizer


@dataclass(frozen=True)
class Callbacks:
    """What is called while an artifact is made."""

    on_step: Callable[[str], None] = lambda step: None
    """With each step's name as it begins."""
    on_bytes: Callable[[int, int], None] = lambda count, total: None
    """With the bytes of weights that were just written, and all that will be."""
    on_part: Callable[[int, int], None] = lambda count, total: None
    """With the parts of CPU graphs that were just compiled ahead of time, and all of them."""


def build_config(folder: Path, settings: Settings, draft: Path | None = None):
    """Returns the SmolLM3InferenceConfig of a checkpoint folder with these settings.

    With `enable_fused_speculation` the config of the checkpoint in `draft` is nested in it, as the library wants it.
    `ensure_neuronx` must have been called. Raises SmolLM3Error for a config or settings that cannot run.
    """
    settings = settings.checked(read_config(folder))
    fused_spec_config = None
    if settings.enable_fused_speculation:
        from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig

        from ..modeling_smollm3_3b import NeuronSmolLM3Model

        draft_config = _inference_config(draft, settings.of_draft(), DRAFT_TYPES)
        fused_spec_config = FusedSpecNeuronConfig(
            NeuronSmolLM3Model, draft_config=draft_config, draft_model_path=str(draft)
        )
    return _inference_config(folder, settings, fused_spec_config=fused_spec_config)


def _inference_config(folder: Path, settings: Settings, model_types: tuple[str, ...] = DRAFT_TYPES[:1], **more: Any):
    import torch
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
    from transformers import SmolLM3Config

    from ..modeling_smollm3_3b import SmolLM3InferenceConfig

    keywords = {**settings.keywords(), "torch_dtype": getattr(torch, settings.torch_dtype)}
    if settings.quantized:  # the library wants a path, and reads it only if it is to shard
        keywords["quantized_checkpoints_path"] = str(folder)
    # the library is told to skip sharding: shard_writer.py does it, but for adapters
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(
        save_sharded_checkpoint=True, skip_sharding=settings.lora_config is None, **keywords
    )
    hf_config = SmolLM3Config.from_dict(fields_for_transformers(folder, model_types))
    return SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(hf_config=hf_config), **more)


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
    draft: Path | None = None,
    callbacks: Callbacks = Callbacks(),
) -> Artifact:
    """Compiles the checkpoint in `folder` to the artifact folder `output`; `ensure_neuronx` must have been called.

    `place` is "neuron", "emulated" or "cpu". `name` and `revision` say in the manifest what the checkpoint is. What
    stands at `output` already and is the same is taken as it is. `weights_only` keeps its graphs and shards the weights
    again. `merge_adapter` is the folder of a PEFT adapter that goes into them. `draft` is the folder of the checkpoint
    that guesses what this one verifies, with `enable_fused_speculation`.

    Raises SmolLM3Error. Every fault of config and checkpoint is told before anything is compiled, and nothing stands at
    `output` unless it is whole.
    """
    target = resolved(output)
    callbacks.on_step("checking the checkpoint")
    checkpoint_config = read_config(folder)
    settings = settings.checked(checkpoint_config)
    _check_place(settings, place)
    draft_config = _open_draft(draft, folder, settings)
    adapter = _open_adapter(merge_adapter, checkpoint_config)
    if settings.lora_config and (adapter or weights_only):
        raise SmolLM3Error(
            "adapters that are served unmerged are sharded with the weights by the library, as the graphs are "
            "compiled: merge none, and do not keep the graphs"
        )
    lora = _served(settings, checkpoint_config)
    made_of = _made_of(folder, settings, place, name or str(folder), revision, adapter, lora, draft)
    standing = _standing(output, place, made_of, weights_only)
    if standing and not weights_only:
        callbacks.on_step("nothing to do: the same artifact is there already")
        return standing
    check_replaceable(target)
    _check_checkpoints({folder: checkpoint_config, draft: draft_config})
    check_generation_config(folder, checkpoint_config.vocab_size)
    with staged(target) as staging:
        write_tokenizer(folder, staging)
        config = build_config(folder, settings, draft)
        began = time.perf_counter()
        if standing:
            callbacks.on_step("keeping the graphs")
            made_of["exported_because"] = _copy_graphs(standing, staging)
        else:
            made_of["exported_because"] = _write_graphs(folder, config, staging, made_of, callbacks)
        compile_seconds = time.perf_counter() - began
        weights = _write_weights(folder, config, staging, adapter, callbacks)
        callbacks.on_step("writing artifact.json")
        seconds = {"compile": round(compile_seconds, 1), "all": round(time.perf_counter() - began, 1)}
        _write_manifest(staging, {**made_of, "seconds": seconds}, weights)
        check_replaceable(target)  # once more: it took minutes
    return open_artifact(output, place)


def _check_place(settings: Settings, place: str) -> None:
    if place == "cpu" and settings.enable_fused_speculation:
        raise SmolLM3Error(
            "a draft is compiled with the model by the library alone, where its SDK or the emulated device is: the CPU "
            "runtime has no such graph, leave the draft out"
        )
    if place != "cpu" and settings.is_continuous_batching and settings.ctx_batch_size != 1:
        raise SmolLM3Error(
            f"ctx_batch_size is {settings.ctx_batch_size}: is_continuous_batching on a device takes 1 prompt at a time"
        )


def _open_draft(draft: Path | None, folder: Path, settings: Settings) -> CheckpointConfig | None:
    if settings.enable_fused_speculation != (draft is not None):
        raise SmolLM3Error(
            f"enable_fused_speculation is {settings.enable_fused_speculation} and the draft {draft}: give both or none"
        )
    if draft is None:
        return None
    config = read_draft(draft, folder, settings.seq_len)
    settings.of_draft().checked(config)
    return config


def _check_checkpoints(configs: dict[Path | None, CheckpointConfig | None]) -> None:
    from ..weights.checkpoint import check_checkpoint

    for folder, config in configs.items():
        if config is not None:
            check_checkpoint(folder, config)


def _served(settings: Settings, config: CheckpointConfig) -> dict[str, dict[str, Any]]:
    """Returns the identities of the adapters that are served unmerged, by their names."""
    folders = (settings.lora_config or {}).get("lora_ckpt_paths", {})
    return {name: _open_adapter(Path(folder), config).identity for name, folder in folders.items()}


def _open_adapter(merge_adapter: Path | None, config: CheckpointConfig) -> Any:
    if merge_adapter is None:
        return None
    from ..weights.adapter import Adapter

    return Adapter(merge_adapter.absolute(), config)


def _made_of(
    folder: Path,
    settings: Settings,
    place: str,
    name: str,
    revision: str | None,
    adapter: Any,
    lora: dict[str, dict[str, Any]],
    draft: Path | None,
) -> dict[str, Any]:
    """Returns what tells the artifact from any other, as its manifest has it."""
    model = {"name": name, "folder": str(folder), "revision": revision, **_identity(folder)}
    model["adapter"], model["lora"] = adapter and adapter.identity, lora
    model["draft"] = draft and {"folder": str(draft), **_identity(draft)}
    weight_bytes = sum(file["size"] for file in model["weights"])
    return {
        "format": FORMAT,
        "place": place,
        "model": model,
        "settings": asdict(settings),
        "versions": versions(),
        "exported_because": reason_to_keep_exported(place, settings.tp_degree, weight_bytes),
    }


def _copy_graphs(standing: Artifact, staging: Path) -> str | None:
    """Copies the graphs into `staging`; returns why the CPU runtime is to run them as they were exported."""
    for file in standing.graph_files():
        (staging / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(standing.path / file, staging / file)
    return standing.exported_because


def _write_graphs(
    folder: Path, config: Any, staging: Path, made_of: dict[str, Any], callbacks: Callbacks
) -> str | None:
    """Compiles the graphs into `staging`; returns why the CPU runtime is to run them as they were exported."""
    from ..modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    callbacks.on_step(f"compiling for tp_degree {config.neuron_config.tp_degree}")
    try:
        model = NeuronSmolLM3ForCausalLM(str(folder), config)
    except NotImplementedError as error:  # the library's, or the CPU runtime's, for a setting that it has not
        raise SmolLM3Error(f"{error}; leave it out") from None
    model.compile(str(staging))
    if made_of["place"] != "cpu" or made_of["exported_because"]:
        return made_of["exported_because"]
    callbacks.on_step("compiling the graphs ahead of time for this CPU")
    return compile_graphs(model.graphs, staging, callbacks.on_part)


def _write_weights(
    folder: Path, config: Any, staging: Path, adapter: Any, callbacks: Callbacks
) -> dict[str, dict[str, Any]]:
    """Writes the ranks' shards; returns their entries for the manifest."""
    from ..weights.shard_writer import Model, shard_bytes, write_shards

    if config.neuron_config.lora_config is not None:
        return {f"weights/{file.name}": shard_entry(file) for file in sorted((staging / "weights").iterdir())}
    callbacks.on_step("sharding the weights")
    configs, draft = (config.checkpoint_config, config.neuron_config), None
    if (fused := config.fused_spec_config) is not None:
        draft = Model(fused.draft_model_path, fused.draft_config.checkpoint_config, fused.draft_config.neuron_config)
    total = shard_bytes(*configs, draft)
    return write_shards(
        folder, *configs, staging / "weights", lambda count: callbacks.on_bytes(count, total), adapter, draft
    )


def _write_manifest(staging: Path, made_of: dict[str, Any], weights: dict[str, dict[str, Any]]) -> None:
    """Writes the manifest of all files in `staging`; `weights` are the entries of the shard files."""
    others = {path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()} - weights.keys()
    entries = {file: {"size": (staging / file).stat().st_size, "sha256": sha256(staging / file)} for file in others}
    manifest = {**made_of, "files": dict(sorted((entries | weights).items()))}
    digest = manifest_digest(manifest)
    has_code = made_of["place"] == "cpu" and made_of["exported_because"] is None
    signed = {"sha256": digest, "signature": sign(digest) if has_code else None}
    (staging / MANIFEST).write_text(json.dumps({**manifest, **signed}, indent=2) + "\n")


def _standing(output: Path, place: str, made_of: dict[str, Any], weights_only: bool) -> Artifact | None:
    """Returns the artifact at `output` if it can be kept: the same one, or with `weights_only` its graphs."""
    if not (output / MANIFEST).is_file():
        check_replaceable(output)
        if weights_only:
            raise SmolLM3Error(
                f"{output}: no artifact there whose graphs could be kept; compile without --weights-only"
            )
        return None
    if not weights_only:
        with contextlib.suppress(SmolLM3Error):
            standing = open_artifact(output, place)
            _check_graphs(standing)
            return standing if {key: standing.manifest[key] for key in made_of} == made_of else None
        return None
    standing = open_artifact(output, place)
    _check_graphs(standing)
    asked, kept = made_of["settings"] | _configs(made_of), asdict(standing.settings) | _configs(standing.manifest)
    for key, value in asked.items():
        if kept[key] != value:
            raise SmolLM3Error(
                f"{output}: its graphs have {key} {kept[key]}, not {value}; compile without --weights-only"
            )
    return standing


def _configs(manifest: dict[str, Any]) -> dict[str, str | None]:
    """Returns the digests of the config.json of the model and of its draft."""
    model = manifest["model"]
    return {"config_sha256": model["config_sha256"], "draft": (model.get("draft") or {}).get("config_sha256")}


def _check_graphs(standing: Artifact) -> None:
    """Raises SmolLM3Error for graphs that cannot be kept, such as those for a CPU that can do more."""
    if standing.has_foreign_code:
        raise SmolLM3Error(
            f"{standing.path}: the machine code in it is another user's or machine's; compile without --weights-only"
        )
    if standing.place == "cpu" and not standing.exported_because:
        check_graphs(standing.path)


def _identity(folder: Path) -> dict[str, Any]:
    """Returns what another checkpoint would differ in: digests of every file that goes into the artifact.

    Of weights it is one of samples; the time of the last change of the file itself, which no tool sets, tells the rest.
    """
    from ..weights.checkpoint import checkpoint_files

    index = folder / INDEX_FILE
    beside = [*(folder / file for file in TOKENIZER_FILES), *sorted((folder / TEMPLATES).glob("*"))]
    return {
        "config_sha256": sha256(folder / "config.json"),
        "index_sha256": sha256(index) if index.is_file() else None,
        "tokenizer": {f.relative_to(folder).as_posix(): sha256(f) for f in beside if f.is_file()},
        "weights": [_weights(folder, file) for file in sorted(set(checkpoint_files(folder).values()))],
    }


def _weights(folder: Path, file: Path) -> dict[str, Any]:
    status = file.stat()
    return {
        "file": file.relative_to(folder).as_posix(),
        "size": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "sampled_sha256": sampled_sha256(file),
    }
