"""Broken twins of the model, one fault each.

Every job of lower.py has a process of its own, so that a twin can patch what it breaks.
"""

import copy

import torch
from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance
from neuronx_distributed_inference.modules.attention.gqa import GroupQueryAttention_QKV

from smollm3_neuron.modeling_smollm3_3b import (
    NeuronSmolLM3Attention,
    NeuronSmolLM3DecoderLayer,
    NeuronSmolLM3ForCausalLM,
    NeuronSmolLM3Model,
)

OUTSIDE = torch.zeros(1, 1, 128)  # never moved to the device with the model


def twin(break_it):
    def compile(self, *args, **kwargs):
        break_it()
        return NeuronSmolLM3ForCausalLM.compile(self, *args, **kwargs)

    return type(break_it.__name__, (NeuronSmolLM3ForCausalLM,), {"compile": compile})


@twin
def WrongSchedule():
    init = NeuronSmolLM3Attention.__init__

    def inverted(self, config, layer_idx):
        config = copy.copy(config)
        config.no_rope_layers = [1 - flag for flag in config.no_rope_layers]
        init(self, config, layer_idx)

    NeuronSmolLM3Attention.__init__ = inverted


@twin
def DroppedCosSin():
    forward = NeuronSmolLM3DecoderLayer.forward

    def dropping(self, *args, **kwargs):
        hidden_states, present_key_value, _, _, residual = forward(self, *args, **kwargs)
        return hidden_states, present_key_value, None, None, residual

    NeuronSmolLM3DecoderLayer.forward = dropping


@twin
def SwappedKeysAndValues():
    forward = GroupQueryAttention_QKV.forward

    def swapped(self, *args, **kwargs):
        query, key, value, *rest = forward(self, *args, **kwargs)
        return query, value, key, *rest

    GroupQueryAttention_QKV.forward = swapped


@twin
def ReadsAValue():
    forward = NeuronSmolLM3Model.forward

    def reading(self, input_ids, *args, **kwargs):
        if input_ids.max().item() < 0:
            raise ValueError("no such token")
        return forward(self, input_ids, *args, **kwargs)

    NeuronSmolLM3Model.forward = reading


@twin
def TensorFromOutside():
    forward = NeuronSmolLM3DecoderLayer.forward

    def mixing(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states + OUTSIDE.to(hidden_states.dtype), *args, **kwargs)

    NeuronSmolLM3DecoderLayer.forward = mixing


@twin
def MissingAlias():
    get = DecoderModelInstance.get

    def forgetting(self, *args, **kwargs):
        module, aliases = get(self, *args, **kwargs)
        return module, {tensor: output for tensor, output in aliases.items() if output != 3}

    DecoderModelInstance.get = forgetting
