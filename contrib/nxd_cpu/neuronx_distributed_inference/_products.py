# SPDX-License-Identifier: Apache-2.0
"""Products of a dtype for which this CPU has no instructions: in float32, a piece of the weight at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_PIECE = 1 << 20  # elements: 4 MB once they are wide, which a CPU's caches hold
FEW_ROWS = 8  # below it, torch's own product is as fast: it reads a weight once, and narrow


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute products of `dtype` in: float32 where oneDNN has no instructions of this CPU for it."""
    if dtype not in _SUPPORTED:
        return dtype
    if torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, _SUPPORTED[dtype])():
        return dtype
    return torch.float32


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N), summed in float32 and rounded once to the dtype of x."""
    wide, pieces = x.float(), weight.split(max(1, _PIECE // weight.shape[1]))
    biases = [None] * len(pieces) if bias is None else bias.float().split(pieces[0].shape[0])
    outputs = [F.linear(wide, piece.float(), added).to(x.dtype) for piece, added in zip(pieces, biases)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def widen_products(module: fx.GraphModule) -> None:
    """Make `widened_linear` of a graph's linears of many rows, where this CPU has no instructions for their dtype."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        x = node.args[0].meta["val"]
        if product_dtype(x.dtype) != x.dtype and x.numel() // x.shape[-1] >= FEW_ROWS:
            node.target = widened_linear
    module.recompile()
