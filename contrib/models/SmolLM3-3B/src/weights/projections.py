# SPDX-License-Identifier: Apache-2.0
"""The seven projections of a decoder layer: the one table of their sizes, biases and cuts. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """A linear layer of each decoder layer; sizes and bias are named by their fields of `CheckpointConfig`."""

    name: str  # in the checkpoint's layer
    out_features: str
    in_features: str
    bias: str
    cut_dim: int  # the dimension of its weight, [out, in], that is cut over the ranks

    @property
    def cut_features(self) -> str:
        """Names the size that is cut over the ranks."""
        return self.in_features if self.cut_dim else self.out_features

    def neuron_name(self, fused_qkv: bool) -> str:
        """Returns its name in a layer of the library's model, which wraps attention's projections in more modules."""
        attention, _, projection = self.name.rpartition(".")
        if self in QKV:
            return f"{attention}.qkv_proj.{'Wqkv' if fused_qkv else projection}"
        return f"{self.name}.o_proj" if projection == "o_proj" else self.name


PROJECTIONS = (
    Projection("self_attn.q_proj", "query_size", "hidden_size", "attention_bias", 0),
    Projection("self_attn.k_proj", "key_value_size", "hidden_size", "attention_bias", 0),
    Projection("self_attn.v_proj", "key_value_size", "hidden_size", "attention_bias", 0),
    Projection("self_attn.o_proj", "hidden_size", "query_size", "attention_bias", 1),
    Projection("mlp.gate_proj", "intermediate_size", "hidden_size", "mlp_bias", 0),
    Projection("mlp.up_proj", "intermediate_size", "hidden_size", "mlp_bias", 0),
    Projection("mlp.down_proj", "hidden_size", "intermediate_size", "mlp_bias", 1),
)
QKV = PROJECTIONS[:3]
