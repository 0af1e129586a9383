# SPDX-License-Identifier: Apache-2.0
"""The model beside transformers, layer by layer and value by value, and what each layer does to positions.

The models run uncompiled, one prompt in one pass, with hooks on their modules: on the CPU runtime every rank in its
thread, in the library's own CPU mode its one rank. A value may be off by ALLOWED times what transformers' own run in
the dtype is off on the same tokens, and by ULPS units in the last place of its largest element.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..generate.generation import prefill_inputs
from ..model.config import CheckpointConfig, read_config
from .streamed_reference import WIDER, StreamedModel
from .validation import ALLOWANCE

# twice what the logits of many positions may be off: one value has few elements to look for the largest error in
ALLOWED = 2 * ALLOWANCE
# of 1, in the model's dtype: for values that transformers happens not to round, such as an embedding's. The number is
# chosen; what right models need was never measured on a device
ULPS = 4
# in the order of the data's flow
LAYER_VALUES = (
    "layer_input", "attention_norm_output", "attention_queries", "attention_keys", "attention_values",
    "attention_scores", "attention_probabilities", "attention_head_outputs", "attention_output", "layer_mid",
    "mlp_norm_output", "mlp_activation", "mlp_neurons", "mlp_output", "layer_output",
)  # fmt: skip
MODEL_VALUES = ("final_norm_output", "lm_head_output", "logits", "next_token_probs")
QUERY_HEADS = (
    "attention_queries", "attention_scores", "attention_probabilities", "attention_head_outputs", "query_projection"
)  # fmt: skip
# the projections are not compared: what a layer does to positions is read from them
KEY_VALUE_HEADS = ("attention_keys", "attention_values", "key_projection")
Key = tuple[int | None, str]  # layer (None: the model's own) and name of a value
Values = dict[Key, Tensor]
# other names of the field for values above, and for what the model is given
ALIASES = {
    "premix": "attention_head_outputs",
    "mlp_input": "mlp_norm_output",
    "token_embeddings": "layer_input",  # of the first layer
}
ROWS = 64  # the reference runs a multiple of so many tokens


class Recorder(TorchFunctionMode):
    """Writes down the values of one model, or of one rank's part of it, while it is entered.

    `replaced` has, by layer, inputs to take instead of the layers' own, so that each of them runs alone.
    """

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, lm_head: nn.Module):
        super().__init__()
        self.values: Values = {}
        self.replaced: dict[int, Tensor] = {}
        self.layer: int | None = None  # whose attention is running
        self._hooks, self._wrapped = [], []
        for index, layer in enumerate(layers):
            self._before(layer, index, "layer_input", replace=True)
            self._after(layer.input_layernorm, index, "attention_norm_output")
            if hasattr(layer.self_attn, "qkv_proj"):
                self._around_projections(layer.self_attn, index)
            else:
                self._after(layer.self_attn.q_proj, index, "query_projection")
                self._after(layer.self_attn.k_proj, index, "key_projection")
            self._before(layer.self_attn.o_proj, index, "attention_head_outputs")
            self._after(layer.self_attn, index, "attention_output")
            self._before(layer.post_attention_layernorm, index, "layer_mid")
            self._after(layer.post_attention_layernorm, index, "mlp_norm_output")
            self._after(layer.mlp.act_fn, index, "mlp_activation")
            self._before(layer.mlp.down_proj, index, "mlp_neurons")
            self._after(layer.mlp, index, "mlp_output")
            self._after(layer, index, "layer_output")
        self._after(norm, None, "final_norm_output")
        self._after(lm_head, None, "lm_head_output")

    def _before(self, module: nn.Module, layer: int | None, name: str, replace: bool = False) -> None:
        def record_input(module, args, kwargs):
            if replace:
                self.layer = layer
                if layer in self.replaced:
                    return (self.replaced[layer], *args[1:]), kwargs
            self.values[layer, name] = args[0] if args else next(iter(kwargs.values()))

        self._hooks.append(module.register_forward_pre_hook(record_input, with_kwargs=True))

    def _after(self, module: nn.Module, layer: int | None, name: str) -> None:
        def record_output(module, args, output):
            self.values[layer, name] = output if torch.is_tensor(output) else output[0]

        self._hooks.append(module.register_forward_hook(record_output))

    def _around_projections(self, attention: nn.Module, layer: int) -> None:
        """Records the library's attention: one module projects, a method makes of that what enters the attention."""

        def record_projections(module, args, output):
            self.values[layer, "query_projection"], self.values[layer, "key_projection"] = output[:2]

        def prepare(*args, **kwargs):
            output = inner(*args, **kwargs)
            for name, value in zip(("queries", "keys", "values"), output):
                self.values[layer, f"attention_{name}"] = value
            return output

        inner, attention.prep_qkv_tensors = attention.prep_qkv_tensors, prepare
        self._hooks.append(attention.qkv_proj.register_forward_hook(record_projections))
        self._wrapped.append(attention)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Records the attention itself, which is a function and no module: its arguments are what enters it."""
        output = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention and self.layer is not None:
            self._record_attention(*args[:3], **(kwargs or {}))
        return output

    def _record_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask=None, is_causal=False, scale=None, **_
    ) -> None:
        if query.dim() != 4:
            return  # in blocks of a sliding window: no square of scores
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ repeated.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            masked = attn_mask.logical_not() if attn_mask.dtype == torch.bool else attn_mask < 0
            scores = scores.masked_fill(masked, float("-inf"))
        entering = {"queries": query, "keys": key, "values": value}
        computed = {"scores": scores, "probabilities": scores.softmax(-1)}
        for name, tensor in (entering | computed).items():
            self.values.setdefault((self.layer, f"attention_{name}"), tensor)

    def close(self) -> None:
        """Leaves the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for attention in self._wrapped:
            del attention.prep_qkv_tensors


@dataclass
class Difference:
    """How far a value of the model is from transformers', both as shares of the value's largest element."""

    error: float
    tolerance: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.tolerance


@dataclass
class Inspection:
    """What was seen: values beside transformers', and for each layer whether it applies RoPE, three times told."""

    differences: dict[Key, Difference]
    """In the order of the data's flow."""
    rope_of_config: list[bool]
    """What the config says."""
    rope_of_projections: list[bool]
    """Whether the queries or keys that enter attention differ from the projections' outputs."""
    rope_of_spacing: list[bool]
    """Whether the layer alone is moved by other distances between the positions."""
    spacing_sizes: list[float]
    """By how much that moves the layer's attention at most, as a share of its largest element."""
    spacing_keeps_first: list[bool]
    """Whether it leaves the attention at position 0, whose own position is the same, as it was to the bit."""
    broken_identity: list[int]
    """The layers whose output is not input + attention + MLP, to the bit."""
    tree: list[str] = field(default_factory=list)
    """The modules of a rank, see `module_tree`."""
    values: Values = field(default_factory=dict, repr=False)
    """The model's own values."""
    reference: Values = field(default_factory=dict, repr=False)
    """Those of transformers in the model's dtype."""

    @property
    def first(self) -> Key | None:
        """Layer and name of the first value that differs, or None."""
        return next((key for key, difference in self.differences.items() if difference.is_wrong), None)

    @property
    def disagreeing(self) -> list[int]:
        """The layers that behave otherwise than the config says."""
        probes = zip(self.rope_of_config, self.rope_of_projections, self.rope_of_spacing)
        return [layer for layer, (config, *probed) in enumerate(probes) if probed != [config, config]]

    @property
    def is_right(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and not self.disagreeing and not self.broken_identity


@torch.no_grad()
def inspect(app, folder: Path, prompt: Sequence[int], ranks: Any = None, adapter: str | None = None) -> Inspection:
    """Runs the application on `prompt` (token ids) beside transformers' model of the checkpoint in `folder`.

    `app` is a NeuronSmolLM3ForCausalLM whose weights are loaded, with its ranks in threads as `ranks` (see
    nxd_cpu_compiler/eager_ranks.py), or, without them, in the library's CPU mode. `adapter` is the folder of a PEFT
    adapter that is merged in both.
    """
    config = app.config.checkpoint_config
    models = ranks.models if ranks else [app.context_encoding_model.model]
    recorders = [Recorder(model.layers, model.norm, model.lm_head) for model in models]
    if ranks:  # in the library's CPU mode the attention is no one function: no scores and probabilities
        ranks.around = lambda rank: recorders[rank]
    inputs = prefill_inputs([prompt], pad_token_id=0)

    def run(**changes: Tensor) -> Values:
        for recorder in recorders:
            recorder.values.clear()
        app.reset()
        logits = app(**{**inputs, **changes}).logits[:1, -1:].float()
        values = joined([recorder.values for recorder in recorders], config, len(prompt))
        values[None, "logits"], values[None, "next_token_probs"] = logits[0], logits[0].softmax(-1)
        return values

    ours = run()
    layers = range(config.num_hidden_layers)
    for recorder in recorders:  # each layer alone, from here on
        recorder.replaced = {layer: recorder.values[layer, "layer_input"].clone() for layer in layers}
    # every two tokens in one place, but for the last: the library reads a prompt's end off the largest position
    closer = torch.arange(len(prompt)) // 2
    closer[-1] = len(prompt) - 1
    spaced = run(position_ids=closer[None])
    for recorder in recorders:
        recorder.close()
    neuron_config = app.neuron_config
    dtype, quantized = neuron_config.torch_dtype, neuron_config if neuron_config.quantized else None
    rope_table = neuron_config.max_length if neuron_config.rope_precision == "float64" else None
    theirs, exact = (
        reference_values(StreamedModel(folder, one, adapter, quantized, rope_table), prompt, config)
        for one in (dtype, WIDER[dtype])
    )
    pairs = [(ours[layer, "attention_output"], spaced[layer, "attention_output"]) for layer in layers]
    return Inspection(
        differences=compared(ours, theirs, exact, dtype),
        rope_of_config=[bool(flag) for flag in read_config(folder).no_rope_layers],
        rope_of_projections=[rotates(ours, layer) for layer in layers],
        rope_of_spacing=[not torch.equal(own, other) for own, other in pairs],
        spacing_sizes=[((other - own).abs().max() / own.abs().max()).item() for own, other in pairs],
        spacing_keeps_first=[torch.equal(own[0], other[0]) for own, other in pairs],
        broken_identity=[layer for layer in layers if not keeps_identity(ours, layer)],
        tree=module_tree(models[0]),
        values=ours,
        reference=theirs,
    )


def named_values(values: Values, prompt: Sequence[int], layers: Sequence[int]) -> dict[str, Tensor]:
    """Returns the values of `layers` and of the model by `layers.N.NAME` and `NAME`, aliases and inputs among them.

    Each is a tensor of its own, as a safetensors file wants it.
    """
    named = {(f"layers.{key[0]}." if key[0] is not None else "") + key[1]: tensor for key, tensor in values.items()}
    kept = {name: named[name] for name in named if "." not in name or int(name.split(".")[1]) in layers}
    for alias, name in ALIASES.items():
        places = [""] if alias == "token_embeddings" else [f"layers.{layer}." for layer in layers]
        kept |= {place + alias: named[(place or "layers.0.") + name] for place in places}
    kept |= {"input_ids": torch.tensor(prompt), "attention_mask": torch.ones(len(prompt), dtype=torch.int64)}
    kept["input_size"] = torch.tensor([len(prompt)])
    return {name: tensor.contiguous().clone() for name, tensor in kept.items()}


def reference_values(model: StreamedModel, prompt: Sequence[int], config: CheckpointConfig) -> Values:
    """Returns the values of transformers' `model` for `prompt`, shaped as `joined` has them.

    The prompt is padded on the right, as the application pads it: in a matrix product of few rows a CPU sums in another
    order and rounds less, and what transformers is off would be measured too small for the application.
    """
    recorder = Recorder(model.layers, model.norm, model.lm_head)
    padded = [*prompt, *[0] * (-len(prompt) % ROWS)]
    with recorder:
        (logits,) = model.logits([padded], [torch.tensor([len(prompt) - 1])])
    values = joined([recorder.values], config, len(prompt))
    values[None, "logits"], values[None, "next_token_probs"] = logits, logits.softmax(-1)
    return values


def joined(ranks: list[Values], config: CheckpointConfig, length: int) -> Values:
    """Returns the whole values of one prompt of `length` tokens, from each rank's part of them.

    They have no batch dimension: heads are [heads, length, ...], all else is [length, ...].
    """
    plan, heads, kv_heads = config.plan(len(ranks)), config.num_attention_heads, config.num_key_value_heads
    whole: Values = {}
    for key, first in ranks[0].items():
        name = key[1]
        parts = [values[key][0] for values in ranks]
        if name in QUERY_HEADS or name in KEY_VALUE_HEADS:
            is_query = name in QUERY_HEADS
            count, heads_of = (heads, plan.query_heads) if is_query else (kv_heads, plan.key_value_heads)
            if first.dim() == 3:  # [length, heads * head_dim]
                parts = [part.unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for part in parts]
            by_head = {}
            for rank, part in enumerate(parts):
                by_head |= zip(_layout(heads_of(rank), len(part), count), part)
            whole[key] = torch.stack([by_head[head] for head in range(count)])[:, :length]
            if name in ("attention_scores", "attention_probabilities"):
                whole[key] = whole[key][..., :length]
        elif name in ("mlp_activation", "mlp_neurons"):
            whole[key] = torch.cat(parts, -1)[:length, : config.intermediate_size]
        elif name == "lm_head_output":
            gathered = parts[0].shape[-1] >= config.vocab_size
            whole[key] = (parts[0] if gathered else torch.cat(parts, -1))[-1:, : config.vocab_size]
        else:
            whole[key] = parts[0][:length]
    return whole


def _layout(layout: list[int | None], held: int, count: int) -> list[int | None]:
    """Returns which of `count` heads each of the `held` ones is: `layout`, unless transformers repeated the keys.

    Then there is one of them for each query head.
    """
    return layout if len(layout) == held else [head // (held // count) for head in range(held)]


def compared(ours: Values, theirs: Values, exact: Values, dtype: torch.dtype) -> dict[Key, Difference]:
    """Returns by how much `ours` is off from `exact`, and by how much it may be, in the data's order.

    `theirs` is transformers' run in `dtype`. Both are shares of the value's largest element; ALLOWED and ULPS say how
    the second follows from what `theirs` is off. Masked scores are left out of the comparison.
    """
    layers = sorted({layer for layer, _ in ours if layer is not None})
    keys = [*((layer, name) for layer in layers for name in LAYER_VALUES), *((None, name) for name in MODEL_VALUES)]
    differences = {}
    for key in keys:
        if key not in ours or key not in theirs:
            continue
        mine, other, right = (values[key].double() for values in (ours, theirs, exact))
        unmasked = right.isfinite()
        if not torch.equal(mine.isneginf(), right.isneginf()):
            differences[key] = Difference(float("inf"), 0.0)
            continue
        scale = right[unmasked].abs().max().clamp_min(torch.finfo(dtype).tiny)
        error, noise = (((value - right)[unmasked].abs().max() / scale).item() for value in (mine, other))
        differences[key] = Difference(error, ALLOWED * noise + ULPS * torch.finfo(dtype).eps)
    return differences


def rotates(values: Values, layer: int) -> bool:
    """Tells whether the queries or keys that enter attention differ from the projections' outputs."""
    pairs = (("attention_queries", "query_projection"), ("attention_keys", "key_projection"))
    return any(not torch.equal(values[layer, entering], values[layer, projected]) for entering, projected in pairs)


def keeps_identity(values: Values, layer: int) -> bool:
    """Tells whether the layer's output is its input + attention + MLP, to the bit."""
    mid = values[layer, "layer_input"] + values[layer, "attention_output"]
    output = mid + values[layer, "mlp_output"]
    return torch.equal(mid, values[layer, "layer_mid"]) and torch.equal(output, values[layer, "layer_output"])


def module_tree(model: nn.Module) -> list[str]:
    """Returns one line for each module of a rank: its name, class and weights' shapes; equal layers are told once."""

    def lines_of(module: nn.Module, name: str, depth: int) -> list[str]:
        own = ", ".join(f"{key} {list(p.shape)}" for key, p in module.named_parameters(recurse=False))
        lines = [f"{'  ' * depth}{name}: {type(module).__name__}{' ' + own if own else ''}"]
        for key, child in module.named_children():
            if key == "layers":
                alike: dict[tuple, list[int]] = {}
                for index, layer in enumerate(child):
                    alike.setdefault(tuple(lines_of(layer, "", depth + 2)[1:]), []).append(index)
                for rest, indices in alike.items():
                    lines += [
                        f"{'  ' * (depth + 1)}layers {', '.join(map(str, indices))}: {type(child[0]).__name__}",
                        *rest,
                    ]
            elif key != "kv_mgr":
                lines += lines_of(child, key, depth + 1)
        return lines

    return lines_of(model, "model", 0)
