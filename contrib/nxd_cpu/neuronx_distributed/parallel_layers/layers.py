# SPDX-License-Identifier: Apache-2.0
"""Linear layers and the embedding, cut over the ranks.

A layer holds one rank's part of its weight. What the sharder needs to cut the whole weight is written on the parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_distributed._cpu import ThreadGroup, refuse, weight_device
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.utils import divide, get_padding_length, set_tensor_model_parallel_attributes


class BaseParallelLayer(nn.Module):
    """A layer made before `initialize_model_parallel` belongs to a group of one rank."""

    def __init__(self, device: torch.device | None = None):
        super().__init__()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()

    def _parameter(self, shape: tuple[int, ...], cut: int | None, init: Callable[[Tensor], Any]) -> nn.Parameter:
        """`cut` is the dimension along which the ranks share the whole one."""
        parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=weight_device()), requires_grad=False)
        if cut is not None:
            set_tensor_model_parallel_attributes(parameter, True, cut, 1, self._size)
        init(parameter)
        return parameter

    def _pad(self, state_dict: dict[str, Tensor], name: str, dim: int, value: float = 0) -> None:
        """Pad the whole weight `name` along `dim`. RuntimeError if it is not as long as the layer says."""
        if self.pad_size:
            whole, length = state_dict[name], self.weight.shape[dim] * self._size - self.pad_size
            if whole.shape[dim] != length:
                raise RuntimeError(f"{name} has {whole.shape[dim]} in dimension {dim}, not {length}")
            state_dict[name] = F.pad(whole, (0, 0) * (whole.dim() - 1 - dim) + (0, self.pad_size), value=value)


class ParallelEmbedding(BaseParallelLayer):
    """Token ids (...) -> embeddings (..., embedding_dim), the table cut along the vocabulary or the embedding."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[Any], Any] = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: ThreadGroup | None = None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        tile_cc: bool = False,
        collect_output: bool = True,
    ):
        super().__init__(device)
        refuse(
            max_norm=max_norm,
            sequence_parallel_enabled=sequence_parallel_enabled,
            tile_cc=tile_cc,
            collect_output=not collect_output and "False",
        )
        group = tensor_model_parallel_group or parallel_state.get_tensor_model_parallel_group()
        self.tensor_model_parallel_group, self._size = group, group.size()
        if not shard_across_embedding and self._size > 1 and not use_spmd_rank:
            raise NotImplementedError("the CPU runtime does not support a cut vocabulary without use_spmd_rank=True")
        self.shard_across_embedding = shard_across_embedding
        self.dtype, self.pad = dtype, pad
        self.weight_partition_dim = 1 if shard_across_embedding else 0
        whole = embedding_dim if shard_across_embedding else num_embeddings
        self.pad_size = get_padding_length(whole, self._size) if pad else 0
        self.num_embeddings = num_embeddings + (0 if shard_across_embedding else self.pad_size)
        self.embedding_dim = embedding_dim + (self.pad_size if shard_across_embedding else 0)
        part = divide(whole + self.pad_size, self._size)
        shape = (self.num_embeddings, part) if shard_across_embedding else (part, self.embedding_dim)
        self.rank_util = SPMDRank(self._size, self._size) if use_spmd_rank else None
        self.weight = self._parameter(shape, self.weight_partition_dim, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        if self.shard_across_embedding:
            output = F.embedding(input_.long(), self.weight)
            output = mappings.gather_from_tensor_model_parallel_region(output, self.tensor_model_parallel_group)
            return output[..., : self.embedding_dim - self.pad_size]
        if self._size == 1:
            return F.embedding(input_.long(), self.weight)
        local = input_.long() - self.weight.shape[0] * self.rank_util.get_rank().long()
        mine = (local >= 0) & (local < self.weight.shape[0])
        output = F.embedding(local * mine, self.weight) * mine.unsqueeze(-1).to(self.weight.dtype)
        return mappings.reduce_from_tensor_model_parallel_region(output, self.tensor_model_parallel_group)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the whole weight, whose name is `prefix`, with zeros."""
        self._pad(model_state_dict, prefix, self.weight_partition_dim)


def _kaiming(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


class BaseParallelLinear(BaseParallelLayer):
    def _set_up(self, group, stride, keep_master_weight, bias, dtype, skip_bias_add, pad) -> None:
        refuse(stride=stride > 1 and stride, keep_master_weight=keep_master_weight, skip_bias_add=skip_bias_add)
        self.tensor_parallel_group = group or parallel_state.get_tensor_model_parallel_group()
        self._size = self.tensor_parallel_group.size()
        self.add_bias, self.dtype, self.pad = bias, dtype, pad

    def _with_bias(self, output: Tensor) -> Tensor:
        return output if self.bias is None else output + self.bias


class ColumnParallelLinear(BaseParallelLinear):
    """(..., input_size) -> (..., output_size), or this rank's part of the outputs unless `gather_output`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[Any], Tensor] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: ThreadGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(device)
        refuse(sequence_parallel_enabled=sequence_parallel_enabled)
        group = tensor_model_parallel_group
        self._set_up(group, stride, keep_master_weight, bias, dtype, skip_bias_add, pad)
        self.pad_size = get_padding_length(output_size, pad_alignment_size_per_rank * self._size) if pad else 0
        self.input_size = input_size
        self.output_size = output_size + self.pad_size
        self.output_size_per_partition = divide(self.output_size, self._size)
        self.gather_output = gather_output
        self.keep_padded_output = keep_padded_output
        self.weight = self._parameter((self.output_size_per_partition, input_size), 0, init_method or _kaiming)
        # added after the gathering, so cut only without one
        shape, cut = ((self.output_size,), None) if gather_output else ((self.output_size_per_partition,), 0)
        self.bias = self._parameter(shape, cut, nn.init.zeros_) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight)
        if self.gather_output:
            output = mappings.gather_from_tensor_model_parallel_region(output, self.tensor_parallel_group)
            if not self.keep_padded_output:
                output = output[..., : self.output_size - self.pad_size]
        return self._with_bias(output)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the whole weight or bias, whose name is `prefix`: zeros, and a bias that no softmax lets through."""
        value = torch.finfo(model_state_dict[prefix].dtype).min if prefix.endswith("bias") else 0
        self._pad(model_state_dict, prefix, 0, value)


class RowParallelLinear(BaseParallelLinear):
    """This rank's part of (..., input_size) -> (..., output_size), summed over the ranks in `reduce_dtype`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[..., Any] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: ThreadGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        tile_cc: bool = False,
    ):
        super().__init__(device)
        refuse(sequence_parallel_enabled=sequence_parallel_enabled, tile_cc=tile_cc)
        group = tensor_model_parallel_group
        self._set_up(group, stride, keep_master_weight, bias, dtype, skip_bias_add, pad)
        self.pad_size = get_padding_length(input_size, self._size) if pad else 0
        self.input_size = input_size + self.pad_size
        self.input_size_per_partition = divide(self.input_size, self._size)
        self.output_size = output_size
        refuse(input_is_parallel=self._size > 1 and not input_is_parallel and "False")
        self.reduce_output = reduce_output
        self.reduce_dtype = reduce_dtype or dtype
        self.weight = self._parameter((output_size, self.input_size_per_partition), 1, init_method or _kaiming)
        self.bias = self._parameter((output_size,), None, nn.init.zeros_) if bias else None

    def forward(self, input_: Tensor) -> Tensor:
        output = F.linear(input_, self.weight)
        if self.reduce_output and self._size > 1:
            group = self.tensor_parallel_group
            output = mappings.reduce_from_tensor_model_parallel_region(output.to(self.reduce_dtype), group)
            output = output.to(input_.dtype)
        return self._with_bias(output)

    def preshard_hook(self, model_state_dict: dict, prefix: str) -> None:
        """Pad the whole weight, whose name is `prefix`, with zeros. The bias is whole on every rank."""
        if not prefix.endswith("bias"):
            self._pad(model_state_dict, prefix, 1)


class SPMDRank(nn.Module):
    """The rank as a weight: one graph serves all ranks, and each finds its own number in its shard."""

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None):
        super().__init__()
        self.world_size = world_size
        self.tensor_model_parallel_size = tensor_model_parallel_size or world_size
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        set_tensor_model_parallel_attributes(self.rank, True, 0, 1, world_size)

    def get_rank(self) -> Tensor:
        """int32 (1,)"""
        return self.rank
