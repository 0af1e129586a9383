# SPDX-License-Identifier: Apache-2.0
"""What a tensor-parallel degree does to the attention heads. Arithmetic only, imports no torch.

The rules are NxD Inference's (`modules/attention/gqa.py`); where the library's own CONVERT_TO_MHA cannot pad the KV
heads, they are expanded to one per query head in the config and in the checkpoint, before the library sees either.
"""

from dataclasses import dataclass

from ..errors import SmolLM3Error

MAX_TP_DEGREE = 32  # the NeuronCores of a trn1.32xlarge


def padded_size(size: int, tp_degree: int) -> int:
    """Rounds `size` up to a multiple of `tp_degree`."""
    return -(-size // tp_degree) * tp_degree


@dataclass(frozen=True)
class ShardingPlan:
    """The layout of a checkpoint's heads, of which there are so many, on `tp_degree` ranks.

    Raises SmolLM3Error for a `tp_degree` that is not possible.
    """

    tp_degree: int
    num_attention_heads: int
    num_key_value_heads: int

    def __post_init__(self):
        if type(self.tp_degree) is not int or not 1 <= self.tp_degree <= MAX_TP_DEGREE:
            raise SmolLM3Error(f"tp_degree is {self.tp_degree!r}, allowed is a whole number from 1 to {MAX_TP_DEGREE}")

    @property
    def strategy(self) -> str:
        """Says how KV heads go to ranks.

        "keep" gives each rank whole heads of its own, "replicate" gives each head to several ranks, and
        "convert-to-mha" expands the KV heads to one per query head.
        """
        if self.num_key_value_heads % self.tp_degree == 0:
            return "keep"
        return "replicate" if self.tp_degree % self.num_key_value_heads == 0 else "convert-to-mha"

    @property
    def kv_expansion(self) -> int:
        """Says how often each KV head of the checkpoint is in the config and the state dict that the library gets."""
        return self.num_attention_heads // self.num_key_value_heads if self.strategy == "convert-to-mha" else 1

    @property
    def key_value_heads_per_rank(self) -> int:
        """Counts the KV heads in each rank's cache."""
        if self.strategy == "keep":
            return self.num_key_value_heads // self.tp_degree
        return 1 if self.strategy == "replicate" else self.attention_heads_per_rank

    @property
    def attention_heads_per_rank(self) -> int:
        """Counts the query heads of each rank, padding included."""
        return padded_size(self.num_attention_heads, self.tp_degree) // self.tp_degree

    def query_heads(self, rank: int) -> list[int | None]:
        """Names the checkpoint's query head that each of the rank's heads is; None is padding.

        Where KV heads are replicated the padding is at the end of each KV head's group, else at the end of all.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        padding = padded_size(heads, self.tp_degree) - heads
        groups = kv_heads if self.strategy == "replicate" else 1
        group_size = heads // groups
        layout: list[int | None] = []
        for group in range(groups):
            layout += [*range(group * group_size, (group + 1) * group_size), *[None] * (padding // groups)]
        return _heads_of_rank(layout, rank, self.attention_heads_per_rank)

    def key_value_heads(self, rank: int) -> list[int | None]:
        """Names the checkpoint's KV head that each of the rank's heads is; None is padding."""
        if self.strategy == "replicate":
            return [rank * self.num_key_value_heads // self.tp_degree]
        layout = [head for head in range(self.num_key_value_heads) for _ in range(self.kv_expansion)]
        padding = [None] * (self.key_value_heads_per_rank * self.tp_degree - len(layout))
        return _heads_of_rank([*layout, *padding], rank, self.key_value_heads_per_rank)


def _heads_of_rank(layout: list[int | None], rank: int, heads_per_rank: int) -> list[int | None]:
    return layout[rank * heads_per_rank : (rank + 1) * heads_per_rank]
