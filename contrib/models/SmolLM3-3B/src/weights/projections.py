# SPDX-License-Identifier: Apache-2.0
"""The seven projections of a decoder layer: the one table of their sizes, biases and cuts. Imports no torch."""

from dataclasses import dataclass

from ..model.config import CheckpointConfig


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


def expected_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """Maps the name (without prefix) of every tensor that the checkpoint must hold to its shape."""
    hidden = config.hidden_size
    shapes = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in (f"layers.{layer_idx}" for layer_idx in range(config.num_hidden_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for projection in PROJECTIONS:
            out_features = getattr(config, projection.out_features)
            shapes[f"{layer}.{projection.name}.weight"] = (out_features, getattr(config, projection.in_features))
            if getattr(config, projection.bias):
                shapes[f"{layer}.{projection.name}.bias"] = (out_features,)
    return shapes
