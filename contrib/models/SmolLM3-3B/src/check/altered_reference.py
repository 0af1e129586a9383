# SPDX-License-Identifier: Apache-2.0
"""The reference of an artifact whose weights are not the checkpoint's own: an adapter merged, 8-bit values, or both."""

from pathlib import Path
from typing import Any

import torch
from transformers import SmolLM3ForCausalLM

from ..model.config import CheckpointConfig, read_config
from ..weights.adapter import Adapter
from ..weights.files import PREFIX
from ..weights.lazy_rows import QuantizedRows
from ..weights.quantization import quantized_linears
from .reference import load_reference


class Alteration:
    """Makes of the checkpoint's weights, in `dtype`, those that the sharder makes.

    `adapter` is the folder of a PEFT adapter, which is merged. `quantized` is an artifact's Settings: of a projection
    that they quantize, each weight becomes its 8-bit value times its scale. Raises SmolLM3Error for an adapter that
    does not fit.
    """

    def __init__(
        self, config: CheckpointConfig, dtype: torch.dtype, adapter: str | Path | None = None, quantized: Any = None
    ):
        self.dtype, self.quantized = dtype, quantized
        self._linears = quantized_linears(config, quantized) if quantized else set()
        self._adapter = adapter and Adapter(adapter, config)

    @property
    def is_none(self) -> bool:
        """Whether every weight stays as it is."""
        return not self._adapter and not self._linears

    def merged(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight of that name (without prefix) with the adapter merged, which rounds to `dtype`."""
        return self._adapter.merged(name, weight, dtype)[:] if self._adapter else weight

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns the altered weight of that name (without prefix) from the checkpoint's, which is in `dtype`."""
        if name.removesuffix(".weight") not in self._linears:
            return self.merged(name, weight, self.dtype).to(self.dtype)
        merged = self.merged(name, weight, torch.float32)
        weight = QuantizedRows(merged, self.quantized.quantization_type, self.quantized.quantization_dtype)
        return (weight[:].float() * weight.scale).to(self.dtype)


@torch.no_grad()
def load_altered_reference(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    adapter: str | Path | None = None,
    quantized: Any = None,
) -> SmolLM3ForCausalLM:
    """Returns `load_reference` of the checkpoint in `folder` with its weights altered as `Alteration` says.

    Raises SmolLM3Error for a checkpoint or an adapter that does not fit.
    """
    model, alteration = load_reference(folder, dtype), Alteration(read_config(folder), dtype, adapter, quantized)
    if alteration.is_none:
        return model
    if model.lm_head.weight is model.model.embed_tokens.weight:  # each is altered for itself
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        parameter.data = alteration(name.removeprefix(PREFIX), parameter.data)
    return model
