"""Weights quantized by NxD Inference: which ones, their scales, and what cannot go with it. Imports no torch.

The library decides by a module's name what `modules_to_not_convert` leaves alone, once by transformers' names when it
quantizes a checkpoint and once by its own when it builds the graph: here the two must agree.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SmolLM3Error
from .rank_layout import Output, Part

TYPES = ("per_tensor_symmetric", "per_channel_symmetric")
DTYPES = ("int8", "f8e4m3")
LAYER_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
QKV = LAYER_LINEARS[:3]
PARTS = ("lm_head", "self_attn", "o_proj", "mlp", "gate_proj", "up_proj", "down_proj")


def quantized_linears(config: Any) -> set[str]:
    """Names in the checkpoint, without prefix and ".weight", of the projections that are quantized.

    `config` has the values of hf_config.py and a neuron_config as attributes. SmolLM3Error where transformers' names
    and the library's disagree about one.
    """
    neuron_config = config.neuron_config
    if not getattr(neuron_config, "quantized", False):
        return set()
    linears, used = set(), set()
    left_out = neuron_config.modules_to_not_convert or []
    layers = [f"layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in LAYER_LINEARS]
    for linear in ["lm_head", *layers]:
        of_library = _library_name(linear, neuron_config.fused_qkv)
        of_checkpoint = linear if linear == "lm_head" else f"model.{linear}"
        found = {name: any(part in name for part in left_out) for name in (of_checkpoint, of_library)}
        if len(set(found.values())) > 1:
            raise SmolLM3Error(
                f"modules_to_not_convert is {left_out}: it names only one of {' and '.join(found)}, which are the same "
                f"projection in the checkpoint and in the graph; use names that both have: {', '.join(PARTS)}"
            )
        if not found[of_library]:
            linears.add(linear)
        used.update(part for part in left_out if part in of_library)
    if len(used) < len(left_out):
        unused = next(part for part in left_out if part not in used)
        raise SmolLM3Error(
            f"modules_to_not_convert has {unused!r}, which no projection's name contains; {', '.join(PARTS)} do"
        )
    return linears


def _library_name(linear: str, fused_qkv: bool) -> str:
    attention, _, projection = linear.rpartition(".")
    if linear.endswith(QKV):
        return f"{attention}.qkv_proj.{'Wqkv' if fused_qkv else projection}"
    return f"{linear}.o_proj" if projection == "o_proj" else linear


def check_quantization(config: Any) -> None:
    """SmolLM3Error for settings of quantization that NxD Inference would refuse later, or run wrong."""
    of = config.neuron_config
    if not of.quantized:
        if of.modules_to_not_convert:
            raise SmolLM3Error(
                f"modules_to_not_convert is {of.modules_to_not_convert}, but quantized is off: turn it on"
            )
        return
    for name, allowed in (("quantization_type", TYPES), ("quantization_dtype", DTYPES)):
        if getattr(of, name) not in allowed:
            raise SmolLM3Error(f"{name} is {getattr(of, name)!r}, supported is {' or '.join(map(repr, allowed))}")
    linears = quantized_linears(config)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise SmolLM3Error(
                f"quantized: {name} is true, and the library loses biases when it quantizes; leave it out"
            )
    if of.quantization_type == "per_tensor_symmetric":
        instead = "use quantization_type 'per_channel_symmetric'"
        if of.fused_qkv:
            raise SmolLM3Error(f"fused_qkv: one scale per tensor does not fit three projections in one; {instead}")
        if of.modules_to_not_convert:
            raise SmolLM3Error(
                f"modules_to_not_convert is {of.modules_to_not_convert}: the library quantizes them all the same with "
                f"'per_tensor_symmetric'; {instead}"
            )
        if config.intermediate_size % of.tp_degree:
            raise SmolLM3Error(
                f"intermediate_size is {config.intermediate_size}, tp_degree {of.tp_degree} does not divide it, and the "
                f"library cannot pad it with one scale per tensor; {instead}"
            )
    if "lm_head" in linears and config.vocab_size % of.tp_degree:
        raise SmolLM3Error(
            f"vocab_size is {config.vocab_size}, tp_degree {of.tp_degree} does not divide it, and the library masks real "
            "logits of a quantized lm_head then; use modules_to_not_convert lm_head with 'per_channel_symmetric'"
        )


def with_scales(outputs: Iterable[Output], linears: set[str], per_channel: bool) -> Iterator[Output]:
    """The outputs, and beside each quantized weight its scales: one per row, or one."""
    for output in outputs:
        yield output
        if not is_quantized(output, linears):
            continue
        parts = []
        for part in output.parts:
            spans = ((0, 1),) if not per_channel else part.spans if part.dim == 0 else ((0, output.shape[0]),)
            parts.append(Part(part.source.removesuffix("weight") + "scale", 0, spans))
        shape = (output.shape[0], 1) if per_channel else (1,)
        yield Output(output.name.removesuffix("weight") + "scale", shape, tuple(parts))


def is_quantized(output: Output, linears: set[str]) -> bool:
    """Whether it is the weight of one of the projections."""
    return bool(output.parts) and output.parts[0].source.removesuffix(".weight") in linears
