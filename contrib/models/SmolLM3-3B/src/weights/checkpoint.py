"""A Hugging Face checkpoint folder and what NxD Inference is given of it.

Reading (`checkpoint_files`, `check_checkpoint`, `load_state_dict`) names every fault before anything is compiled;
converting (`to_neuron_state_dict`) does what the library does not do or does wrong: leftovers, a head beside tied
embeddings, fused QKV, KV heads expanded for CONVERT_TO_MHA, the ranks.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import SmolLM3Error
from ..model.config import INSTEAD, check_format
from ..model.heads import ShardingPlan, padded, source_num_key_value_heads
from .quantization import quantized_linears

logger = logging.getLogger("Neuron")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIX = "model."
LEFTOVER = "rotary_emb.inv_freq"  # a buffer that old versions of transformers saved
STORED_DTYPES = ("BF16", "F16", "F32")
# by their last part: what gptq and awq, bitsandbytes, compressed-tensors and fp8 checkpoints hold beside or for a weight
QUANTIZED_TENSORS = (
    "qweight", "qzeros", "scales", "g_idx", "absmax", "quant_map", "SCB", "weight_packed", "weight_scale",
    "weight_scale_inv",
)  # fmt: skip


def checkpoint_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name as in the files -> the file that holds it. An index wins over a stray model.safetensors beside it."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SmolLM3Error(f"{index}: not a weight index ({error!r}); download the file again") from None
    elif (folder / SINGLE).is_file():
        files = {name: folder / SINGLE for name in _names_in(folder / SINGLE)}
    else:
        check_format(folder)
        raise SmolLM3Error(f"{folder}: neither {INDEX} nor {SINGLE} there; only safetensors are read")
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise SmolLM3Error(f"{file}: missing, but {INDEX} names it; download it again")
        stored = set(_names_in(file))
        lacking = [name for name, where in files.items() if where == file and name not in stored]
        if lacking:
            raise SmolLM3Error(f"{file}: {lacking[0]} is not in it, but {INDEX} says so; download it again")
    return files


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name without prefix -> shape, of every tensor that the checkpoint must hold.

    `config` has the resolved values of hf_config.py as attributes.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = source_num_key_value_heads(config) * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer_idx in range(config.num_hidden_layers):
        layer = f"layers.{layer_idx}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, (out_features, in_features, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (out_features,)
    return shapes


def check_checkpoint(folder: str | Path, config: Any, quantized: Collection[str] = ()) -> dict[str, Path]:
    """`checkpoint_files` after checking names and shapes against the config; reads headers only.

    `quantized`: the projections that NxD Inference quantized, see quantization.py.
    """
    files = checkpoint_files(folder)
    shapes = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as tensors:
            for name, where in files.items():
                if where == file:
                    stored = tensors.get_slice(name)
                    is_foreign = stored.get_dtype() not in STORED_DTYPES or name.split(".")[-1] in QUANTIZED_TENSORS
                    if is_foreign and _plain(name).rpartition(".")[0] not in quantized:
                        found = f"{file}: {name} is {stored.get_dtype()}, as in a quantized checkpoint"
                        raise SmolLM3Error(f"{found}, which is not read; {INSTEAD}")
                    shapes[_plain(name)] = tuple(stored.get_shape())
    _check_names(shapes, config, str(folder), quantized)
    for name, shape in expected_shapes(config).items():
        if shapes[name] != shape:
            raise SmolLM3Error(f"{folder}: {name} has shape {shapes[name]}, config.json asks for {shape}")
    return files


def load_state_dict(folder: str | Path, config: Any) -> dict[str, torch.Tensor]:
    """Name without prefix -> tensor, as stored; of a checkpoint quantized by NxD Inference if the config says quantized."""
    files = check_checkpoint(folder, config, quantized_linears(config))
    state_dict = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as tensors:
            for name, where in files.items():
                if where == file:
                    state_dict[_plain(name)] = tensors.get_tensor(name)
    return state_dict


def to_neuron_state_dict(state_dict: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors (names without prefix) as NxD Inference's sharder takes them; changes `state_dict`."""
    for name in [name for name in state_dict if name.endswith(LEFTOVER)]:
        del state_dict[name]
    quantized = quantized_linears(config)
    _check_names(state_dict, config, "the state dict", quantized)
    for linear in quantized:  # one for all may have no dimension, and the library takes it for one per channel then
        state_dict[f"{linear}.scale"] = torch.atleast_1d(state_dict[f"{linear}.scale"])
    if config.tie_word_embeddings and "lm_head.weight" in state_dict and "lm_head" not in quantized:
        head = state_dict.pop("lm_head.weight")
        if not torch.equal(head, state_dict["embed_tokens.weight"]):
            logger.warning(
                "lm_head.weight differs from embed_tokens.weight, but tie_word_embeddings is true: lm_head.weight is "
                "dropped, as transformers does; set tie_word_embeddings to false to use it"
            )
    tp_degree = config.neuron_config.tp_degree
    plan = ShardingPlan(tp_degree, config.num_attention_heads, source_num_key_value_heads(config))
    for layer_idx in range(config.num_hidden_layers):
        attention = f"layers.{layer_idx}.self_attn"
        if plan.kv_expansion > 1:
            expand_kv_heads(state_dict, attention, plan)
        if config.neuron_config.fused_qkv:
            fuse_qkv(state_dict, attention)
        for name in (f"layers.{layer_idx}.mlp.{linear}.bias" for linear in ("gate_proj", "up_proj") if config.mlp_bias):
            # the library pads the weights beside them and not these
            size = config.intermediate_size
            state_dict[name] = torch.nn.functional.pad(state_dict[name], (0, padded(size, tp_degree) - size))
        # one tensor per key: safetensors refuses names that share memory
        state_dict[f"{attention}.rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    state_dict["rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    if config.neuron_config.vocab_parallel:
        state_dict["embed_tokens.rank_util.rank"] = torch.arange(tp_degree, dtype=torch.int32)
    return state_dict


def expand_kv_heads(state_dict: dict[str, torch.Tensor], attention: str, plan: ShardingPlan) -> None:
    """Each KV head once per query head that reads it: whole heads, in the order of the query heads."""
    for name in (f"{proj}.{kind}" for proj in ("k_proj", "v_proj") for kind in ("weight", "bias", "scale")):
        tensor = state_dict.get(f"{attention}.{name}")
        if tensor is not None and len(tensor) > 1:
            heads = tensor.unflatten(0, (plan.num_key_value_heads, -1))
            state_dict[f"{attention}.{name}"] = heads.repeat_interleave(plan.kv_expansion, dim=0).flatten(0, 1)


def fuse_qkv(state_dict: dict[str, torch.Tensor], attention: str) -> None:
    """q_proj, k_proj and v_proj become Wqkv: their rows one after the other."""
    for kind in ("weight", "bias", "scale"):
        names = [f"{attention}.{proj}.{kind}" for proj in ("q_proj", "k_proj", "v_proj")]
        if names[0] in state_dict:
            state_dict[f"{attention}.Wqkv.{kind}"] = torch.cat([state_dict.pop(name) for name in names])


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise SmolLM3Error(f"{file}: not a whole safetensors file ({error}); download it again") from None


def _check_names(names: Any, config: Any, where: str, quantized: Collection[str]) -> None:
    expected = [*expected_shapes(config), *sorted(f"{linear}.scale" for linear in quantized)]
    allowed = {*expected, "lm_head.weight"}
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in allowed and not name.endswith(LEFTOVER)]
    if "lm_head.weight" in missing:
        raise SmolLM3Error(
            f"{where}: lm_head.weight is missing, but tie_word_embeddings is false; one of the two is wrong"
        )
    if missing:
        raise SmolLM3Error(
            f"{where}: {missing[0]} is missing{_more(missing)}; the checkpoint does not fit its config.json"
        )
    if unknown:
        raise SmolLM3Error(
            f"{where}: {unknown[0]} is unknown{_more(unknown)}; the checkpoint does not fit its config.json"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
