# SPDX-License-Identifier: Apache-2.0
"""The reference of an artifact whose weights are not the checkpoint's own: an adapter merged, 8-bit values, or both."""

from pathlib import Path
from typing import Any

import torch
from transformers import SmolLM3ForCausalLM

from ..model.config import read_config
from ..weights.adapter import Adapter
from ..weights.files import PREFIX
from ..weights.lazy_rows import QuantizedRows
from ..weights.quantization import quantized_linears
from .reference import load_reference


@torch.no_grad()
def load_altered_reference(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    adapter: str | Path | None = None,
    quantized: Any = None,
) -> SmolLM3ForCausalLM:
    """Returns `load_reference` of the checkpoint in `folder` with its weights altered as the sharder alters them.

    `adapter` is the folder of a PEFT adapter, which is merged. `quantized` is an artifact's Settings: of a projection
    that they quantize, each weight becomes its 8-bit value times its scale. Raises SmolLM3Error for a checkpoint or an
    adapter that does not fit.
    """
    config, model = read_config(folder), load_reference(folder, dtype)
    linears = quantized_linears(config, quantized) if quantized else set()
    if adapter is None and not linears:
        return model
    merge = adapter and Adapter(adapter, config)
    if model.lm_head.weight is model.model.embed_tokens.weight:  # each is altered for itself
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        name, weight = name.removeprefix(PREFIX), parameter.data
        is_quantized = name.removesuffix(".weight") in linears
        if merge:
            weight = merge.merged(name, weight, torch.float32 if is_quantized else dtype)
        if is_quantized:
            weight = QuantizedRows(weight, quantized.quantization_type, quantized.quantization_dtype)
        parameter.data = (weight[:].float() * weight.scale if is_quantized else weight[:]).to(dtype)
    return model
