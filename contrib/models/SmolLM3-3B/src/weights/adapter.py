# SPDX-License-Identifier: Apache-2.0
"""A PEFT LoRA adapter: merges it into a checkpoint's tensors, and tells whether NxD Inference can serve it unmerged.

Reference: PEFT's `merge_and_unload` on transformers. Of tied embeddings PEFT would change both when it merges one; here
the embedding and the head change each for itself, as in PEFT's forward before merging, which is what was trained.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import SmolLM3Error
from ..model.config import LARGEST_INTEGER, LARGEST_NUMBER, CheckpointConfig
from ..model.json_files import read_json
from .digests import sha256
from .lazy_rows import MergedRows
from .projections import expected_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# what these fields do is read here, shows in the tensors, or was over when training ended; any other must be unset
UNDERSTOOD = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights",
    "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "bias",
    "lora_bias", "fan_in_fan_out", "ensure_weight_tying", "auto_mapping", "base_model_name_or_path", "revision",
    "task_type", "inference_mode", "lora_dropout", "loftq_config", "eva_config", "corda_config", "megatron_core",
    "qalora_group_size", "runtime_config", "peft_version",
}  # fmt: skip
MERGE_INSTEAD = "merge it into the weights"
# ways to initialize an adapter that leave the checkpoint's weights as they are
INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
# how an adapter's tensor ends -> how the checkpoint's tensor ends that it changes, and its role in that
ROLES = {
    ".lora_A.weight": (".weight", "a"),
    ".lora_B.weight": (".weight", "b"),
    ".lora_B.bias": (".bias", "added"),
    ".lora_embedding_A": (".weight", "embedding_a"),
    ".lora_embedding_B": (".weight", "embedding_b"),
    ".lora_magnitude_vector": (".weight", "magnitude"),
    ".lora_magnitude_vector.weight": (".weight", "magnitude"),
}


class Adapter:
    """The adapter in `folder`, after it was checked that it fits a checkpoint with this config.

    Raises SmolLM3Error for what cannot be merged.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig):
        self.folder = Path(folder)
        self.peft_config = self._read_config()
        try:
            self.file = safe_open(self.folder / WEIGHTS, framework="pt")
            keys = list(self.file.keys())
        except FileNotFoundError:
            raise SmolLM3Error(f"{folder}: no {WEIGHTS} there; save the adapter with safetensors") from None
        except (SafetensorError, OSError) as error:
            raise SmolLM3Error(
                f"{self.folder / WEIGHTS}: not a whole safetensors file ({error}); copy it again"
            ) from None
        self.roles: dict[str, dict[str, str]] = {}
        for key in keys:
            name, role = _target(key)
            self.roles.setdefault(name, {})[role] = key
        self.scaling = {name: self._scaling(name, roles) for name, roles in self.roles.items()}
        self._check(config)

    @property
    def identity(self) -> dict[str, str]:
        """Returns its folder and its files' digests, which tell it from any other."""
        return {"folder": str(self.folder), **{name: sha256(self.folder / name) for name in (CONFIG, WEIGHTS)}}

    @property
    def rank(self) -> int:
        """Returns the largest rank of its pairs, at least 1."""
        halves = (roles[role] for roles in self.roles.values() for role in ("a", "embedding_a") if role in roles)
        return max((self._shape(key)[0] for key in halves), default=1)

    def merged(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """Merges the adapter into `tensor`, the checkpoint's of that name (without prefix).

        Returns a tensor, or MergedRows, which compute it when rows of it are asked for.
        """
        roles = self.roles.get(name, {})
        if "replaced" in roles:
            tensor = self._tensor(roles["replaced"])
        if "added" in roles:
            return tensor.to(dtype) + self._tensor(roles["added"]).float() * self.scaling[name]
        if "embedding_a" in roles:
            a, b = self._tensor(roles["embedding_b"]).T, self._tensor(roles["embedding_a"]).T
        elif "a" in roles:
            a, b = self._tensor(roles["a"]), self._tensor(roles["b"])
        else:
            return tensor
        magnitude = self._tensor(roles["magnitude"]) if "magnitude" in roles else None
        return MergedRows(tensor, a, b, self.scaling[name], magnitude, dtype)

    def _tensor(self, key: str) -> torch.Tensor:
        return self.file.get_tensor(key)

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(key).get_shape())

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        if not path.exists():
            raise SmolLM3Error(f"{self.folder}: no {CONFIG} there; pass the folder of a PEFT adapter")
        peft_config = read_json(path, "copy the file again")
        peft_type = peft_config.get("peft_type") if isinstance(peft_config, dict) else peft_config
        if not isinstance(peft_config, dict) or peft_type != "LORA":
            raise SmolLM3Error(f"{path}: peft_type is {peft_type!r}, only 'LORA' can be merged")
        for name, value in peft_config.items():
            if value and name not in UNDERSTOOD:
                raise SmolLM3Error(f"{path}: {name} is {value!r}, which cannot be merged into the weights here")
        for name in ("rank_pattern", "alpha_pattern"):
            if peft_config.get(name) is None:
                peft_config.pop(name, None)
            elif not isinstance(peft_config[name], dict):
                raise SmolLM3Error(
                    f"{path}: {name} is {peft_config[name]!r}, allowed is an object from patterns to numbers"
                )
        if peft_config.get("init_lora_weights") not in INITIALIZATIONS:
            raise SmolLM3Error(
                f"{path}: init_lora_weights is {peft_config['init_lora_weights']!r}: it was trained on changed "
                "weights, not the checkpoint's; save it with PEFT's path_initial_model_for_weight_conversion"
            )
        return peft_config

    def _scaling(self, name: str, roles: dict[str, str]) -> float:
        """Returns lora_alpha over the rank, or over its root; of each pattern's entries the first that fits holds."""
        path, module = self.folder / CONFIG, name.rpartition(".")[0]
        module = module if module == "lm_head" else f"model.{module}"
        alpha = self._from_pattern("alpha_pattern", "lora_alpha", module)
        rank = self._from_pattern("rank_pattern", "r", module)
        is_right = type(alpha) in (int, float) and abs(alpha) <= LARGEST_NUMBER
        if not is_right or type(rank) is not int or not 1 <= rank <= LARGEST_INTEGER:
            raise SmolLM3Error(
                f"{path}: lora_alpha is {alpha!r:.40} and r {rank!r:.40} for {module}, allowed are a number up to "
                f"{LARGEST_NUMBER:g} and a whole number of at least 1"
            )
        for key in (roles[role] for role in ("a", "embedding_a") if role in roles):
            if self._shape(key)[0] != rank:
                raise SmolLM3Error(f"{self.folder}: {key} has rank {self._shape(key)[0]}, {CONFIG} says {rank}")
        return alpha / (math.sqrt(rank) if self.peft_config.get("use_rslora") else rank)

    def _from_pattern(self, pattern_name: str, default_name: str, module: str) -> Any:
        for pattern, value in self.peft_config.get(pattern_name, {}).items():
            try:
                fits = re.fullmatch(rf"(.*\.)?({pattern})", module)
            except re.error as error:
                raise SmolLM3Error(
                    f"{self.folder / CONFIG}: {pattern_name} has {pattern!r}, which is no regular expression ({error})"
                ) from None
            if fits:
                return value
        return self.peft_config.get(default_name)

    def _check(self, config: CheckpointConfig) -> None:
        if not self.roles:
            raise SmolLM3Error(f"{self.folder / WEIGHTS}: no tensors in it")
        shapes = expected_shapes(config)
        shapes.setdefault("lm_head.weight", shapes["embed_tokens.weight"])
        for name, roles in self.roles.items():
            if name not in shapes:
                reason = (
                    "lora_bias needs a bias to add to" if "added" in roles else "it fits no tensor of the checkpoint"
                )
                raise SmolLM3Error(f"{self.folder}: {next(iter(roles.values()))}: {reason}; there is no {name}")
            shape = shapes[name]
            rank = next((self._shape(roles[role])[0] for role in ("a", "embedding_a") if role in roles), 0)
            expected = {
                "replaced": shape, "added": shape, "magnitude": shape[:1],
                "a": (rank, shape[-1]), "b": (shape[0], rank),
                "embedding_a": (rank, shape[0]), "embedding_b": (shape[-1], rank),
            }  # fmt: skip
            for pair in (("a", "b"), ("embedding_a", "embedding_b")):
                halves = [roles[role] for role in pair if role in roles]
                if len(halves) == 1:
                    raise SmolLM3Error(f"{self.folder / WEIGHTS}: {halves[0]} is there without its other half")
            for role, key in roles.items():
                if self._shape(key) != expected[role]:
                    raise SmolLM3Error(
                        f"{self.folder}: {key} has shape {self._shape(key)}, the checkpoint asks for {expected[role]}; "
                        "it is an adapter of another model"
                    )
            if "magnitude" in roles and "a" not in roles:
                raise SmolLM3Error(f"{self.folder}: {roles['magnitude']}: use_dora on an embedding is not supported")


def serving_config(folders: Mapping[str, Path], config: CheckpointConfig, batch_size: int) -> dict[str, Any]:
    """Returns the `lora_config` (fields of LoraServingConfig) that serves the adapters in these folders, by name.

    An adapter's id is its name's place in `lora_ckpt_paths`, which are sorted; the id after the last is a place of
    zeros, for rows that are to have none. Raises SmolLM3Error for an adapter that does not fit the checkpoint.
    """
    adapters = {name: Adapter(folders[name].absolute(), config) for name in sorted(folders)}
    ranks = [adapter.rank for adapter in adapters.values()]
    targets = {
        name.split(".")[-2] for adapter in adapters.values() for name, roles in adapter.roles.items() if "a" in roles
    }
    return {
        "max_loras": len(adapters) + 1,
        "max_lora_rank": max(ranks),
        "batch_size": batch_size,
        "target_modules": sorted(targets),
        "lora_ckpt_paths": {name: str(adapter.folder) for name, adapter in adapters.items()},
    }


def check_serving(config: CheckpointConfig, neuron_config: Any) -> None:
    """Raises SmolLM3Error for a `lora_config` (LoraServingConfig) that the library would serve wrongly, or not."""
    lora_config, tp_degree = neuron_config.lora_config, neuron_config.tp_degree
    if not hasattr(lora_config, "target_modules"):  # None, or not made a LoraServingConfig of
        return
    if neuron_config.quantized:
        raise SmolLM3Error(
            f"lora_config: adapters on quantized weights were never checked with this model; {MERGE_INSTEAD}"
        )
    if lora_config.batch_size != neuron_config.batch_size:
        raise SmolLM3Error(
            f"lora_config.batch_size is {lora_config.batch_size}, batch_size {neuron_config.batch_size}: make them "
            "equal"
        )
    if config.hidden_size % tp_degree:
        raise SmolLM3Error(f"lora_config: tp_degree {tp_degree} does not divide hidden_size, {config.hidden_size}")
    changes_heads = config.plan(tp_degree).kv_expansion > 1 or config.num_attention_heads % tp_degree
    for names, is_wrong, reason in (
        (("embed_tokens", "lm_head"), True, "the library leaves it out"),
        (("q_proj", "k_proj", "v_proj"), neuron_config.fused_qkv, "with fused_qkv the library leaves it out"),
        (
            ("q_proj", "k_proj", "v_proj", "o_proj"), changes_heads,
            f"tp_degree {tp_degree} changes the heads, and the adapter's would stay as they are",
        ),
    ):  # fmt: skip
        targets = [name for name in names if name in lora_config.target_modules]
        if targets and is_wrong:
            raise SmolLM3Error(f"lora_config has an adapter for {targets[0]}, but {reason}; {MERGE_INSTEAD}")
    for folder in {**lora_config.lora_ckpt_paths, **lora_config.lora_ckpt_paths_cpu}.values():
        if Path(folder).is_dir():
            _check_served(Adapter(folder, config), lora_config.max_lora_rank)


def _check_served(adapter: Adapter, max_lora_rank: int) -> None:
    path = adapter.folder / CONFIG
    for name in ("alpha_pattern", "use_dora", "lora_bias", "modules_to_save"):
        if adapter.peft_config.get(name):
            raise SmolLM3Error(
                f"{path}: {name} is {adapter.peft_config[name]!r}, which the library ignores; {MERGE_INSTEAD}"
            )
    if not isinstance(adapter.peft_config.get("target_modules"), list) or not adapter.peft_config.get("lora_alpha"):
        raise SmolLM3Error(
            f"{path}: the library wants a list of target_modules and a lora_alpha above 0; {MERGE_INSTEAD}"
        )
    for roles in adapter.roles.values():
        if set(roles) != {"a", "b"}:
            raise SmolLM3Error(
                f"{adapter.folder}: {next(iter(roles.values()))} is ignored by the library; {MERGE_INSTEAD}"
            )
        rank = adapter._shape(roles["a"])[0]
        if rank == 1:  # it squeezes the tensor, and ends with an IndexError
            raise SmolLM3Error(
                f"{adapter.folder}: {roles['a']} has rank 1, the library serves rank 2 and more; {MERGE_INSTEAD}"
            )
        if rank > max_lora_rank:
            raise SmolLM3Error(
                f"{adapter.folder}: {roles['a']} has rank {rank}, max_lora_rank is {max_lora_rank}; raise it"
            )


def _target(key: str) -> tuple[str, str]:
    """Returns which tensor of the checkpoint (without prefix) an adapter's tensor changes, and its role in that."""
    name = key.removeprefix("base_model.model.").removeprefix("model.")
    for ending, (target, role) in ROLES.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + target, role
    return name.replace(".base_layer.", "."), "replaced"
