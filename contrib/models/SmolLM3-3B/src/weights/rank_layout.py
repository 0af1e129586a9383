"""Which part of which tensor of the checkpoint stands in each rank's shard file. Arithmetic only, imports no torch.

The rules are NxD Inference's (`modules/attention/gqa.py` and its parallel layers); heads.py says what they do to the heads.
"""

from dataclasses import dataclass
from typing import Any

from ..model.heads import ShardingPlan, padded, source_num_key_value_heads

# (first, length) along the cut dimension; first None: padding
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
    config: Any, rank: int, tp_degree: int, *, fused_qkv: bool = False, vocab_parallel: bool = False
) -> list[Output]:
    """Every tensor of the rank's shard file, in no order. `config` has the values of hf_config.py as attributes."""
    plan = ShardingPlan(tp_degree, config.num_attention_heads, source_num_key_value_heads(config))
    hidden, head_dim = config.hidden_size, config.head_dim
    outputs = []

    def add(name: str, shape: tuple[int, ...], *parts: Part) -> None:
        outputs.append(Output(name, shape, parts))

    def whole(name: str, target: str | None = None) -> None:
        add(target or name, (hidden,), Part(name, 0, ((0, hidden),)))

    def cut(name: str, source: str, dim: int, size: int, other: int) -> None:
        length = padded(size, tp_degree) // tp_degree
        spans = _within(rank * length, length, size)
        shape = (length,) if other == 0 else (length, other) if dim == 0 else (other, length)
        add(name, shape, Part(source, dim, spans))

    embed = "embed_tokens.weight"
    if vocab_parallel:
        cut(embed, embed, 0, config.vocab_size, hidden)
        add("embed_tokens.rank_util.rank", (1,))
    else:
        cut(embed, embed, 1, hidden, config.vocab_size)
    cut(
        "lm_head.weight", "lm_head.weight", 0, config.vocab_size, hidden
    )  # of tied embeddings: whoever reads takes them
    whole("norm.weight")
    add("rank_util.rank", (1,))

    q_spans, kv_spans = _heads(plan.query_heads(rank), head_dim), _heads(plan.key_value_heads(rank), head_dim)
    q_size, kv_size = len(q_spans) * head_dim, len(kv_spans) * head_dim
    qkv = (("q_proj", q_spans, q_size), ("k_proj", kv_spans, kv_size), ("v_proj", kv_spans, kv_size))
    for layer_idx in range(config.num_hidden_layers):
        layer = f"layers.{layer_idx}"
        whole(f"{layer}.input_layernorm.weight")
        whole(f"{layer}.post_attention_layernorm.weight")
        add(f"{layer}.self_attn.rank_util.rank", (1,))
        for kind, columns in (("weight", (hidden,)), *([("bias", ())] if config.attention_bias else [])):
            parts = {name: Part(f"{layer}.self_attn.{name}.{kind}", 0, spans) for name, spans, _ in qkv}
            if fused_qkv:
                add(f"{layer}.self_attn.qkv_proj.Wqkv.{kind}", (q_size + 2 * kv_size, *columns), *parts.values())
            else:
                for name, _, size in qkv:
                    add(f"{layer}.self_attn.qkv_proj.{name}.{kind}", (size, *columns), parts[name])
        o_proj = f"{layer}.self_attn.o_proj"
        add(f"{o_proj}.o_proj.weight", (hidden, q_size), Part(f"{o_proj}.weight", 1, q_spans))
        if config.attention_bias:
            whole(f"{o_proj}.bias", f"{o_proj}.o_proj.bias")
        for name in ("gate_proj", "up_proj"):
            linear = f"{layer}.mlp.{name}"
            cut(f"{linear}.weight", f"{linear}.weight", 0, config.intermediate_size, hidden)
            if config.mlp_bias:
                cut(f"{linear}.bias", f"{linear}.bias", 0, config.intermediate_size, 0)
        cut(f"{layer}.mlp.down_proj.weight", f"{layer}.mlp.down_proj.weight", 1, config.intermediate_size, hidden)
        if config.mlp_bias:
            whole(f"{layer}.mlp.down_proj.bias")
    return outputs


def _within(first: int, length: int, size: int) -> tuple[Span, ...]:
    """`length` places from `first` of a dimension of `size`; what lies beyond it is padding."""
    inside = max(0, min(length, size - first))
    spans = ((first, inside), (None, length - inside))
    return tuple(span for span in spans if span[1])


def _heads(heads: list[int | None], head_dim: int) -> tuple[Span, ...]:
    return tuple((None if head is None else head * head_dim, head_dim) for head in heads)
