# SPDX-License-Identifier: Apache-2.0
"""GGUF checkpoints of the architecture smollm3, as llama.cpp's converter lays them out.

Reference: llama.cpp's conversion/llama.py and conversion/smollm3.py, and its graph of smollm3. What differs from
transformers' checkpoint: the names; the rows of q_proj and k_proj, reordered within each head of EVERY layer, rotary or
not; one-dimensional tensors, which are always float32; the embedding, which serves as the head where there is no
`output.weight`. Nothing in the file says which layers are rotary: llama.cpp leaves RoPE out in every fourth one.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import SmolLM3Error
from ...model import dtypes
from ...model.config import NO_ROPE_LAYER_INTERVAL, CheckpointConfig, read_config_file, resolve_config
from .foreign import ForeignCheckpoint, ForeignTensor, copy_beside, parser, read_bytes
from .gguf_tokenizer import token_ids, write_tokenizer

ARCHITECTURE = "smollm3"
OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
KEYS = {  # of the metadata, behind "smollm3."
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "attention.key_length": "head_dim",
}
SCALING_KEYS = {  # behind "smollm3.rope.scaling."
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
SAME_AS_HEAD_DIM = ("attention.value_length", "rope.dimension_count")
WITHOUT_EFFECT = ("rope.scaling.finetuned",)
# safetensors' names of dtypes are GGUF's
DTYPES = {dtypes.DTYPES[name].safetensors_name: getattr(torch, name) for name in dtypes.MODEL_DTYPES}
QUANTIZED_TO = torch.bfloat16  # what the device computes in
PART = 1 << 24  # bytes of float32 that a quantized tensor is worked through in


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: `kind` is its GGMLQuantizationType, `shape` in transformers' order, `offset` in bytes."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    offset: int


def open_gguf(path: Path, folder: Path | None) -> ForeignCheckpoint:
    """Opens the GGUF file `path`; configuration and tokenizer are `folder`'s where it has them, else the file's.

    It reads headers and the one-dimensional tensors. Raises SmolLM3Error for what is not SmolLM3 or cannot be read.
    """
    metadata, stored = _read_headers(path)
    config = _config(path, metadata, stored)
    resolved = resolve_config(config)
    if folder is not None and (folder / "config.json").is_file():
        resolved = _config_beside(path, folder / "config.json", resolved)
    tensors = [_tensor(path, tensor, resolved.head_dim) for tensor in stored]
    matrices = next(tensor.dtype for tensor in tensors if tensor.name == "embed_tokens.weight")
    tensors = [_narrowed(tensor, matrices) if len(tensor.shape) == 1 else tensor for tensor in tensors]
    config["torch_dtype"] = str(matrices).removeprefix("torch.")
    quantized = sorted({tensor.kind.name for tensor in stored} - set(DTYPES))

    def write_beside(output: Path) -> list[str]:
        notes = []
        if quantized:
            notes.append(
                f"it was quantized ({', '.join(quantized)}) and is now bfloat16: what quantizing lost is not back"
            )
        if folder is not None:
            copy_beside(folder, output)
        if folder is None or not (folder / "config.json").is_file():
            (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if folder is None or not (folder / "tokenizer.json").is_file():
            notes += write_tokenizer(metadata, output)
        return notes

    return ForeignCheckpoint("GGUF", path, resolved, tensors, write_beside)


def _read_headers(path: Path) -> tuple[dict[str, Any], list[Stored]]:
    """Returns the metadata and where each tensor lies.

    The package's reader, which is let go here, takes 0.6 GB for a large vocabulary.
    """
    gguf = parser("gguf")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        stored = [
            Stored(t.name, t.tensor_type, tuple(int(size) for size in reversed(t.shape)), int(t.data_offset))
            for t in reader.tensors
        ]
    except OSError as error:
        raise SmolLM3Error(f"{path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SmolLM3Error(f"{path}: not a whole GGUF file ({reason}); download it again") from None
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise SmolLM3Error(
            f"{path}: general.architecture is {architecture!r}, this package runs {ARCHITECTURE!r} and no other"
        )
    if reader.byte_order != "I":
        raise SmolLM3Error(f"{path}: of the other byte order; convert it with the package's gguf-convert-endian")
    if (count := metadata.get("split.count", 1)) > 1:
        raise SmolLM3Error(f"{path}: one of {count} files; merge them first: llama-gguf-split --merge FIRST OUTPUT")
    return metadata, stored


def _config(path: Path, metadata: dict[str, Any], stored: list[Stored]) -> dict[str, Any]:
    """Makes a config.json of what the metadata says and llama.cpp takes for granted."""
    settings = {
        key.removeprefix(f"{ARCHITECTURE}."): v for key, v in metadata.items() if key.startswith(f"{ARCHITECTURE}.")
    }
    names = {tensor.name for tensor in stored}
    fields = {"model_type": ARCHITECTURE, "architectures": ["SmolLM3ForCausalLM"], "hidden_act": "silu"}
    fields |= {name: _plain(settings.pop(key)) for key, name in KEYS.items() if key in settings}
    fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
    fields.setdefault("rope_theta", 10000.0)  # what llama.cpp takes where the key is absent
    embedding = next((tensor for tensor in stored if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise SmolLM3Error(f"{path}: token_embd.weight is missing; a whole model is expected, not a part of one")
    fields.setdefault("vocab_size", embedding.shape[0])
    fields["rope_scaling"] = _rope_scaling(settings)
    fields |= {
        "no_rope_layer_interval": NO_ROPE_LAYER_INTERVAL,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        **token_ids(metadata),
    }
    try:
        resolved = resolve_config(fields)
    except SmolLM3Error as error:
        raise SmolLM3Error(f"{path}: its metadata say: {error}") from None
    for key in SAME_AS_HEAD_DIM:
        if settings.pop(key, resolved.head_dim) != resolved.head_dim:
            raise SmolLM3Error(
                f"{path}: {ARCHITECTURE}.{key} is not the {resolved.head_dim} of a head, as SmolLM3 has it"
            )
    for key in settings.keys() - set(WITHOUT_EFFECT):
        raise SmolLM3Error(f"{path}: {ARCHITECTURE}.{key} is {settings[key]!r}, which SmolLM3 does not have")
    return {**fields, "no_rope_layers": resolved.no_rope_layers}


def _rope_scaling(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Takes config.json's rope_scaling out of `settings`; returns None where there is none."""
    keys = {f"rope.scaling.{key}": name for key, name in SCALING_KEYS.items()}
    scaling = {name: _plain(settings.pop(key)) for key, name in keys.items() if key in settings}
    rope_type = scaling.get("rope_type", "linear" if "factor" in scaling else "none")  # llama.cpp's default
    return None if rope_type == "none" else {**scaling, "rope_type": rope_type}


def _config_beside(path: Path, file: Path, metadata_config: CheckpointConfig) -> CheckpointConfig:
    """Reads the config in `file`, which knows the NoPE schedule. Raises SmolLM3Error where it is another model's."""
    config = read_config_file(file)
    for name in (*KEYS.values(), "rope_scaling"):
        value, metadata_value = getattr(config, name), getattr(metadata_config, name)
        if value != metadata_value:
            raise SmolLM3Error(
                f"{file}: {name} is {value!r}, in {path.name} it is {metadata_value!r}: one of the two is another "
                "model's; name the file itself to go by it alone"
            )
    return config


def _plain(value: Any) -> Any:
    """Returns a float32 as the shortest number that it can be meant for: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tensor(path: Path, stored: Stored, head_dim: int) -> ForeignTensor:
    module, _, suffix = stored.name.rpartition(".")
    block, _, layer_module = module.removeprefix("blk.").partition(".")
    if module in OUTER:
        name = f"{OUTER[module]}.{suffix}"
    elif module.startswith("blk.") and block.isdecimal() and layer_module in LAYER:
        name = f"layers.{block}.{LAYER[layer_module]}.{suffix}"
    elif stored.name == "rope_freqs.weight":
        raise SmolLM3Error(f"{path}: {stored.name} scales RoPE (llama3), and the file does not say by which factors")
    else:
        raise SmolLM3Error(f"{path}: {stored.name} is no tensor of SmolLM3")
    _check_kind(path, stored)
    is_permuted = layer_module in ("attn_q", "attn_k")

    def parts() -> Iterator[torch.Tensor]:
        for rows in _rows(path, stored, whole=is_permuted):
            yield unpermuted(rows, head_dim) if is_permuted else rows

    return ForeignTensor(name, stored.name, stored.shape, DTYPES.get(stored.kind.name, QUANTIZED_TO), parts)


def unpermuted(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Puts the rows [heads * head_dim, ...] of q_proj or k_proj into transformers' order.

    llama.cpp rotates neighbouring pairs, transformers the two halves of a head: its converter puts row i of the first
    half and row i of the second one beside each other.
    """
    if len(rows) % head_dim:  # the shape is refused before anything is read
        return rows
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape).contiguous()


def _check_kind(path: Path, stored: Stored) -> None:
    gguf = parser("gguf")
    if stored.kind.name in DTYPES:
        return
    block, size = gguf.GGML_QUANT_SIZES[stored.kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), stored.kind)
    except NotImplementedError:
        raise SmolLM3Error(
            f"{path}: {stored.name} is {stored.kind.name}, which the package gguf cannot read; use a file of another "
            "kind, e.g. BF16 or Q8_0"
        ) from None


def _rows(path: Path, stored: Stored, whole: bool) -> Iterator[torch.Tensor]:
    """Yields the tensor by rows, `whole` or in parts; a quantized one is dequantized in float32 and rounded once."""
    gguf = parser("gguf")
    block, size = gguf.GGML_QUANT_SIZES[stored.kind]
    *outer, width = stored.shape
    row_bytes = width // block * size
    count = math.prod(outer)
    step = count if whole else max(1, PART // (width * 4))
    for first in range(0, count, step):
        length = min(step, count - first)
        data = read_bytes(path, [(stored.offset + first * row_bytes, length * row_bytes)])
        if stored.kind.name in DTYPES:
            tensor = data.view(DTYPES[stored.kind.name])
        else:
            dequantized = gguf.quants.dequantize(data.numpy().reshape(length, row_bytes), stored.kind)
            tensor = torch.from_numpy(dequantized).to(QUANTIZED_TO)
        yield tensor.reshape(length, width) if outer else tensor.reshape(width)


def _narrowed(tensor: ForeignTensor, dtype: torch.dtype) -> ForeignTensor:
    """Returns a one-dimensional tensor, float32 in every file, in the dtype of the matrices if that loses nothing."""
    (wide,) = tensor.parts()
    narrow = wide.to(dtype)
    if not torch.equal(narrow.to(wide.dtype), wide):
        return tensor
    return ForeignTensor(tensor.name, tensor.stored_name, tensor.shape, dtype, lambda: iter([narrow]))
