# SPDX-License-Identifier: Apache-2.0
"""Weights quantized by NxD Inference: which ones, their scales, and the settings that are refused. Imports no torch.

The library decides by a module's name what `modules_to_not_convert` leaves alone, once by transformers' names when it
quantizes a checkpoint and once by its own when it builds the graph: here the two must agree.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SmolLM3Error
from ..model.config import CheckpointConfig
from ..model.dtypes import QUANTIZATION_DTYPES
from .files import PREFIX
from .projections import PROJECTIONS, QKV
from .rank_layout import Output, Part

INT8_LEAST_SCALE = 2.0**-23  # float32's smallest step above 1
FP8_LEAST_SCALE = 1e-5
QUANTIZATION_TYPES = ("per_tensor_symmetric", "per_channel_symmetric")
# for modules_to_not_convert: the parts of names that transformers and the library both have
MODULE_NAMES = (
    "lm_head",
    *dict.fromkeys(part for projection in PROJECTIONS if projection not in QKV for part in projection.name.split(".")),
)


def least_scale(quantization_dtype: str, per_channel: bool) -> float:
    """Returns what the library gives a channel, or a tensor, of nothing but zeros."""
    if quantization_dtype == "int8":
        return INT8_LEAST_SCALE
    return FP8_LEAST_SCALE if per_channel else 0.0


def quantized_linears(config: CheckpointConfig, neuron_config: Any) -> set[str]:
    """Returns the names of the projections that are quantized, as in the checkpoint without prefix and ".weight".

    `neuron_config` is a NeuronConfig, or the settings of an artifact, which have its names. Raises SmolLM3Error where
    transformers' names and the library's disagree about one.
    """
    if not neuron_config.quantized:
        return set()
    linears, used = set(), set()
    left_out = neuron_config.modules_to_not_convert or []
    names = {"lm_head": ("lm_head", "lm_head")}  # linear -> transformers' name, the library's name
    for layer in (f"layers.{layer_idx}" for layer_idx in range(config.num_hidden_layers)):
        for projection in PROJECTIONS:
            linear = f"{layer}.{projection.name}"
            names[linear] = (f"{PREFIX}{linear}", f"{layer}.{projection.neuron_name(neuron_config.fused_qkv)}")
    for linear, (transformers_name, library_name) in names.items():
        is_left_out = any(part in library_name for part in left_out)
        if is_left_out != any(part in transformers_name for part in left_out):
            raise SmolLM3Error(
                f"modules_to_not_convert is {left_out}: it names only one of {transformers_name} and {library_name}, "
                "which are the same projection in the checkpoint and in the graph; use names that both have: "
                f"{', '.join(MODULE_NAMES)}"
            )
        if not is_left_out:
            linears.add(linear)
        used.update(part for part in left_out if part in library_name)
    if len(used) < len(left_out):
        unused = next(part for part in left_out if part not in used)
        raise SmolLM3Error(
            f"modules_to_not_convert has {unused!r}, which no projection's name contains; {', '.join(MODULE_NAMES)} do"
        )
    return linears


def check_quantization(config: CheckpointConfig, neuron_config: Any) -> None:
    """Raises SmolLM3Error for settings of quantization that NxD Inference would refuse later, or run wrong."""
    if not neuron_config.quantized:
        if neuron_config.modules_to_not_convert:
            raise SmolLM3Error(
                f"modules_to_not_convert is {neuron_config.modules_to_not_convert}, but quantized is off: turn it on"
            )
        return
    for name, allowed in (("quantization_type", QUANTIZATION_TYPES), ("quantization_dtype", QUANTIZATION_DTYPES)):
        if getattr(neuron_config, name) not in allowed:
            raise SmolLM3Error(
                f"{name} is {getattr(neuron_config, name)!r}, supported is {' or '.join(map(repr, allowed))}"
            )
    linears = quantized_linears(config, neuron_config)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise SmolLM3Error(
                f"quantized: {name} is true, and the library loses biases when it quantizes; leave it out"
            )
    if neuron_config.quantization_type == "per_tensor_symmetric":
        instead = "use quantization_type 'per_channel_symmetric'"
        if neuron_config.fused_qkv:
            raise SmolLM3Error(f"fused_qkv: one scale per tensor does not fit three projections in one; {instead}")
        if neuron_config.modules_to_not_convert:
            raise SmolLM3Error(
                f"modules_to_not_convert is {neuron_config.modules_to_not_convert}: the library quantizes them all the "
                f"same with 'per_tensor_symmetric'; {instead}"
            )
        if config.padded(neuron_config).intermediate_size % neuron_config.tp_degree:
            raise SmolLM3Error(
                f"intermediate_size is {config.intermediate_size}, tp_degree {neuron_config.tp_degree} does not divide "
                f"it, and the library cannot pad it with one scale per tensor; {instead}"
            )
    if "lm_head" in linears and config.vocab_size % neuron_config.tp_degree:
        raise SmolLM3Error(
            f"vocab_size is {config.vocab_size}, tp_degree {neuron_config.tp_degree} does not divide it, and the "
            "library masks real logits of a quantized lm_head then; use modules_to_not_convert lm_head with "
            "'per_channel_symmetric'"
        )


def with_scales(outputs: Iterable[Output], linears: set[str], per_channel: bool) -> Iterator[Output]:
    """Yields the outputs, and after each quantized weight its scales: one per row, or one for all."""
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
    """Tells whether the output is the weight of one of `linears`."""
    return bool(output.parts) and output.parts[0].source.removesuffix(".weight") in linears
