"""What a tensor-parallel degree does to the attention heads. Arithmetic only, imports no torch.

The rules are NxD Inference's (`modules/attention/gqa.py`); where the library's own CONVERT_TO_MHA cannot pad the KV heads,
they are expanded to one per query head in the config and in the checkpoint, before the library sees either.
"""

from dataclasses import dataclass
from typing import Any

from .errors import SmolLM3Error

MAX_TP_DEGREE = 32  # the NeuronCores of a trn1.32xlarge


def padded(size: int, tp_degree: int) -> int:
    """`size` rounded up to a multiple of `tp_degree`."""
    return -(-size // tp_degree) * tp_degree


@dataclass(frozen=True)
class ShardingPlan:
    """Heads over `tp_degree` ranks, for a checkpoint with these head counts."""

    tp_degree: int
    num_attention_heads: int
    num_key_value_heads: int

    def __post_init__(self):
        if type(self.tp_degree) is not int or not 1 <= self.tp_degree <= MAX_TP_DEGREE:
            raise SmolLM3Error(f"tp_degree is {self.tp_degree!r}, allowed is a whole number from 1 to {MAX_TP_DEGREE}")

    @property
    def strategy(self) -> str:
        """keep: whole KV heads go to ranks; replicate: each KV head to several ranks; convert-to-mha: one per query head."""
        if self.num_key_value_heads % self.tp_degree == 0:
            return "keep"
        return "replicate" if self.tp_degree % self.num_key_value_heads == 0 else "convert-to-mha"

    @property
    def kv_expansion(self) -> int:
        """How often each KV head of the checkpoint stands in the config and the state dict that the library gets."""
        return self.num_attention_heads // self.num_key_value_heads if self.strategy == "convert-to-mha" else 1

    @property
    def key_value_heads_per_rank(self) -> int:
        """KV heads in each rank's cache."""
        if self.strategy == "keep":
            return self.num_key_value_heads // self.tp_degree
        return 1 if self.strategy == "replicate" else self.attention_heads_per_rank

    @property
    def attention_heads_per_rank(self) -> int:
        """Query heads of each rank, padding included."""
        return padded(self.num_attention_heads, self.tp_degree) // self.tp_degree

    def query_heads(self, rank: int) -> list[int | None]:
        """Which query head of the checkpoint each of the rank's heads is; None: zeros.

        Where KV heads are replicated the padding stands at the end of each KV head's group, else at the end of all.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        padding = padded(heads, self.tp_degree) - heads
        groups = kv_heads if self.strategy == "replicate" else 1
        size = heads // groups
        layout: list[int | None] = []
        for group in range(groups):
            layout += [*range(group * size, (group + 1) * size), *[None] * (padding // groups)]
        return _of_rank(layout, rank, self.attention_heads_per_rank)

    def key_value_heads(self, rank: int) -> list[int | None]:
        """Which KV head of the checkpoint each of the rank's heads is; None: zeros."""
        if self.strategy == "replicate":
            return [rank * self.num_key_value_heads // self.tp_degree]
        layout = [head for head in range(self.num_key_value_heads) for _ in range(self.kv_expansion)]
        padding = [None] * (self.key_value_heads_per_rank * self.tp_degree - len(layout))
        return _of_rank([*layout, *padding], rank, self.key_value_heads_per_rank)


def _of_rank(layout: list, rank: int, size: int) -> list:
    return layout[rank * size : (rank + 1) * size]


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


def source_num_key_value_heads(config: Any) -> int:
    """The KV heads of the checkpoint, where the model's config holds them expanded."""
    return getattr(config, "source_num_key_value_heads", None) or config.num_key_value_heads


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
    cut("lm_head.weight", "lm_head.weight", 0, config.vocab_size, hidden)  # of tied embeddings: whoever reads takes them
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
