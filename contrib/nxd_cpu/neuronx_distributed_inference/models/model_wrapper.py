# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from neuronx_distributed._cpu import weights_on_meta
from neuronx_distributed.parallel_layers.parallel_state import _model_parallel
from torch import Tensor, nn

from neuronx_distributed_inference._graph import Graph, LoadedModel, export_graph

CONTEXT_ENCODING_MODEL_TAG = "context_encoding_model"
TOKEN_GENERATION_MODEL_TAG = "token_generation_model"
SPECULATION_MODEL_TAG = "speculation_model"


class ModelWrapper(nn.Module):
    """One of the submodels: fits its inputs to what was compiled, and the output back."""

    def __init__(
        self,
        config,
        model_cls,
        tag="",
        compiler_args: str | None = None,
        model_init_kwargs={},  # noqa: B006 - the library's signature
    ) -> None:
        super().__init__()
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        self.config, self.neuron_config = config, config.neuron_config
        self.model_cls, self.model_init_kwargs = model_cls, model_init_kwargs
        self.tag, self.compiler_args = tag, compiler_args
        self.model: LoadedModel | None = None

    def _build(self, bucket: int) -> nn.Module:
        """The model of one rank, without memory for its weights."""
        with _model_parallel(self.neuron_config.tp_degree), weights_on_meta():
            model = self.model_cls(self.config, **self.model_init_kwargs).eval()
        model.n_positions = bucket
        return model.to(self.neuron_config.torch_dtype) if self.neuron_config.cast_type == "config" else model

    def input_generator(self) -> list[tuple[Tensor, ...]]:
        """Per bucket: ids (B, S), mask (B, bucket), positions (B, S), lines (B,), sampling parameters (B, 3)."""
        batch, inputs = self.neuron_config.batch_size, []
        for bucket in self.neuron_config.buckets:
            length = bucket if self.neuron_config.bucket_n_active_tokens else self.neuron_config.n_active_tokens
            ids = torch.zeros(batch, length, dtype=torch.long)
            mask = torch.ones(batch, bucket, dtype=torch.long)
            positions = torch.arange(length).repeat(batch, 1)
            inputs.append((ids, mask, positions, torch.arange(batch), torch.ones(batch, 3)))
        return inputs

    def _export(self) -> list[Graph]:
        pairs = zip(self.neuron_config.buckets, self.input_generator())
        return [export_graph(self._build(bucket), self.tag, bucket, inputs) for bucket, inputs in pairs]

    def forward(self, *args, pad_type="first_fit") -> Tensor:
        """input_ids, attention_mask, position_ids (B, S), seq_ids (B,), sampling_params (B, 3) -> logits (B, 1, V).
        RuntimeError before `load`; ValueError for a prompt, position or line of the cache that does not fit."""
        if self.model is None:
            raise RuntimeError("forward called before load")
        input_ids, attention_mask, position_ids, seq_ids, sampling_params = args[:5]
        lines = self.neuron_config.kv_cache_batch_size
        if sorted(set(seq_ids.tolist()) & set(range(lines))) != sorted(seq_ids.tolist()):
            raise ValueError(f"seq_ids {seq_ids.tolist()} are not different lines of a cache of {lines}")
        args = (input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        if self.tag != CONTEXT_ENCODING_MODEL_TAG:
            return self._generate(*args)
        size = self.neuron_config.batch_size
        chunks = zip(*(arg.split(size) for arg in args))
        return torch.cat([self._encode(*chunk) for chunk in chunks])

    def _encode(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params) -> Tensor:
        """At most one compiled batch of prompts."""
        if (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise NotImplementedError("the CPU runtime does not support left padding, only right padding")
        length = int(attention_mask.sum(dim=1).max())
        if length > self.neuron_config.buckets[-1]:
            limit = f"{self.neuron_config.buckets[-1]}, max_context_length {self.neuron_config.max_context_length}"
            raise ValueError(f"a prompt of {length} tokens is longer than the longest that was compiled ({limit})")
        if not attention_mask[:, 0].all():
            raise ValueError("a prompt is empty")
        bucket = next(bucket for bucket in self.neuron_config.buckets if bucket >= length)
        padded = [
            F.pad(tensor[:, :length], (0, bucket - length), value=value)
            for tensor, value in ((input_ids, self.config.pad_token_id), (attention_mask, 0), (position_ids, 1))
        ]
        filled, *rest = self._fill_up(seq_ids, *padded, sampling_params)
        if not self.neuron_config.is_continuous_batching:
            filled = self._lines(filled)  # as the library has it, which writes all lines then
        return self._run(bucket, filled, *rest)[: len(seq_ids)]

    def _generate(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params) -> Tensor:
        """Tokens that follow, one each or those to be verified. Row i of the compiled batch is line i of the cache."""
        last = int(position_ids.max())
        if last >= self.neuron_config.buckets[-1]:
            limit = f"{self.neuron_config.buckets[-1]}, seq_len {self.neuron_config.max_length}"
            raise ValueError(f"position {last} does not fit into the longest cache that was compiled ({limit})")
        if input_ids.shape[1] != self.neuron_config.n_active_tokens:
            count = self.neuron_config.n_active_tokens
            raise ValueError(f"{self.tag} takes {count} of a row's tokens, not {input_ids.shape[1]}")
        bucket = next(bucket for bucket in self.neuron_config.buckets if bucket > last)
        mask = F.pad(attention_mask[:, :bucket], (0, max(0, bucket - attention_mask.shape[1])))
        filled, *rest = self._fill_up(seq_ids, input_ids, mask, position_ids, sampling_params)
        lines = self._lines(filled)
        if not self.neuron_config.apply_seq_ids_mask:
            filled = lines  # as the library has it: the first row's K and V are written into the lines left out
        order = lines.argsort()
        return self._run(bucket, filled[order], *(tensor[order] for tensor in rest))[seq_ids]

    @staticmethod
    def _lines(filled: Tensor) -> Tensor:
        """The lines that `_fill_up` names, those left out with them: they are written, too."""
        return torch.where(filled < 0, -1 - filled, filled)

    def _fill_up(self, seq_ids: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        """Repeat the first row up to the compiled batch; -1 - n stands for a line n that `seq_ids` leave out."""
        missing = self.neuron_config.batch_size - len(seq_ids)
        used = set(seq_ids.tolist())
        free = [line for line in range(self.neuron_config.kv_cache_batch_size) if line not in used]
        seq_ids = torch.cat([seq_ids.long(), -1 - torch.tensor(free[:missing], dtype=torch.long)])
        return seq_ids, *(torch.cat([tensor, tensor[:1].expand(missing, -1)]) for tensor in tensors)

    def _run(self, bucket: int, seq_ids: Tensor, *tensors: Tensor) -> Tensor:
        input_ids, attention_mask, position_ids, sampling_params = tensors
        inputs = (input_ids.long(), attention_mask.long(), position_ids.long(), seq_ids, sampling_params.float())
        return self.model.run(self.tag, bucket, inputs)
