"""What fits where and how fast it could be at best: instances, bytes and operations. Arithmetic only, imports no torch.

Figures of the machines are AWS's; a roofline is an upper bound of speed, not a forecast, and nothing of it was measured on
a device by this project.
"""

from dataclasses import dataclass

from ..errors import SmolLM3Error
from ..model.config import CheckpointConfig
from ..model.dtypes import DTYPES
from ..model.heads import ShardingPlan, padded
from ..weights.rank_layout import rank_outputs

GB, GiB = 10**9, 1 << 30
HBM_PER_CORE = 16 * GB
HBM_BANDWIDTH = 410 * GB  # bytes per second and core: a chip's 820 GB/s over its two cores
FLOPS = 95 * 10**12  # dense bfloat16 per second and core
RESERVED_PER_CORE = 1 * GB  # kept free for the runtime, the graphs' code and scratch: a guess


@dataclass(frozen=True)
class Instance:
    """A machine: NeuronCores, host memory in GiB, and the TP degrees that its runtime is reported to take."""

    neuron_cores: int
    host_memory: int
    tp_degrees: tuple[int, ...]


# TP degrees: AWS's guide names 1, 2, 8, 32 for trn1 and 1, 2, 4, 8, 24 for inf2; a public report adds 16 on trn1 and quotes
# the runtime's refusal of 4 there.
INSTANCES = {
    "trn1.2xlarge": Instance(2, 32, (1, 2)),
    "trn1.32xlarge": Instance(32, 512, (1, 2, 8, 16, 32)),
    "trn1n.32xlarge": Instance(32, 512, (1, 2, 8, 16, 32)),
    "inf2.xlarge": Instance(2, 16, (1, 2)),
    "inf2.8xlarge": Instance(2, 128, (1, 2)),
    "inf2.24xlarge": Instance(12, 384, (1, 2, 4, 8)),
    "inf2.48xlarge": Instance(24, 768, (1, 2, 4, 8, 24)),
}


def check_tp_degree(instance: str, tp_degree: int) -> None:
    """SmolLM3Error where the instance's runtime would refuse the degree; an unknown instance is not judged."""
    known = INSTANCES.get(instance)
    if known and tp_degree not in known.tp_degrees:
        raise SmolLM3Error(
            f"tp_degree is {tp_degree}, {instance} takes {', '.join(map(str, known.tp_degrees))}; choose one of these"
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes and operations of one core (padding makes all equal)."""

    config: CheckpointConfig
    tp_degree: int
    seq_len: int
    batch_size: int = 1
    dtype: str = "bfloat16"
    context_length: int | None = None  # None: seq_len

    @property
    def plan(self) -> ShardingPlan:
        return self.config.plan(self.tp_degree)

    def _elements(self, *, but: tuple[str, ...] = ()) -> int:
        """Elements of the rank's tensors whose name starts with none of `but`."""
        elements = 0
        for output in rank_outputs(self.config, 0, self.tp_degree):
            if output.parts and not output.name.startswith(but):
                size = 1
                for extent in output.shape:
                    size *= extent
                elements += size
        return elements

    @property
    def weights(self) -> int:
        """All weights of the core's shard."""
        return self._elements() * DTYPES[self.dtype].nbytes

    @property
    def untied_head(self) -> int:
        """What the head's own copy of the tied embeddings costs; 0 where the checkpoint is not tied."""
        if not self.config.tie_word_embeddings:
            return 0
        return (
            padded(self.config.vocab_size, self.tp_degree)
            // self.tp_degree
            * self.config.hidden_size
            * DTYPES[self.dtype].nbytes
        )

    @property
    def kv_cache_per_token(self) -> int:
        """K and V of one token in all layers."""
        heads = self.plan.key_value_heads_per_rank
        return 2 * self.config.num_hidden_layers * heads * self.config.head_dim * DTYPES[self.dtype].nbytes

    @property
    def kv_cache(self) -> int:
        return self.kv_cache_per_token * self.seq_len * self.batch_size

    @property
    def logits(self) -> int:
        """float32, gathered: the whole vocabulary on every core."""
        return 4 * padded(self.config.vocab_size, self.tp_degree) * self.batch_size

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.logits

    @property
    def room(self) -> int:
        """What is left of the core's memory; negative where it does not fit. Activations are not counted."""
        return HBM_PER_CORE - RESERVED_PER_CORE - self.total

    def largest_batch(self, seq_len: int) -> int:
        """That fits with sequences of `seq_len`; 0: none."""
        free = HBM_PER_CORE - RESERVED_PER_CORE - self.weights
        return max(0, free // (self.kv_cache_per_token * seq_len + self.logits // self.batch_size))

    def largest_seq_len(self, batch_size: int) -> int:
        """That fits with so many sequences, up to the model's positions; 0: none."""
        free = HBM_PER_CORE - RESERVED_PER_CORE - self.weights - self.logits // self.batch_size * batch_size
        return max(0, min(self.config.longest_sequence, free // (self.kv_cache_per_token * batch_size)))

    @property
    def decode_bytes(self) -> int:
        """Read from the core's memory per step with full caches: all weights but the embedding table, K and V, its rows."""
        weights = self._elements(but=("embed_tokens",)) * DTYPES[self.dtype].nbytes
        rows = self.batch_size * self.config.hidden_size // self.tp_degree * DTYPES[self.dtype].nbytes
        return weights + rows + self.kv_cache

    @property
    def prefill_bytes(self) -> int:
        """Read per prompt batch: the weights once, the prompt's embeddings, its K and V once."""
        tokens = self.batch_size * (self.context_length or self.seq_len)
        rows = tokens * self.config.hidden_size // self.tp_degree * DTYPES[self.dtype].nbytes
        return (
            self._elements(but=("embed_tokens",)) * DTYPES[self.dtype].nbytes + rows + self.kv_cache_per_token * tokens
        )

    def flops(self, tokens: int, attended: int, heads_on: int) -> int:
        """Of `tokens` per row whose queries see `attended` keys in all, with logits for `heads_on` of them; one core."""
        matrices = self._elements(but=("embed_tokens", "lm_head", "norm"))
        attention = (
            4 * self.config.num_hidden_layers * self.plan.attention_heads_per_rank * self.config.head_dim * attended
        )
        head = padded(self.config.vocab_size, self.tp_degree) // self.tp_degree * self.config.hidden_size * heads_on
        return self.batch_size * (2 * matrices * tokens + attention + 2 * head)

    @property
    def decode_flops(self) -> int:
        """One step with full caches."""
        return self.flops(1, self.seq_len, 1)

    @property
    def prefill_flops(self) -> int:
        """One prompt batch of the whole context; the graph computes the whole square of scores."""
        context = self.context_length or self.seq_len
        return self.flops(context, context * context, 1)

    @property
    def decode_seconds(self) -> float:
        """At least, per step; the larger of bytes over bandwidth and operations over rate."""
        return max(self.decode_bytes / HBM_BANDWIDTH, self.decode_flops / FLOPS)

    @property
    def prefill_seconds(self) -> float:
        """At least, to the first token."""
        return max(self.prefill_bytes / HBM_BANDWIDTH, self.prefill_flops / FLOPS)

    @property
    def tokens_per_second(self) -> float:
        """At most, of the whole batch."""
        return self.batch_size / self.decode_seconds

    @property
    def host_memory_to_load(self) -> int:
        """The library reads its ranks' shard files whole."""
        return self.weights * self.tp_degree
