# SPDX-License-Identifier: Apache-2.0
"""What fits where and how fast it could be at best: instances, bytes and operations. Arithmetic only, imports no torch.

Figures of the machines are AWS's; a roofline is an upper bound of speed, not a forecast, and nothing of it was measured
on a device by this project.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..errors import SmolLM3Error
from ..model.config import CheckpointConfig
from ..model.dtypes import DTYPES
from ..model.heads import ShardingPlan, padded_size
from ..weights.projections import expected_shapes
from ..weights.quantization import is_quantized, quantized_linears, with_scales
from ..weights.rank_layout import Output, rank_outputs

GB, GiB = 10**9, 1 << 30
HBM_PER_CORE = 16 * GB
HBM_BANDWIDTH = 410 * GB  # bytes per second and core: a chip's 820 GB/s over its two cores
FLOPS = 95 * 10**12  # dense bfloat16 per second and core
MASKED_POSITIONS = 128  # more of each line of the cache with apply_seq_ids_mask: what is left out is written there
RESERVED_PER_CORE = 1 * GB  # kept free for the runtime, the graphs' code and scratch: a guess


@dataclass(frozen=True)
class Instance:
    """A machine: NeuronCores, host memory in GiB, and the TP degrees that its runtime is reported to take."""

    neuron_cores: int
    host_memory: int
    tp_degrees: tuple[int, ...]


# TP degrees: AWS's guide names 1, 2, 8, 32 for trn1 and 1, 2, 4, 8, 24 for inf2; public reports add 16 on both and
# quote the runtime's refusal of 4 on trn1.
INSTANCES = {
    "trn1.2xlarge": Instance(2, 32, (1, 2)),
    "trn1.32xlarge": Instance(32, 512, (1, 2, 8, 16, 32)),
    "trn1n.32xlarge": Instance(32, 512, (1, 2, 8, 16, 32)),
    "inf2.xlarge": Instance(2, 16, (1, 2)),
    "inf2.8xlarge": Instance(2, 128, (1, 2)),
    "inf2.24xlarge": Instance(12, 384, (1, 2, 4, 8)),
    "inf2.48xlarge": Instance(24, 768, (1, 2, 4, 8, 16, 24)),
}


def check_tp_degree(instance: str, tp_degree: int) -> None:
    """Raises SmolLM3Error where the instance's runtime would refuse the degree; an unknown instance is not judged."""
    known = INSTANCES.get(instance)
    if known and tp_degree not in known.tp_degrees:
        raise SmolLM3Error(
            f"tp_degree is {tp_degree}, {instance} takes {', '.join(map(str, known.tp_degrees))}; choose one of these"
        )


def parameters(config: CheckpointConfig) -> tuple[int, int]:
    """Returns how many parameters the checkpoint has, and in how many tensors."""
    shapes = expected_shapes(config).values()
    return sum(map(math.prod, shapes)), len(shapes)


@dataclass(frozen=True)
class Estimate:
    """Bytes, operations and seconds of one core, for `seq_len` tokens of each of `batch_size` sequences.

    Padding makes the cores equal. Activations are not counted.
    """

    config: CheckpointConfig
    tp_degree: int
    seq_len: int
    batch_size: int = 1
    dtype: str = "bfloat16"
    context_length: int | None = None
    """The tokens of a prompt; None stands for seq_len."""
    window: int | None = None
    """windowed_context_encoding_size; None: a prompt is encoded whole."""
    quantized: Any = None
    """The settings of 8-bit weights, an artifact's Settings or a NeuronConfig; None: all are in `dtype`."""
    apply_seq_ids_mask: bool = False
    """Whether the caches have the positions of that switch."""
    speculation_length: int = 0
    """The tokens of each sequence that one step verifies; 0: none are."""
    draft: CheckpointConfig | None = None
    """Who guesses them, in the same graph, with weights and caches of its own; None: they are looked up."""

    @property
    def of_draft(self) -> "Estimate | None":
        """Returns the same of the draft alone."""
        if self.draft is None:
            return None
        sizes = self.tp_degree, self.seq_len, self.batch_size, self.dtype, self.context_length
        return Estimate(self.draft, *sizes)

    @property
    def draft_weights(self) -> int:
        """Bytes of the draft's weights; 0 without one."""
        return self.of_draft.weights if self.of_draft else 0

    @property
    def _draft_cache_per_token(self) -> int:
        """Bytes of K and V of one token in the draft's layers."""
        return self.of_draft.kv_cache_per_token if self.of_draft else 0

    @property
    def plan(self) -> ShardingPlan:
        """What the TP degree does to the heads."""
        return self.config.plan(self.tp_degree)

    @property
    def _nbytes(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].nbytes

    @property
    def _head_elements(self) -> int:
        """Elements of the core's part of the head."""
        return padded_size(self.config.vocab_size, self.tp_degree) // self.tp_degree * self.config.hidden_size

    @property
    def _prompt_length(self) -> int:
        return self.context_length or self.seq_len

    def _outputs(self, but: tuple[str, ...] = ()) -> list[tuple[Output, int]]:
        """Returns the core's tensors but those whose names start with one of `but`, and the bytes of an element."""
        outputs, linears = rank_outputs(self.config, 0, self.tp_degree), set()
        if self.quantized:
            linears = quantized_linears(self.config, self.quantized)
            outputs = with_scales(outputs, linears, self.quantized.quantization_type == "per_channel_symmetric")
        sizes = ((out, 1 if is_quantized(out, linears) else self._nbytes) for out in outputs if out.parts)
        return [(out, 4 if out.name.endswith("scale") else size) for out, size in sizes if not out.name.startswith(but)]

    def _bytes(self, *, but: tuple[str, ...] = ()) -> int:
        """Returns the bytes of the core's tensors, without those whose names start with one of `but`."""
        return sum(math.prod(out.shape) * size for out, size in self._outputs(but))

    def _elements(self, *, but: tuple[str, ...] = ()) -> int:
        """Returns the elements of the core's weights, without those whose names start with one of `but`."""
        return sum(math.prod(out.shape) for out, _ in self._outputs(but) if not out.name.endswith("scale"))

    def _embedding_bytes(self, tokens: int) -> int:
        """Returns the bytes of the core's part of so many tokens' embeddings."""
        return tokens * self.config.hidden_size // self.tp_degree * self._nbytes

    @property
    def weights(self) -> int:
        """Bytes of the core's shard."""
        return self._bytes()

    @property
    def untied_head(self) -> int:
        """Bytes of the head's own copy of the tied embeddings; 0 where the checkpoint is not tied."""
        if not self.config.tie_word_embeddings:
            return 0
        return self._bytes(but=("embed_tokens", "layers", "norm"))

    @property
    def kv_cache_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        heads = self.plan.key_value_heads_per_rank
        return 2 * self.config.num_hidden_layers * heads * self.config.head_dim * self._nbytes

    @property
    def kv_cache(self) -> int:
        """Bytes of the caches of the whole batch."""
        return self.kv_cache_per_token * (self.seq_len + self._masked_positions) * self.batch_size

    @property
    def _masked_positions(self) -> int:
        return MASKED_POSITIONS if self.apply_seq_ids_mask else 0

    @property
    def logits(self) -> int:
        """Bytes of one step's logits: float32, and gathered, so that every core holds the whole vocabulary."""
        rows = self.batch_size * max(1, self.speculation_length)
        return 4 * padded_size(self.config.vocab_size, self.tp_degree) * rows

    def scores(self, context_length: int) -> int:
        """Bytes of one layer's scores for one prompt, float32, without the attention kernel.

        An upper figure: the compiler may hold less of them at a time.
        """
        return self.plan.attention_heads_per_rank * (self.window or context_length) * context_length * 4

    @property
    def total(self) -> int:
        """Bytes of weights, caches and logits, with a draft of its weights and caches, too."""
        return self.weights + self.kv_cache + self.logits + self.held_by_draft

    @property
    def held_by_draft(self) -> int:
        """Bytes of the draft's weights and caches; 0 without one."""
        return self.draft_weights + self._draft_cache_per_token * self.seq_len * self.batch_size

    @property
    def room(self) -> int:
        """Bytes that are left of the core's memory; negative where it does not fit."""
        return HBM_PER_CORE - RESERVED_PER_CORE - self.total

    def largest_batch(self, seq_len: int) -> int:
        """Returns the largest batch size that fits with sequences of `seq_len`, or 0."""
        free = HBM_PER_CORE - RESERVED_PER_CORE - self.weights - self.draft_weights
        line = self.kv_cache_per_token * (seq_len + self._masked_positions) + self._draft_cache_per_token * seq_len
        return max(0, free // (line + self.logits // self.batch_size))

    def largest_seq_len(self, batch_size: int) -> int:
        """Returns the longest seq_len that fits with so many sequences, up to the model's positions, or 0."""
        held = self.weights + self.draft_weights + self.logits // self.batch_size * batch_size
        per_position = (self.kv_cache_per_token + self._draft_cache_per_token) * batch_size
        positions = (HBM_PER_CORE - RESERVED_PER_CORE - held) // per_position - self._masked_positions
        return max(0, min(self.config.longest_sequence, positions))

    @property
    def decode_bytes(self) -> int:
        """Bytes that a step with full caches reads: all weights but the embedding table, of that its rows, K and V."""
        weights = self._bytes(but=("embed_tokens",))
        caches = self.kv_cache_per_token * self.seq_len * self.batch_size
        return weights + self._embedding_bytes(self.batch_size) + caches

    @property
    def verify_bytes(self) -> int:
        """Bytes that a step with full caches reads which verifies `speculation_length` tokens: embeddings are more."""
        return self.decode_bytes + self._embedding_bytes(self.batch_size * (self.speculation_length - 1))

    @property
    def prefill_bytes(self) -> int:
        """Bytes that a batch of prompts reads: the weights once, the prompts' embeddings, their K and V once."""
        tokens = self.batch_size * self._prompt_length
        weights = self._bytes(but=("embed_tokens",))
        return weights + self._embedding_bytes(tokens) + self.kv_cache_per_token * tokens

    def flops(self, tokens: int, attended: int, logits_rows: int) -> int:
        """Returns the operations of the whole batch, for `tokens` of each sequence.

        Their queries see `attended` keys in all, and `logits_rows` of them get logits.
        """
        matrices = self._elements(but=("embed_tokens", "lm_head", "norm"))
        query_size = self.plan.attention_heads_per_rank * self.config.head_dim
        attention = 4 * self.config.num_hidden_layers * query_size * attended
        return self.batch_size * (2 * matrices * tokens + attention + 2 * self._head_elements * logits_rows)

    @property
    def decode_flops(self) -> int:
        """Operations of one step with full caches."""
        return self.flops(1, self.seq_len, 1)

    @property
    def verify_flops(self) -> int:
        """Operations of one step with full caches that verifies `speculation_length` tokens."""
        return self.flops(self.speculation_length, self.speculation_length * self.seq_len, self.speculation_length)

    @property
    def prefill_flops(self) -> int:
        """Operations of one batch of the longest prompts; the graph computes the whole square of scores."""
        return self.flops(self._prompt_length, self._prompt_length**2, 1)

    @property
    def decode_seconds(self) -> float:
        """Seconds that a step takes at least: bytes over bandwidth or operations over rate, whichever is more."""
        return max(self.decode_bytes / HBM_BANDWIDTH, self.decode_flops / FLOPS)

    @property
    def prefill_seconds(self) -> float:
        """Seconds to the first token, at least."""
        return max(self.prefill_bytes / HBM_BANDWIDTH, self.prefill_flops / FLOPS)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole batch, at most."""
        return self.batch_size / self.decode_seconds

    @property
    def host_memory_to_load(self) -> int:
        """Bytes of host memory for loading: the library reads its ranks' shard files whole."""
        return (self.weights + self.draft_weights) * self.tp_degree
