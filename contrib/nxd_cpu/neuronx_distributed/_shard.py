# SPDX-License-Identifier: Apache-2.0
"""Cut a whole checkpoint into one state dict per rank, as NxD's `shard_checkpoint` does."""

import os

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"


def _run_hooks(module: nn.Module, checkpoint: dict[str, Tensor], prefix: str = "") -> None:
    """Let the modules pad and rearrange their whole weights. A module with a hook answers for its children."""
    if hasattr(module, "preshard_hook"):
        module.preshard_hook(checkpoint, prefix + "weight")
        if getattr(module, "add_bias", False):
            module.preshard_hook(checkpoint, prefix + "bias")
        return
    for name, child in module.named_children():
        _run_hooks(child, checkpoint, f"{prefix}{name}.")


def _cut(whole: Tensor, parameter: nn.Parameter, rank: int) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, ranks = parameter.partition_dim, parameter.num_partitions
    blocks = [whole]
    if hasattr(parameter, "fused_qkv"):  # q, k and v are cut one by one, so that a rank has its heads of each
        query = parameter.num_attention_heads * parameter.head_dim
        key = parameter.num_key_value_heads * parameter.head_dim
        blocks = whole.split([query, key, key], dim)
    parts = [block.chunk(ranks, dim)[rank % ranks] for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def shard_checkpoint(
    checkpoint: dict[str, Tensor], model: nn.Module, ranks: range, serialize_path: str | None = None
) -> list[dict[str, Tensor]]:
    """The state dicts of `ranks`, in the dtypes of `model`'s parameters. With a path they are written to
    files of their own there, one at a time, and none is returned.

    Takes over `checkpoint`. KeyError for a weight that a hook misses, RuntimeError for one of a wrong shape.
    """
    _run_hooks(model, checkpoint)
    parameters = dict(model.named_parameters())
    whole = {name: tensor.to(parameters[name].dtype) for name, tensor in checkpoint.items() if name in parameters}
    checkpoint.clear()
    shards = []
    for rank in ranks:
        shard = {name: _cut(tensor, parameters[name], rank).contiguous() for name, tensor in whole.items()}
        for name, tensor in shard.items():
            if tensor.shape != parameters[name].shape:
                raise RuntimeError(f"expected {tuple(parameters[name].shape)} for {name}, found {tuple(tensor.shape)}")
        if serialize_path is None:
            shards.append(shard)
        else:
            os.makedirs(serialize_path, exist_ok=True)
            save_file(shard, os.path.join(serialize_path, SHARD_FILE.format(rank=rank)))
    return shards
