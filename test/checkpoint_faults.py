"""Small checkpoints, and what can be wrong with one: FAULTS, each with the first value of the model that it changes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SMALL = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BASES = {
    "plain": {},  # five layers, the fourth is NoPE
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "yarn": {"rope_scaling": YARN},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "window": {"use_sliding_window": True, "sliding_window": 16},
}
SEQ_LEN = 48


def tokens(length: int, start: int) -> list[int]:
    return [(7 + 31 * (i + start) + i * i) % 127 + 1 for i in range(length)]


PROMPTS = [tokens(5, 0), tokens(11, 1), tokens(33, 2)]


def copy(folder: Path, out: Path, change_config=None, change_weights=None) -> Path:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for change, what in ((change_config, config), (change_weights, weights)):
        if change:
            change(what)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out / "model.safetensors")
    return out


def config(**values):
    return lambda config: config.update(values)


def schedule(by):
    """The flags of the layers, made from those that the config has."""
    return lambda config: config.update(no_rope_layers=by(config["no_rope_layers"]))


def theta(times):
    return lambda config: config.update(rope_theta=config["rope_theta"] * times)


def flip(layer):
    return lambda config: config["no_rope_layers"].__setitem__(layer, 1 - config["no_rope_layers"][layer])


def weight(layer, name):
    return f"model.layers.{layer}.{name}.weight"


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYER = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")


def swap(*pairs):
    def change(weights):
        for one, other in pairs:
            weights[one], weights[other] = weights[other].clone(), weights[one].clone()

    return change


def replace(name, by):
    return lambda weights: weights.__setitem__(name, by(weights[name]))


def both(*changes):
    return lambda weights: [change(weights) for change in changes]


def roll_heads(tensor, heads=8):
    return tensor.unflatten(0, (heads, -1)).roll(1, 0).flatten(0, 1)


def interleaved(tensor, heads=8):
    """The other layout of rotary pairs: neighbours in the place of halves."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def without_window(config):
    config.update(use_sliding_window=False, layer_types=["full_attention"] * config["num_hidden_layers"])


def drop_biases(weights):
    for name in [name for name in weights if "self_attn" in name and name.endswith("bias")]:
        weights[name] = torch.zeros_like(weights[name])


def one_element(tensor):
    tensor = tensor.clone()
    tensor[3, 5] += 0.5
    return tensor


def rows_swapped(tensor):
    tensor = tensor.clone()
    tensor[[PROMPTS[0][1], PROMPTS[0][2]]] = tensor[[PROMPTS[0][2], PROMPTS[0][1]]]
    return tensor


def own_head(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)


QUERIES, KEYS = "attention_queries", "attention_keys"
NORM = "attention_norm_output"
# name -> (base, change of the config, change of the weights, the first (layer, value) that differs)
FAULTS = {
    "inverted schedule": ("plain", schedule(lambda flags: [1 - flag for flag in flags]), None, (0, QUERIES)),
    **{f"flag of layer {i}": ("plain", flip(i), None, (i, QUERIES)) for i in range(5)},
    "every layer RoPE": ("plain", schedule(lambda flags: [1] * len(flags)), None, (3, QUERIES)),
    "every layer NoPE": ("plain", schedule(lambda flags: [0] * len(flags)), None, (0, QUERIES)),
    "schedule shifted": ("plain", schedule(lambda flags: [*flags[1:], flags[0]]), None, (2, QUERIES)),
    "theta 1% off": ("plain", theta(1.01), None, (0, QUERIES)),
    "theta of another model": ("plain", theta(500), None, (0, QUERIES)),
    "eps 1,000 times": ("plain", config(rms_norm_eps=1e-3), None, (0, NORM)),
    "another activation": ("plain", config(hidden_act="gelu"), None, (0, "mlp_activation")),
    "yarn dropped": ("yarn", config(rope_scaling=None), None, (0, QUERIES)),
    "yarn, attention factor 1": ("yarn", config(rope_scaling={**YARN, "attention_factor": 1.0}), None, (0, QUERIES)),
    "yarn, another factor": ("yarn", config(rope_scaling={**YARN, "factor": 4.0}), None, (0, QUERIES)),
    "yarn, another length": (
        "yarn", config(rope_scaling={**YARN, "original_max_position_embeddings": 256}), None, (0, QUERIES)
    ),
    "linear scaling dropped": ("linear", config(rope_scaling=None), None, (0, QUERIES)),
    "llama3 scaling, another factor": ("llama3", config(rope_scaling={**LLAMA3, "factor": 8.0}), None, (0, QUERIES)),
    "window one shorter": ("window", config(sliding_window=15), None, (3, "attention_head_outputs")),
    "window one longer": ("window", config(sliding_window=17), None, (3, "attention_head_outputs")),
    "window dropped": (
        "window", without_window, None, (3, "attention_scores")
    ),
    "K and V swapped": ("plain", None, swap((weight(2, ATTENTION[1]), weight(2, ATTENTION[2]))), (2, KEYS)),
    "query heads rolled": ("plain", None, replace(weight(1, ATTENTION[0]), roll_heads), (1, QUERIES)),
    "key heads off by one": ("plain", None, replace(weight(1, ATTENTION[1]), lambda w: roll_heads(w, 4)), (1, KEYS)),
    "query and key heads off by one": (
        "plain", None,
        both(
            replace(weight(4, ATTENTION[0]), roll_heads), replace(weight(4, ATTENTION[1]), lambda w: roll_heads(w, 4))
        ),
        (4, QUERIES),
    ),
    "value heads permuted": (
        "plain", None, replace(weight(3, ATTENTION[2]), lambda w: roll_heads(w, 4)), (3, "attention_values")
    ),
    "heads permuted before the output projection": (
        "plain", None, replace(weight(0, ATTENTION[3]), lambda w: roll_heads(w.T).T), (0, "attention_output")
    ),
    "rotary pairs interleaved": ("plain", None, replace(weight(0, ATTENTION[0]), interleaved), (0, QUERIES)),
    "query projection transposed": ("plain", None, replace(weight(2, ATTENTION[0]), torch.t), (2, QUERIES)),
    "output projection transposed": ("plain", None, replace(weight(4, ATTENTION[3]), torch.t), (4, "attention_output")),
    "gate and up swapped": ("plain", None, swap((weight(2, LAYER[4]), weight(2, LAYER[5]))), (2, "mlp_activation")),
    "down projection 1% larger": ("plain", None, replace(weight(4, LAYER[6]), lambda w: w * 1.01), (4, "mlp_output")),
    "one weight changed": ("plain", None, replace(weight(3, LAYER[5]), one_element), (3, "mlp_neurons")),
    "norms of a layer swapped": ("plain", None, swap((weight(1, LAYER[7]), weight(1, LAYER[8]))), (1, NORM)),
    "norms of two layers swapped": (
        "plain", None, swap((weight(2, LAYER[8]), weight(4, LAYER[8]))), (2, "mlp_norm_output")
    ),
    "final norm of ones": ("plain", None, replace("model.norm.weight", torch.ones_like), (None, "final_norm_output")),
    "a layer twice": (
        "plain", None, lambda w: w.update({weight(2, n): w[weight(1, n)].clone() for n in LAYER}), (2, NORM)
    ),
    "two layers exchanged": ("plain", None, swap(*((weight(0, n), weight(3, n)) for n in LAYER)), (0, NORM)),
    "embedding rows swapped": ("plain", None, replace("model.embed_tokens.weight", rows_swapped), (0, "layer_input")),
    "embedding scaled": ("plain", None, replace("model.embed_tokens.weight", lambda w: w * 1.001), (0, "layer_input")),
    "head not tied": ("plain", config(tie_word_embeddings=False), own_head, (None, "lm_head_output")),
    "head tied that is not": (
        "untied", config(tie_word_embeddings=True), lambda w: w.pop("lm_head.weight"), (None, "lm_head_output")
    ),
    "a row of the head zero": (
        "untied", None, replace("lm_head.weight", lambda w: w * (torch.arange(len(w)) != 9)[:, None]),
        (None, "lm_head_output"),
    ),
    "attention biases dropped": ("biases", None, drop_biases, (0, QUERIES)),
    "a bias of the MLP dropped": (
        "biases", None, replace("model.layers.2.mlp.down_proj.bias", torch.zeros_like), (2, "mlp_output")
    ),
}  # fmt: skip
