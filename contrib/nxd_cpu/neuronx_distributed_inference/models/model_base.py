# SPDX-License-Identifier: Apache-2.0
import copy

import torch
from neuronx_distributed._cpu import refuse
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    SPECULATION_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)
from neuronx_distributed_inference.modules import autobucketing
from neuronx_distributed_inference.modules.generation.sampling import Sampler
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager


class NeuronBaseModel(nn.Module):
    """A decoder of one rank. A subclass sets the attributes and layers that the two hooks name."""

    def __init__(self, config: InferenceConfig, optimize_inference: bool = True):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        for name in (
            "batch_size",
            "n_positions",
            "n_active_tokens",
            "padding_side",
            "max_length",
            "speculation_length",
        ):
            setattr(self, name, getattr(config.neuron_config, name))
        self.vocab_size = config.vocab_size
        self.rank_util = SPMDRank(config.neuron_config.tp_degree)
        self.sliding_window = self.attention_chunk_size = self.layer_to_cache_size_mapping = None
        self.kv_mgr: KVCacheManager | None = None
        self.setup_attr_for_model(config)
        self.init_model(config)
        if optimize_inference:
            self.init_inference_optimization(config)

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        """Set on_device_sampling, tp_degree, hidden_size, max_batch_size, buckets and the numbers of heads."""
        raise NotImplementedError("setup_attr_for_model() is not implemented")

    def init_model(self, config: InferenceConfig) -> None:
        """Set embed_tokens, layers, norm and lm_head."""
        raise NotImplementedError("init_model() is not implemented")

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        self.kv_mgr = KVCacheManager(
            config,
            self.num_key_value_heads,
            self.rank_util,
            self.attention_chunk_size,
            self.sliding_window,
            layer_to_cache_size_mapping=self.layer_to_cache_size_mapping,
        )

    def create_attn_mask(
        self, attention_mask, is_for_context_encoding, is_for_speculation, position_ids=None, **kwargs
    ) -> Tensor | None:
        """None for a prompt, which is causal; else the positions of the cache that each token sees, (B, 1, S, n)."""
        if is_for_context_encoding:
            return None
        return (torch.arange(self.n_positions) <= position_ids[:, :, None])[:, None]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
        prev_hidden=None,
        adapter_ids=None,
    ) -> list[Tensor]:
        """Prompts (B, S) or tokens (B, 1) -> float32 logits (B, 1, vocabulary) of each row's last token; the caches.
        `speculation_length` tokens -> logits of each."""
        is_for_speculation = position_ids.shape[-1] == self.speculation_length
        is_for_context_encoding = position_ids.shape[-1] > 1 and not is_for_speculation
        local_attn_mask = None
        if self.sliding_window and not is_for_context_encoding:  # tokens before: what the cache holds
            local_attn_mask = (torch.arange(self.sliding_window - 1) < position_ids)[:, None, None, :]
        hidden_states, caches = self.get_model_output(
            input_ids=input_ids,
            seq_ids=seq_ids,
            attention_mask=self.create_attn_mask(
                attention_mask, is_for_context_encoding, is_for_speculation, position_ids
            ),
            position_ids=position_ids,
            adapter_ids=adapter_ids,
            update_cache=True,
            is_for_context_encoding=is_for_context_encoding,
            local_attn_mask=local_attn_mask,
        )
        if is_for_context_encoding:
            last = attention_mask.sum(dim=1) - 1
            hidden_states = hidden_states.gather(1, last[:, None, None].expand(-1, 1, hidden_states.shape[-1]))
        logits = self.lm_head(hidden_states).float()
        if not self.lm_head.gather_output:
            logits = gather_from_tensor_model_parallel_region(logits, self.lm_head.tensor_parallel_group)
        if self.lm_head.pad_size and self.lm_head.keep_padded_output:
            columns = torch.arange(logits.shape[-1]) < logits.shape[-1] - self.lm_head.pad_size
            logits = torch.where(columns, logits, torch.finfo(logits.dtype).min)
        return [logits, *(cache for layer in caches for cache in layer)]

    def get_model_output(
        self,
        input_ids: Tensor = None,
        seq_ids: Tensor = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor = None,
        past_key_values: list[Tensor] | None = None,
        active_mask: list[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        rotary_position_ids: Tensor | None = None,
        update_cache: bool = False,
        is_for_context_encoding: bool = False,
        local_attn_mask: Tensor | None = None,
        windowed_context_encoding_window_idx: int = -1,
        padding_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, list]:
        """The normed hidden states (B, S, hidden) and every layer's caches, or its K and V without `update_cache`."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if not is_for_context_encoding:
            past_key_values = self.kv_mgr.get_cache(seq_len=self.n_positions)
        kwargs.setdefault("scatter_index", self.kv_mgr._rows(seq_ids, position_ids, is_for_context_encoding))
        present = []
        cos_cache = sin_cache = residual = None
        for idx, decoder_layer in enumerate(self.layers):
            hidden_states, key_value, cos_cache, sin_cache, residual = decoder_layer(
                hidden_states,
                seq_ids=seq_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_value=None if past_key_values is None else past_key_values[idx],
                active_mask=active_mask,
                adapter_ids=adapter_ids,
                cos_cache=cos_cache,
                sin_cache=sin_cache,
                rotary_position_ids=rotary_position_ids,
                kv_mgr=self.kv_mgr,
                get_kv_per_layer=False,
                update_kv_per_layer=update_cache,
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                seq_len=self.n_positions,
                residual=residual,
                local_mask=local_attn_mask,
                windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
                padding_mask=padding_mask,
                **kwargs,
            )
            present.append(key_value)
        return self.norm(hidden_states), present


class NeuronBaseForCausalLM(NeuronApplicationBase):
    """A language model in submodels: one for prompts, and one for each next token or for those to be verified."""

    _model_cls = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.text_config = self.config.get_text_config()
        self.vocab_size, self.padding_side = self.text_config.vocab_size, self.neuron_config.padding_side
        self.kv_cache_populated = False
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.default_sampling_params = torch.ones(
            self.neuron_config.batch_size, 3
        )  # the best token, whatever is configured
        self.model_wrapper = self.get_model_wrapper_cls()
        self.enable_context_encoding()
        if self.neuron_config.speculation_length > 0:
            self.enable_speculation()
        else:
            self.enable_token_generation()

    def get_model_wrapper_cls(self) -> type:
        return ModelWrapper

    def enable_context_encoding(self, **model_init_kwargs) -> None:
        self.context_encoding_model = self._add_submodel(
            CONTEXT_ENCODING_MODEL_TAG,
            model_init_kwargs,
            batch_size=self.neuron_config.ctx_batch_size,
            n_active_tokens=self.neuron_config.max_context_length,
            bucket_n_active_tokens=True,
            is_prefill_stage=True,
            buckets=autobucketing.generate_buckets_for_cte(self.config),
        )

    def enable_token_generation(self, enable_wlt_optimization: bool = True, **model_init_kwargs) -> None:
        self.token_generation_model = self._add_submodel(
            TOKEN_GENERATION_MODEL_TAG,
            model_init_kwargs,
            batch_size=self.neuron_config.tkg_batch_size,
            n_active_tokens=1,
            bucket_n_active_tokens=False,
            is_prefill_stage=False,
            buckets=autobucketing.generate_buckets_for_tkg(self.config),
        )

    def enable_speculation(self, enable_wlt_optimization: bool = True, **model_init_kwargs) -> None:
        self.speculation_model = self._add_submodel(
            SPECULATION_MODEL_TAG,
            model_init_kwargs,
            batch_size=self.neuron_config.spec_batch_size,
            n_active_tokens=self.neuron_config.speculation_length,
            bucket_n_active_tokens=False,
            is_prefill_stage=False,
            buckets=autobucketing.generate_buckets_for_speculation(self.config),
        )

    def _add_submodel(self, tag: str, model_init_kwargs: dict, **neuron_config) -> ModelWrapper:
        config = copy.deepcopy(self.config)
        vars(config.neuron_config).update(neuron_config)
        model = self.model_wrapper(
            config, self._model_cls, tag, compiler_args=self.get_compiler_args(), model_init_kwargs=model_init_kwargs
        )
        self.models.append(model)
        return model

    def forward(
        self,
        input_ids: Tensor = None,
        seq_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sampling_params: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        slot_mapping: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Right-padded prompts (B, S) if position 0 is among `position_ids`, else each row's next token (B, 1), or its
        next `speculation_length`; `seq_ids` (B,) name a row's line of the cache. Returns logits (B, 1, vocabulary), of
        each token that is verified, also as `tokens`, like NxDI; with on-device sampling tokens (B,), or (B, S), there
        and in `hidden_states`.
        ValueError for a prompt, position or line that does not fit; NotImplementedError for left padding."""
        refuse(inputs_embeds=inputs_embeds is not None, slot_mapping=slot_mapping is not None)
        if position_ids is None:
            raise ValueError("forward needs position_ids")
        if seq_ids is None:
            seq_ids = torch.arange(input_ids.shape[0])
        if attention_mask is None:
            attention_mask = self._infer_attention_mask(position_ids)
        if sampling_params is None:
            sampling_params = self.default_sampling_params[: input_ids.shape[0]]
        if self._is_prefill(position_ids):
            model, self.kv_cache_populated = self.context_encoding_model, True
        elif input_ids.shape[1] == self.neuron_config.speculation_length:
            model = self.speculation_model
        else:
            model = self.token_generation_model
        logits = model(input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        if self.on_device_sampling:  # by the host, which has all ranks' logits: one generator, one token
            if logits.shape[1] == self.neuron_config.speculation_length:
                tokens = logits.argmax(-1).int()
            else:
                tokens = Sampler(self.neuron_config)(logits[:, -1], sampling_params)
            output = CausalLMOutputWithPast(hidden_states=tokens)
        else:
            output = CausalLMOutputWithPast(logits=logits, hidden_states=logits)
        output.tokens = output.hidden_states
        return output

    def _is_prefill(self, position_ids: Tensor) -> bool:
        return position_ids.min().item() == 0

    def _infer_attention_mask(self, position_ids: Tensor) -> Tensor:
        """1 on a prompt's tokens, or on the tokens before the next one."""
        if position_ids.shape[1] > 1:
            return (position_ids >= torch.arange(position_ids.shape[1])).long()
        return (torch.arange(int(position_ids.max())) < position_ids).long()

    def reset(self) -> None:
        self.kv_cache_populated = False
