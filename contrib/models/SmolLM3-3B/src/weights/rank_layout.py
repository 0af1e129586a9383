# SPDX-License-Identifier: Apache-2.0
"""Which part of which tensor of the checkpoint is in each rank's shard file. Arithmetic only, imports no torch.

The rules are NxD Inference's (`modules/attention/gqa.py` and its parallel layers); model/heads.py has the heads'.
"""

from dataclasses import dataclass

from ..model.config import CheckpointConfig
from ..model.heads import padded_size
from .projections import PROJECTIONS

# (first, length) along the cut dimension; first is None for padding
Span = tuple[int | None, int]


@dataclass(frozen=True)
class Part:
    """A cut of one tensor of the checkpoint: `spans` of its dimension `dim`, one after the other."""

    source: str
    dim: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Output:
    """One tensor of a rank's file: parts of the checkpoint, one below the other, or (no parts) the rank itself."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def rank_outputs(
    config: CheckpointConfig, rank: int, tp_degree: int, *, fused_qkv: bool = False, vocab_parallel: bool = False
) -> list[Output]:
    """Lists every tensor of the rank's shard file, in no order."""
    spans = _spans(config, rank, tp_degree)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding_dim, embedding_features = (0, "vocab_size") if vocab_parallel else (1, "hidden_size")
    outputs = [
        _cut("embed_tokens.weight", (vocab, hidden), embedding_dim, spans[embedding_features]),
        # where embeddings are tied, whoever reads the checkpoint takes them for the head
        _cut("lm_head.weight", (vocab, hidden), 0, spans["vocab_size"]),
        _cut("norm.weight", (hidden,)),
        Output("rank_util.rank", (1,), ()),
    ]
    if vocab_parallel:
        outputs.append(Output("embed_tokens.rank_util.rank", (1,), ()))
    for layer in (f"layers.{layer_idx}" for layer_idx in range(config.num_hidden_layers)):
        outputs += [
            _cut(f"{layer}.input_layernorm.weight", (hidden,)),
            _cut(f"{layer}.post_attention_layernorm.weight", (hidden,)),
            Output(f"{layer}.self_attn.rank_util.rank", (1,), ()),
            *_projection_outputs(config, layer, spans, fused_qkv),
        ]
    return outputs


def _spans(config: CheckpointConfig, rank: int, tp_degree: int) -> dict[str, tuple[Span, ...]]:
    """Maps the config's name of a size to the rank's spans of a dimension that has that size."""
    spans = {}
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        size = getattr(config, name)
        length = padded_size(size, tp_degree) // tp_degree
        first = rank * length
        inside = max(0, min(length, size - first))
        spans[name] = tuple(span for span in ((first, inside), (None, length - inside)) if span[1])
    plan, head_dim = config.plan(tp_degree), config.head_dim
    for name, heads in (("query_size", plan.query_heads(rank)), ("key_value_size", plan.key_value_heads(rank))):
        spans[name] = tuple((None if head is None else head * head_dim, head_dim) for head in heads)
    return spans


def _cut(source: str, sizes: tuple[int, ...], dim: int = 0, spans: tuple[Span, ...] | None = None) -> Output:
    """Cuts a tensor of the checkpoint, which has these sizes, to `spans` of dimension `dim`; None leaves it whole."""
    spans = spans or ((0, sizes[dim]),)
    length = sum(length for _, length in spans)
    return Output(source, (*sizes[:dim], length, *sizes[dim + 1 :]), (Part(source, dim, spans),))


def _projection_outputs(
    config: CheckpointConfig, layer: str, spans: dict[str, tuple[Span, ...]], fused_qkv: bool
) -> list[Output]:
    stacks: dict[str, list[Output]] = {}  # with fused_qkv three of the checkpoint's tensors go into one
    for projection in PROJECTIONS:
        source, name = f"{layer}.{projection.name}", f"{layer}.{projection.neuron_name(fused_qkv)}"
        sizes = getattr(config, projection.out_features), getattr(config, projection.in_features)
        weight_spans = spans[projection.cut_features]
        stacks.setdefault(f"{name}.weight", []).append(
            _cut(f"{source}.weight", sizes, projection.cut_dim, weight_spans)
        )
        if getattr(config, projection.bias):
            bias_spans = weight_spans if projection.cut_dim == 0 else None
            stacks.setdefault(f"{name}.bias", []).append(_cut(f"{source}.bias", sizes[:1], 0, bias_spans))
    return [_stacked(name, outputs) for name, outputs in stacks.items()]


def _stacked(name: str, outputs: list[Output]) -> Output:
    """Puts the outputs one below the other."""
    length = sum(output.shape[0] for output in outputs)
    return Output(name, (length, *outputs[0].shape[1:]), tuple(part for output in outputs for part in output.parts))
