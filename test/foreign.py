"""Checkpoints in Flax's and in llama.cpp's layout, made from a folder of safetensors: for the tests of imports.

Flax: as flax.serialization packs what transformers' Flax classes save. GGUF: as llama.cpp's converter lays SmolLM3 out,
with the `gguf` package's writer.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import gguf
import msgpack
import numpy as np
import torch
from safetensors import safe_open

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """One after the other, so that a large checkpoint need not fit into memory."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


def loaders_of(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = safe_open(file, "pt")
        found |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    return found


def copy_beside(source: Path, folder: Path) -> None:
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


# ---- Flax ----


def flax_leaf(tensor: torch.Tensor, chunk: int | None = None) -> object:
    """What flax.serialization packs for an array; for one of more than `chunk` bytes, flat arrays of that size."""
    if chunk and tensor.nbytes > chunk:
        flat = tensor.reshape(-1).split(chunk // tensor.itemsize)
        return {
            "__msgpack_chunked_array__": True,
            "shape": {str(dim): size for dim, size in enumerate(tensor.shape)},
            "chunks": {str(number): flax_leaf(part) for number, part in enumerate(flat)},
        }
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    packed = msgpack.packb((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data), use_bin_type=True)
    return msgpack.ExtType(1, packed)


def flax_path(name: str) -> tuple[str, ...]:
    *modules, kind = name.split(".")
    if kind == "weight" and "norm" not in modules[-1]:
        kind = "embedding" if modules[-1] == "embed_tokens" else "kernel"
    return (*modules, kind)


def flax_tree(source: Path, names: Sequence[str] | None = None, chunk: int | None = None) -> dict:
    """Maps of maps, as the names say; each leaf is a function that packs its array."""
    tree, loaders = {}, loaders_of(source)
    for name in names or loaders:
        *modules, leaf = flax_path(name)
        place = tree
        for module in modules:
            place = place.setdefault(module, {})

        def pack(load=loaders[name], is_kernel=leaf == "kernel"):
            return flax_leaf(load().T if is_kernel else load(), chunk)

        place[leaf] = pack
    return tree


def pack_tree(file: IO[bytes], tree: object) -> None:
    """What msgpack.packb writes, with one array in memory."""
    packer = msgpack.Packer(strict_types=True)
    if isinstance(tree, dict):
        file.write(packer.pack_map_header(len(tree)))
        for key, value in tree.items():
            file.write(packer.pack(key))
            pack_tree(file, value)
    elif callable(tree):
        pack_tree(file, tree())
    else:
        file.write(packer.pack(tree))


def write_flax(source: Path, folder: Path, shards: int = 1, chunk: int | None = None) -> Path:
    """`shards` files, with an index if there are several."""
    copy_beside(source, folder)
    names, weight_map = list(loaders_of(source)), {}
    for number in range(shards):
        of_shard = names[number::shards]
        file = "flax_model.msgpack" if shards == 1 else f"flax_model-{number + 1:05}-of-{shards:05}.msgpack"
        with open(folder / file, "wb") as opened:
            pack_tree(opened, flax_tree(source, of_shard, chunk))
        weight_map |= {"/".join(flax_path(name)): file for name in of_shard}
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index, indent=2))
    return folder


# ---- GGUF ----


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of q_proj or k_proj as llama.cpp wants them: of each head, 0, half, 1, half + 1, ..."""
    head_dim = len(tensor) // heads
    order = [row + half for row in range(head_dim // 2) for half in (0, head_dim // 2)]
    return tensor[[head * head_dim + row for head in range(heads) for row in order]]


def gguf_name(name: str) -> str:
    *modules, kind = name.removeprefix("model.").split(".")
    if modules[0] == "layers":
        return f"blk.{modules[1]}.{GGUF_NAMES['.'.join(modules[2:])]}.{kind}"
    return f"{GGUF_NAMES[modules[0]]}.{kind}"


def gguf_data(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quants.quantize(tensor.float().numpy(), kind)


def write_gguf(source: Path, path: Path, kind="BF16", pre: str = "smollm", edit=None, change=None) -> Path:
    """Matrices of `kind`, a name or a function of the tensor that returns one; vectors of F32. `edit(writer)` adds
    metadata; `change(name, data, kind)` returns another pair of data and kind, or None to leave the tensor out."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "smollm3", use_temp_file=True)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head_dim)
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_scaling(writer, config.get("rope_scaling") or {})
    if (source / "tokenizer.json").is_file():
        add_tokenizer(writer, source, config, pre)
    if edit:
        edit(writer)
    for name, tensor in tensors_of(source):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        tensor = permuted(tensor, config[heads]) if heads else tensor
        of_matrix = kind if isinstance(kind, str) else kind(tensor)
        stored_kind = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else of_matrix]
        pair = gguf_data(tensor, stored_kind), stored_kind
        pair = change(gguf_name(name), *pair) if change else pair
        if pair is not None:
            writer.add_tensor(gguf_name(name), pair[0], raw_dtype=pair[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_scaling(writer: gguf.GGUFWriter, scaling: dict) -> None:
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict, pre: str) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens = {at: (token, gguf.TokenType.NORMAL) for token, at in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    rows = [tokens.get(at, (f"[PAD{at}]", gguf.TokenType.UNUSED)) for at in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    for add, name in (
        (writer.add_bos_token_id, "bos_token_id"),
        (writer.add_eos_token_id, "eos_token_id"),
        (writer.add_pad_token_id, "pad_token_id"),
    ):
        if config.get(name) is not None:
            add(config[name])
    if (source / "chat_template.jinja").is_file():
        writer.add_chat_template((source / "chat_template.jinja").read_text())
