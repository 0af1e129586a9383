# SPDX-License-Identifier: Apache-2.0
"""How query and KV heads are laid out over the ranks, and the projections in that layout."""

import enum

import torch
import torch.nn.functional as F
from neuronx_distributed._cpu import ThreadGroup, refuse
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.utils import get_padding_length
from torch import Tensor, nn


class GQA(enum.Enum):
    # one KV head per query head
    CONVERT_TO_MHA = "convert-to-mha"
    # one KV head per rank; each KV head's query heads are padded on their own, so that they stay with it
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"


def determine_sharding_strategy(
    tp_degree: int, source_key_value_heads: int, desired_sharding_strategy: GQA | None = None
) -> GQA:
    """The desired strategy (default: replicate), or CONVERT_TO_MHA where the KV heads do not divide the ranks."""
    if tp_degree % source_key_value_heads:
        return GQA.CONVERT_TO_MHA
    return desired_sharding_strategy or GQA.REPLICATE_TO_TP_DEGREE


def get_shardable_head_counts(
    tp_degree: int, num_attention_heads: int, num_key_value_heads: int, sharding_strategy: GQA
) -> tuple[int, int]:
    """The numbers of query and KV heads after padding and replication; the ranks divide both."""
    heads = num_attention_heads + get_padding_length(num_attention_heads, tp_degree)
    if num_attention_heads == num_key_value_heads:
        return heads, heads
    if num_key_value_heads % tp_degree == 0:
        return heads, num_key_value_heads
    if sharding_strategy == GQA.CONVERT_TO_MHA:
        return heads, heads
    assert tp_degree % num_key_value_heads == 0, f"{num_key_value_heads} KV heads do not divide {tp_degree} ranks"
    return heads, tp_degree


def _pad_heads(tensor: Tensor, dim: int, heads: int, target: int, groups: int) -> Tensor:
    """Append zero heads to each of `groups` equal runs of heads along `dim`, `target` heads in all."""
    if heads == target:
        return tensor
    extra = (target - heads) // groups * (tensor.shape[dim] // heads)
    pad = (0, 0) * (tensor.dim() - 1 - dim) + (0, extra)
    return torch.cat([F.pad(run, pad) for run in tensor.chunk(groups, dim)], dim)


class BaseGroupQueryAttention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        tensor_model_parallel_group: ThreadGroup | None = None,
    ):
        super().__init__()
        group = tensor_model_parallel_group
        self.tensor_model_parallel_group = group or parallel_state.get_tensor_model_parallel_group()
        assert tp_degree == self.tensor_model_parallel_group.size(), f"{tp_degree=} in a group of another size"
        self.hidden_size, self.head_dim, self.tp_degree = hidden_size, head_dim, tp_degree
        self.dtype, self.bias = dtype, bias
        self._src_num_attention_heads, self._src_num_key_value_heads = num_attention_heads, num_key_value_heads
        self.sharding_strategy = determine_sharding_strategy(tp_degree, num_key_value_heads, desired_sharding_strategy)
        self.num_attention_heads, self.num_key_value_heads = get_shardable_head_counts(
            tp_degree, num_attention_heads, num_key_value_heads, self.sharding_strategy
        )

    def _lay_out_query(self, tensor: Tensor, dim: int) -> Tensor:
        replicate = self.sharding_strategy == GQA.REPLICATE_TO_TP_DEGREE
        groups = self._src_num_key_value_heads if replicate else 1
        return _pad_heads(tensor, dim, self._src_num_attention_heads, self.num_attention_heads, groups)

    def _lay_out_key_value(self, tensor: Tensor) -> Tensor:
        source, target = self._src_num_key_value_heads, self.num_key_value_heads
        if self.sharding_strategy == GQA.REPLICATE_TO_TP_DEGREE:
            return tensor.unflatten(0, (source, -1)).repeat_interleave(target // source, dim=0).flatten(0, 1)
        if source not in (target, self._src_num_attention_heads):  # NxDI pads as if they were still the source heads
            raise RuntimeError(
                f"NxDI cannot spread {source} KV heads over {self.tp_degree} ranks: expand the checkpoint's "
                f"K and V to {self._src_num_attention_heads} heads and set num_key_value_heads to it"
            )
        return _pad_heads(tensor, 0, source, target, 1)

    @staticmethod
    def _rename(model_state_dict: dict[str, Tensor], old: str, new: str) -> None:
        for name in [name for name in model_state_dict if name.startswith(f"{old}.")]:
            model_state_dict[new + name[len(old) :]] = model_state_dict.pop(name)


class GroupQueryAttention_QKV(BaseGroupQueryAttention):
    """Hidden states (B, S, hidden) -> this rank's Q, K, V (B, S, heads per rank * head_dim)."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        gather_output: bool = True,
        fused_qkv: bool = False,
        clip_qkv: float | None = None,
        tensor_model_parallel_group: ThreadGroup | None = None,
    ):
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        refuse(clip_qkv=clip_qkv)
        if fused_qkv and gather_output:
            raise ValueError("fused_qkv and gather_output exclude each other: a rank holds parts of Q, K and V")
        self.fused_qkv = fused_qkv

        def projection(heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size,
                heads * head_dim,
                bias=bias,
                gather_output=gather_output,
                dtype=dtype,
                tensor_model_parallel_group=self.tensor_model_parallel_group,
            )

        if fused_qkv:
            self.Wqkv = projection(self.num_attention_heads + 2 * self.num_key_value_heads)
            for parameter in self.Wqkv.parameters():  # for the sharder
                parameter.fused_qkv, parameter.head_dim = True, head_dim
                parameter.num_attention_heads = self.num_attention_heads
                parameter.num_key_value_heads = self.num_key_value_heads
        else:
            heads = self.num_attention_heads, self.num_key_value_heads, self.num_key_value_heads
            self.q_proj, self.k_proj, self.v_proj = map(projection, heads)

    def forward(self, hidden_states: Tensor, rmsnorm=None, adapter_ids=None, residual=None):
        """Q, K, V and the residual as it came."""
        if self.fused_qkv:
            query = self.num_attention_heads * self.head_dim // self.tp_degree
            key = self.num_key_value_heads * self.head_dim // self.tp_degree
            projected = self.Wqkv(hidden_states).split([query, key, key], dim=-1)
        else:
            projected = [layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        return (*projected, residual)

    def preshard_hook(self, model_state_dict: dict, prefix: str) -> bool:
        """Take `<attention>.{q,k,v}_proj` or `<attention>.Wqkv` into `prefix` and lay their heads out."""
        prefix = prefix.rpartition(".")[0]
        source = prefix.rpartition(".")[0]
        names = ["Wqkv"] if self.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        for name in names:
            self._rename(model_state_dict, f"{source}.{name}", f"{prefix}.{name}")
        for kind in ["weight", "bias"] if self.bias else ["weight"]:
            keys = [f"{prefix}.{name}.{kind}" for name in names]
            blocks = [model_state_dict[key] for key in keys]
            if self.fused_qkv:
                heads = [self._src_num_attention_heads] + 2 * [self._src_num_key_value_heads]
                blocks = blocks[0].split([n * self.head_dim for n in heads])
            query, key, value = blocks
            blocks = [self._lay_out_query(query, 0), self._lay_out_key_value(key), self._lay_out_key_value(value)]
            if self.fused_qkv:
                blocks = [torch.cat(blocks)]
            model_state_dict.update(zip(keys, blocks))
        return True


class GroupQueryAttention_O(BaseGroupQueryAttention):
    """Attention output (B, S, heads per rank * head_dim) -> hidden states (B, S, hidden), summed over the ranks."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        input_is_parallel: bool = False,
        layer_name: str = "o_proj",
        tensor_model_parallel_group: ThreadGroup | None = None,
        rpl_reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        self.layer_name = layer_name
        self.o_proj = RowParallelLinear(
            self.num_attention_heads * head_dim,
            hidden_size,
            bias=bias,
            input_is_parallel=input_is_parallel,
            dtype=dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
            reduce_dtype=rpl_reduce_dtype,
        )

    def forward(self, attention_output: Tensor, adapter_ids=None) -> Tensor:
        return self.o_proj(attention_output)

    def preshard_hook(self, model_state_dict: dict, prefix: str) -> bool:
        """Take `<attention>.<layer_name>` into `prefix`.o_proj and lay its input heads out."""
        prefix = prefix.rpartition(".")[0]
        source = prefix.rpartition(".")[0]
        self._rename(model_state_dict, f"{source}.{self.layer_name}", f"{prefix}.o_proj")
        weight = f"{prefix}.o_proj.weight"
        model_state_dict[weight] = self._lay_out_query(model_state_dict[weight], 1)
        return True
