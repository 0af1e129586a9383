# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint folder and what NxD Inference is given of it.

Reading (`checkpoint_files`, `check_checkpoint`, `load_state_dict`) names every fault before anything is compiled.
Converting (`to_neuron_state_dict`) does what the library does not do or does wrong: it drops leftovers and a head
beside tied embeddings, fuses QKV, expands KV heads for CONVERT_TO_MHA, and adds the ranks.
"""

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import SmolLM3Error
from ..model.config import INSTEAD, CheckpointConfig, check_format
from ..model.dtypes import DTYPES, MODEL_DTYPES
from ..model.heads import ShardingPlan, padded_size
from ..model.json_files import read_json
from .files import INDEX_FILE, PREFIX, SINGLE_FILE, is_inside
from .padding import pad_with_zeros
from .projections import PROJECTIONS, QKV, expected_shapes
from .quantization import least_scale, quantized_linears

logger = logging.getLogger("Neuron")

LEFTOVER = "rotary_emb.inv_freq"  # a buffer that old versions of transformers saved
DROPPED_HEAD = (
    "lm_head.weight differs from embed_tokens.weight, but tie_word_embeddings is true: lm_head.weight is dropped, as "
    "transformers does; set tie_word_embeddings to false to use it"
)
COMPARED_ROWS = 4096  # at a time
STORED_DTYPES = tuple(DTYPES[name].safetensors_name for name in MODEL_DTYPES)
# the last part of names that gptq and awq, bitsandbytes, compressed-tensors and fp8 checkpoints hold
QUANTIZED_TENSORS = (
    "qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB", "weight_packed", "weight_scale",
    "weight_scale_inv",
)  # fmt: skip


def checkpoint_files(folder: str | Path) -> dict[str, Path]:
    """Maps each tensor's name, as in the files, to the file that holds it.

    An index wins over a stray model.safetensors beside it. Raises SmolLM3Error for files that are missing or damaged.
    """
    folder = Path(folder)
    index = folder / INDEX_FILE
    if os.path.lexists(index):
        content = read_json(index, "download the file again")
        try:
            weight_map = content["weight_map"]
            files = {name: folder / file for name, file in weight_map.items()}
            outside = next((file for file in weight_map.values() if not is_inside(file)), None)
        except (KeyError, TypeError, AttributeError) as error:
            raise SmolLM3Error(f"{index}: not a weight index ({error!r}); download the file again") from None
        if outside is not None:
            raise SmolLM3Error(f"{index}: it names {outside!r}, which is not in its folder; download the file again")
    elif (folder / SINGLE_FILE).is_file():
        files = {name: folder / SINGLE_FILE for name in _names_in(folder / SINGLE_FILE)}
    else:
        check_format(folder)
        raise SmolLM3Error(f"{folder}: neither {INDEX_FILE} nor {SINGLE_FILE} there; only safetensors are read")
    for file, names in _names_by_file(files):
        if not file.is_file():
            raise SmolLM3Error(f"{file}: missing, but {INDEX_FILE} names it; download it again")
        stored_names = set(_names_in(file))
        missing = [name for name in names if name not in stored_names]
        if missing:
            raise SmolLM3Error(f"{file}: {missing[0]} is not in it, but {INDEX_FILE} says so; download it again")
    return files


def check_checkpoint(folder: str | Path, config: CheckpointConfig, quantized: Collection[str] = ()) -> dict[str, Path]:
    """Returns `checkpoint_files` after checking names and shapes against the config; it reads headers only.

    `quantized` names the projections that NxD Inference quantized, see `quantized_linears`. Raises SmolLM3Error for a
    checkpoint that does not fit.
    """
    files = checkpoint_files(folder)
    _check_prefix(files, folder)
    shapes = {}
    for file, names in _names_by_file(files):
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                dtype, shape = tensors.get_slice(name).get_dtype(), tensors.get_slice(name).get_shape()
                is_foreign = dtype not in STORED_DTYPES or name.split(".")[-1] in QUANTIZED_TENSORS
                if is_foreign and _without_prefix(name).rpartition(".")[0] not in quantized:
                    raise SmolLM3Error(
                        f"{file}: {name} is {dtype}, as in a quantized checkpoint, which is not read; {INSTEAD}"
                    )
                shapes[_without_prefix(name)] = tuple(shape)
    _check_names(shapes, config, str(folder), quantized)
    for name, shape in expected_shapes(config).items():
        if shapes[name] != shape:
            raise SmolLM3Error(f"{folder}: {name} has shape {shapes[name]}, config.json asks for {shape}")
    return files


def drops_head(folder: str | Path, config: CheckpointConfig) -> bool:
    """Returns whether the checkpoint has a head of its own which its tied embeddings take the place of."""
    files = checkpoint_files(folder)
    if not config.tie_word_embeddings or "lm_head.weight" not in files:
        return False
    embedding = next(name for name in files if _without_prefix(name) == "embed_tokens.weight")
    with (
        safe_open(files["lm_head.weight"], framework="pt") as head_file,
        safe_open(files[embedding], framework="pt") as embedding_file,
    ):
        head, embeddings = head_file.get_slice("lm_head.weight"), embedding_file.get_slice(embedding)
        return head.get_shape() != embeddings.get_shape() or any(
            not torch.equal(head[row : row + COMPARED_ROWS], embeddings[row : row + COMPARED_ROWS])
            for row in range(0, config.vocab_size, COMPARED_ROWS)
        )


def load_state_dict(folder: str | Path, config: CheckpointConfig, neuron_config: Any) -> dict[str, torch.Tensor]:
    """Maps names without prefix to tensors as they are stored.

    With `neuron_config.quantized` the checkpoint is one that NxD Inference quantized. Raises SmolLM3Error for a
    checkpoint that does not fit.
    """
    files = check_checkpoint(folder, config, quantized_linears(config, neuron_config))
    state_dict = {}
    for file, names in _names_by_file(files):
        with safe_open(file, framework="pt") as tensors:
            state_dict.update({_without_prefix(name): tensors.get_tensor(name) for name in names})
    return state_dict


def to_neuron_state_dict(
    state_dict: dict[str, torch.Tensor], config: CheckpointConfig, neuron_config: Any
) -> dict[str, torch.Tensor]:
    """Makes of the checkpoint's tensors (names without prefix) what NxD Inference's sharder takes.

    It changes `state_dict` and returns it. Raises SmolLM3Error for names that do not fit the config.
    """
    for name in [name for name in state_dict if name.endswith(LEFTOVER)]:
        del state_dict[name]
    quantized = quantized_linears(config, neuron_config)
    _check_names(state_dict, config, "the state dict", quantized)
    for linear in quantized:  # the library takes a scale without a dimension for one per channel
        state_dict[f"{linear}.scale"] = torch.atleast_1d(state_dict[f"{linear}.scale"])
    if config.tie_word_embeddings and "lm_head.weight" in state_dict and "lm_head" not in quantized:
        head = state_dict.pop("lm_head.weight")
        if not torch.equal(head, state_dict["embed_tokens.weight"]):
            logger.warning(DROPPED_HEAD)
    tp_degree, plan = neuron_config.tp_degree, config.plan(neuron_config.tp_degree)
    for layer in (f"layers.{layer_idx}" for layer_idx in range(config.num_hidden_layers)):
        for projection in PROJECTIONS:
            linear = f"{layer}.{projection.name}"
            if projection.out_features == "key_value_size" and plan.kv_expansion > 1:
                expand_kv_heads(state_dict, linear, plan)
            if projection.cut_features == "intermediate_size":
                pad_mlp(state_dict, linear, projection.cut_dim, config, neuron_config)
        if neuron_config.fused_qkv:
            fuse_qkv(state_dict, layer)
        # one tensor per key: safetensors refuses names that share memory
        state_dict[f"{layer}.self_attn.rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    state_dict["rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    if neuron_config.vocab_parallel:
        state_dict["embed_tokens.rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    return state_dict


def expand_kv_heads(state_dict: dict[str, torch.Tensor], linear: str, plan: ShardingPlan) -> None:
    """Repeats each KV head of k_proj or v_proj once per query head that reads it, in the order of the query heads."""
    for name in (f"{linear}.{kind}" for kind in ("weight", "bias", "scale")):
        tensor = state_dict.get(name)
        if tensor is not None and len(tensor) > 1:
            heads = tensor.unflatten(0, (plan.num_key_value_heads, -1))
            state_dict[name] = heads.repeat_interleave(plan.kv_expansion, dim=0).flatten(0, 1)


def pad_mlp(
    state_dict: dict[str, torch.Tensor], linear: str, dim: int, config: CheckpointConfig, neuron_config: Any
) -> None:
    """Pads dimension `dim` of a projection of the MLP with zeros to `padded_intermediate_size`.

    Without that the library pads the weight for the ranks, and not the bias beside it: so that is done here. Scales of
    the padding are the least that the library gives.
    """
    size = config.padded(neuron_config).intermediate_size
    weight = state_dict[f"{linear}.weight"]
    state_dict[f"{linear}.weight"] = pad_with_zeros(weight, dim, size)
    scale, bias = state_dict.get(f"{linear}.scale"), state_dict.get(f"{linear}.bias")
    if dim == 0 and scale is not None and len(scale) > 1:
        least = least_scale(neuron_config.quantization_dtype, per_channel=True)
        state_dict[f"{linear}.scale"] = torch.cat([scale, scale.new_full((size - len(scale), *scale.shape[1:]), least)])
    if dim == 0 and bias is not None:
        state_dict[f"{linear}.bias"] = pad_with_zeros(bias, 0, padded_size(size, neuron_config.tp_degree))


def fuse_qkv(state_dict: dict[str, torch.Tensor], layer: str) -> None:
    """Replaces q_proj, k_proj and v_proj with Wqkv, which has their rows one below the other."""
    for kind in ("weight", "bias", "scale"):
        names = [f"{layer}.{projection.name}.{kind}" for projection in QKV]
        if names[0] in state_dict:
            state_dict[f"{layer}.self_attn.Wqkv.{kind}"] = torch.cat([state_dict.pop(name) for name in names])


def _without_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def _check_prefix(names: Collection[str], folder: str | Path) -> None:
    """Raises SmolLM3Error where a wrapper of the model has left its own prefix on the names."""
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    prefixes = {name.removesuffix("embed_tokens.weight") for name in embeddings}
    if prefixes and not prefixes & {"", PREFIX}:
        raise SmolLM3Error(
            f"{folder}: the names of its tensors begin with {min(prefixes)!r}, which a wrapper of the model leaves "
            f"there, and not with {PREFIX!r}: save the model that is inside (DataParallel: .module, torch.compile: "
            "._orig_mod, PEFT: merge_and_unload())"
        )


def _names_by_file(files: dict[str, Path]) -> list[tuple[Path, list[str]]]:
    names: dict[Path, list[str]] = {}
    for name, file in files.items():
        names.setdefault(file, []).append(name)
    return sorted(names.items())


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise SmolLM3Error(f"{file}: not a whole safetensors file ({error}); download it again") from None


def _check_names(names: Collection[str], config: CheckpointConfig, origin: str, quantized: Collection[str]) -> None:
    expected = [*expected_shapes(config), *sorted(f"{linear}.scale" for linear in quantized)]
    allowed = {*expected, "lm_head.weight"}
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in allowed and not name.endswith(LEFTOVER)]
    if "lm_head.weight" in missing:
        raise SmolLM3Error(
            f"{origin}: lm_head.weight is missing, but tie_word_embeddings is false; one of the two is wrong"
        )
    if missing:
        raise SmolLM3Error(
            f"{origin}: {missing[0]} is missing{_more(missing)}; the checkpoint does not fit its config.json"
        )
    if unknown:
        raise SmolLM3Error(
            f"{origin}: {unknown[0]} is unknown{_more(unknown)}; the checkpoint does not fit its config.json"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
