"""What a tensor-parallel degree does to the attention heads. Arithmetic only, imports no torch.

The rules are NxD Inference's (`modules/attention/gqa.py`); where the library's own CONVERT_TO_MHA cannot pad the KV heads,
they are expanded to one per query head in the config and in the checkpoint, before the library sees either.
"""

from dataclasses import dataclass

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
