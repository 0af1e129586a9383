# SPDX-License-Identifier: Apache-2.0
"""The shape of SmolLM3-3B: what its config.json says of the architecture, for plans and random checkpoints."""

SMOLLM3_3B = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "rope_theta": 5000000.0,
    "rope_scaling": None,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 128012,
    "pad_token_id": 128004,
    "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}
