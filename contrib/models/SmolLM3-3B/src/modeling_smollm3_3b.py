# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 on NxD Inference: config, attention, decoder layer, model, application head.

It is a Llama with three differences: layers whose `no_rope_layers` flag is 0 apply no rotary embedding (NoPE), the
embeddings are tied, and KV heads that a TP degree cannot shard are expanded beforehand (model/heads.py). It is written
against NxD Inference 0.7 to 0.9 and the interfaces of 0.10; its reference is transformers' `SmolLM3ForCausalLM`.
"""

import dataclasses
import logging
import os

import torch

from .model.interfaces import check_installed

check_installed()  # before anything of an unknown release is imported, or fails to be

from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaMLP
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from torch import nn
from transformers import SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

from .errors import SmolLM3Error
from .model.config import REQUIRED, CheckpointConfig, resolve_config
from .model.draft import check_with_draft
from .model.releases import installed_release
from .model.rope import RotaryTable, ScaledRotaryEmbedding
from .model.switches import (
    ROPE_PRECISIONS,
    check_encoding,
    check_keywords,
    check_sampling,
    check_switches,
    choose_attention_kernel,
    quiet_about_keywords,
)
from .model.windows import SlidingWindowKVCacheManager, check_sliding_window, layer_windows
from .weights import checkpoint
from .weights.quantization import check_quantization

logger = logging.getLogger("Neuron")


def get_rmsnorm_cls():
    """Returns the device's RMSNorm, a custom call that exists only there, or in CPU mode transformers'."""
    return SmolLM3RMSNorm if cpu_mode() else CustomRMSNorm


def get_rotary_embedding(config: CheckpointConfig, neuron_config: NeuronConfig | None = None) -> nn.Module:
    """Returns the library's, or rope.py's for a checkpoint with RoPE scaling, which the library would ignore.

    With a `rope_precision` of "float64" it is rope.py's table of all positions.
    """
    if getattr(neuron_config, "rope_precision", ROPE_PRECISIONS[0]) == "float64":
        return RotaryTable(config, neuron_config.max_length)
    if config.rope_scaling is not None:
        return ScaledRotaryEmbedding(config)
    return RotaryEmbedding(
        config.head_dim, max_position_embeddings=config.max_position_embeddings, base=config.rope_theta
    )


class SmolLM3NeuronConfig(NeuronConfig):
    """The library's NeuronConfig, which would drop a keyword that it does not know with a warning.

    `rope_precision` is this model's own: with "float64" cos and sin are a table that is computed in float64, see
    model/rope.py. Raises SmolLM3Error for an unknown keyword.
    """

    rope_precision = ROPE_PRECISIONS[0]  # the default is not saved: the JSON and its digest stay the library's

    def __init__(self, rope_precision: str = ROPE_PRECISIONS[0], **kwargs):
        if rope_precision != ROPE_PRECISIONS[0]:
            self.rope_precision = rope_precision
        with quiet_about_keywords():  # what is derived is saved, too, and comes back as a keyword
            super().__init__(**kwargs)
        check_keywords(kwargs, self)


class SmolLM3InferenceConfig(InferenceConfig):
    """The checkpoint's config (see model/config.py) together with a NeuronConfig.

    It is built with NxD Inference's own `load_pretrained_config`. Raises SmolLM3Error for values that would run wrong.
    """

    further_checks: tuple = ()  # called with every valid config; vllm/plugin.py adds its own

    def add_derived_config(self):
        self.num_cores_per_group = 1
        # load_pretrained_config sets it, and the library would prefer it to the path that it is given
        self.__dict__.pop("_name_or_path", None)
        fields = dict(vars(self))
        if "source_num_key_value_heads" in fields:  # a saved config, which may be expanded and padded
            fields["num_key_value_heads"] = fields["source_num_key_value_heads"]
            fields["intermediate_size"] = fields["source_intermediate_size"]
        checkpoint_config = resolve_config(fields)
        vars(self).update(vars(checkpoint_config.padded(self.neuron_config)))
        self.__dict__.pop("rope_parameters", None)
        if self.pad_token_id is None or not 0 <= self.pad_token_id < self.vocab_size:
            self.pad_token_id = 0  # transformers' default is beyond a small vocabulary, and the library pads with it
        choose_attention_kernel(self.neuron_config, any(layer_windows(self)))
        plan = checkpoint_config.plan(self.neuron_config.tp_degree)
        self.source_num_key_value_heads = plan.num_key_value_heads
        self.source_intermediate_size = checkpoint_config.intermediate_size
        self.num_key_value_heads = plan.num_key_value_heads * plan.kv_expansion

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """Returns the checkpoint's own config: this one's heads may be expanded and its intermediate size padded.

        It is a property because every attribute of an instance is saved, and comes back as a keyword argument.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(CheckpointConfig)}
        fields["num_key_value_heads"] = self.source_num_key_value_heads
        fields["intermediate_size"] = self.source_intermediate_size
        return CheckpointConfig(**fields)

    def validate_config(self):
        super().validate_config()
        check_sliding_window(self)
        check_switches(self.neuron_config, self.no_rope_layers, self.hidden_act, installed_release())
        check_encoding(self.neuron_config)
        check_sampling(self.neuron_config, self.vocab_size)
        check_quantization(self.checkpoint_config, self.neuron_config)
        if self.neuron_config.lora_config is not None:
            from .weights.adapter import check_serving

            check_serving(self.checkpoint_config, self.neuron_config)
        for check in self.further_checks:
            check(self)

    def get_required_attributes(self) -> list[str]:
        return [*REQUIRED, "pad_token_id"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return SmolLM3NeuronConfig


class NeuronSmolLM3Attention(NeuronAttentionBase):
    """Grouped-query attention; rotates queries and keys only where `config.no_rope_layers[layer_idx]` is 1."""

    def __init__(self, config: SmolLM3InferenceConfig, layer_idx: int):
        rotary_emb = None
        if config.no_rope_layers[layer_idx]:  # 1 means: applies RoPE
            rotary_emb = get_rotary_embedding(config.checkpoint_config, config.neuron_config)
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=rotary_emb,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            sliding_window=layer_windows(config)[layer_idx],
        )

    def perform_prefix_prefill(self, Q, K, V, q_len, bsz, attention_mask, past_key_value, active_mask):
        """Masks a cached prefix that is shorter than its bucket, which the library without its kernel does not."""
        arguments = Q, K, V, q_len, bsz, attention_mask, past_key_value, active_mask
        strategy = self.get_flash_attention_strategy(q_len, has_attention_mask=False)
        if strategy.name != "NONE" or not self.neuron_config.is_prefix_caching:
            return super().perform_prefix_prefill(*arguments)
        mask = attention_mask[:, None, None, :].bool()
        return self.compute_for_token_gen(
            Q, K, V, None, past_key_value, mask, active_mask, is_prefix_caching=True
        ), strategy


class NeuronSmolLM3DecoderLayer(nn.Module):
    """Attention and MLP, each behind an RMSNorm, each with its residual."""

    def __init__(self, config: SmolLM3InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = NeuronSmolLM3Attention(config, layer_idx)
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = get_rmsnorm_cls()(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = get_rmsnorm_cls()(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
        adapter_ids: torch.Tensor | None = None,
        cos_cache: torch.Tensor | None = None,
        sin_cache: torch.Tensor | None = None,
        local_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple:
        """Maps hidden_states [batch, seq, hidden] to those after the layer.

        Returns (hidden_states, present_key_value, cos_cache, sin_cache, residual), as the library's layers do; the
        residual is None.
        """
        residual = hidden_states
        attention = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=local_mask if self.self_attn.sliding_window else attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            adapter_ids=adapter_ids,
            cos_cache=cos_cache,
            sin_cache=sin_cache,
            **kwargs,
        )
        hidden_states = residual + attention.hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states, adapter_ids=adapter_ids)[0]

        if self.self_attn.rotary_emb is not None:
            cos_cache, sin_cache = attention.cos_cache, attention.sin_cache
        # else a NoPE layer hands on what it was given: NxD Inference 0.7 and 0.8 may return zeros from it
        return hidden_states, attention.present_key_value, cos_cache, sin_cache, None


class NeuronSmolLM3Model(NeuronBaseModel):
    """The traced part, which takes token ids and returns logits (or sampled tokens) and the KV cache."""

    def setup_attr_for_model(self, config: SmolLM3InferenceConfig):
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets
        if any(layer_windows(config)):
            self.sliding_window, self.has_mixed_attn = config.sliding_window, True
        if config.neuron_config.is_prefill_stage:
            self.speculation_length = 0  # or the library takes a context of that length for tokens to be verified

    def init_inference_optimization(self, config: SmolLM3InferenceConfig):
        super().init_inference_optimization(config)
        if self.sliding_window:
            self.kv_mgr = SlidingWindowKVCacheManager(
                config, self.num_key_value_heads, self.rank_util, layer_windows(config)
            )

    def init_model(self, config: SmolLM3InferenceConfig):
        neuron_config = config.neuron_config
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=neuron_config.torch_dtype,
            shard_across_embedding=not neuron_config.vocab_parallel,
            use_spmd_rank=neuron_config.vocab_parallel,
            sequence_parallel_enabled=neuron_config.sequence_parallel_enabled,
            sequence_dimension=1,
            pad=True,
        )
        self.layers = nn.ModuleList(
            NeuronSmolLM3DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = get_rmsnorm_cls()(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            pad=True,
            gather_output=not self.on_device_sampling,
            keep_padded_output=True,
            dtype=neuron_config.torch_dtype,
        )

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *args, **kwargs
    ) -> list[torch.Tensor]:
        """Maps input_ids, attention_mask and position_ids [batch, seq] to a list.

        Its first entry is the logits [batch, 1, vocab_size], or the sampled tokens; K and V of each layer follow. With
        input_ids of speculation_length tokens, which follow the cache, it has logits or tokens of each of them.

        The graph meets three faults of the library here. It takes a prompt's last token to be where position_ids is
        largest, and pads them with 1, which is wrong for a prompt of one token: so padding gets position 0. It cuts the
        vocabulary's padding off the logits before it masks as many of the last ones: so the padding is kept until then
        and cut off here. And in a draft's steps it marks the positions of all rows in each row's mask: so a row sees no
        more than what stands before its own.
        """
        is_context = input_ids.shape[-1] not in (1, self.speculation_length)
        if is_context and not self.neuron_config.is_prefix_caching:
            position_ids = self._pad_position_ids(position_ids, attention_mask)
        elif getattr(self.neuron_config, "use_draft_group", False):  # the library's word for a draft
            places = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
            attention_mask = attention_mask * (places < position_ids)
        outputs = super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        if self.lm_head.pad_size and not self.on_device_sampling:
            outputs[0] = outputs[0][..., : self.vocab_size]
        return outputs

    def _pad_position_ids(self, position_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Sets the positions of padding to 0.

        With windowed context encoding it does so in the first window only: the library leaves out later windows whose
        positions are all 1.
        """
        window = self.neuron_config.windowed_context_encoding_size
        if window is None:
            return position_ids * attention_mask
        return torch.cat([position_ids[:, :window] * attention_mask[:, :window], position_ids[:, window:]], dim=1)


class NeuronSmolLM3ForCausalLM(NeuronBaseForCausalLM):
    """SmolLM3 for `compile`, `load` and generation with NxD Inference."""

    _model_cls = NeuronSmolLM3Model
    _FUSED_PREFIX = ""  # set by the library while it reads a draft, and then the model that verifies

    def enable_speculation(self, *args, **kwargs):
        """Adds the graph that verifies speculation_length tokens to that of one token, which the library leaves out.

        Only one graph may choose how the weights are laid out: that of one token does.
        """
        self.enable_token_generation()
        super().enable_speculation(enable_wlt_optimization=False)

    def forward(self, input_ids=None, seq_ids=None, attention_mask=None, position_ids=None, **kwargs):
        """Runs the library's forward for `seq_ids` in any order: it takes row i of a full batch for the cache's line i.

        Without `sampling_params` each row has the library's default, whose own rows are those of a whole batch.

        Raises SmolLM3Error for prompts that are padded on the left, which the library would read as if they were not,
        and for `seq_ids` that do not rise with async_mode.
        """
        lacks_mask = attention_mask is None and getattr(self.neuron_config, "enable_fused_speculation", False)
        if lacks_mask and position_ids.shape[1] < 2 and not position_ids.any():
            attention_mask = torch.ones_like(position_ids)  # the library infers an empty one, and no draft runs with it
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise SmolLM3Error("attention_mask has a 0 before a 1: pad prompts on the right")
        if kwargs.get("sampling_params") is None:
            kwargs["sampling_params"] = self.default_sampling_params[: len(input_ids)]
        inputs = dict(
            kwargs, input_ids=input_ids, seq_ids=seq_ids, attention_mask=attention_mask, position_ids=position_ids
        )
        reads_lines_as_rows = self.neuron_config.is_continuous_batching and not self.neuron_config.is_block_kv_layout
        if not reads_lines_as_rows or seq_ids is None or torch.equal(seq_ids, seq_ids.sort().values):
            return super().forward(**inputs)
        if self.neuron_config.async_mode:  # a step's rows are those that the step before left on the device
            raise SmolLM3Error(f"seq_ids is {seq_ids.tolist()}, with async_mode it must rise: sort the batch by it")
        order = seq_ids.argsort()
        output = super().forward(**{k: v[order] if torch.is_tensor(v) else v for k, v in inputs.items()})
        as_asked = order.argsort()
        for name in ("logits", "hidden_states", "tokens", "fused_outputs"):
            value = getattr(output, name, None)
            if torch.is_tensor(value):
                setattr(output, name, value[as_asked])
            elif isinstance(value, list):  # a draft's and the model's, see generate/speculation.py
                setattr(output, name, [of_rows[as_asked] for of_rows in value])
        return output

    @classmethod
    def validate_config(cls, config: SmolLM3InferenceConfig):
        super().validate_config(config)
        check_with_draft(config)

    @staticmethod
    def load_hf_model(model_path, **kwargs):
        return SmolLM3ForCausalLM.from_pretrained(model_path, **kwargs)

    @classmethod
    def get_config_cls(cls) -> type[SmolLM3InferenceConfig]:
        return SmolLM3InferenceConfig

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: SmolLM3InferenceConfig) -> dict:
        """Reads a folder with weights/checkpoint.py: the library prefers a stray model.safetensors to a valid index.

        The library leaves its prefix for one of two models on the class, for whatever is read next: it is taken off.
        """
        if not os.path.isdir(model_name_or_path):
            return super().get_state_dict(model_name_or_path, config)
        prefix, cls._FUSED_PREFIX = cls._FUSED_PREFIX, ""
        state_dict = checkpoint.load_state_dict(model_name_or_path, config.checkpoint_config, config.neuron_config)
        state_dict = cls.convert_hf_to_neuron_state_dict(state_dict, config)
        if config.tie_word_embeddings:
            cls.update_state_dict_for_tied_weights(state_dict)
        return {f"{prefix}.{name}": value for name, value in state_dict.items()} if prefix else state_dict

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict, config: SmolLM3InferenceConfig) -> dict:
        return checkpoint.to_neuron_state_dict(state_dict, config.checkpoint_config, config.neuron_config)

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict):
        if "lm_head.scale" not in state_dict:  # a quantized head keeps its own weights
            state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()
