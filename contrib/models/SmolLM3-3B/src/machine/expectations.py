# SPDX-License-Identifier: Apache-2.0
"""What a step should take, reckoned from what others measured on trn1 and inf2. Arithmetic only, imports no torch.

A roofline says what no machine can exceed; this says what machines were seen to reach. Every figure has its source
beside it, none was measured by this project, and where no figure was published the answer is None.
"""

from dataclasses import dataclass

from .roofline import FLOPS, Estimate

KILN = "https://github.com/foxl-ai/kiln docs/neuron-notes.md"
TORCHNEURONX = "https://github.com/alpharomercoma/torchneuronx"
PORT = "https://github.com/aws-neuron/neuronx-distributed-inference contrib/models/SmolLM3-3B/README.md"


@dataclass(frozen=True)
class Figure:
    """A published measurement: `value` in seconds, bytes per second, tokens per second or a share of 1."""

    value: float
    what: str
    source: str


HBM = Figure(
    240e9, "bytes per second that one NeuronCore reads from its memory",
    f'{KILN}, "The prefill MoE kernel\'s pipeline at C=4096" (trn1.2xlarge, SDK 2.32, 2026-10-04)',
)  # fmt: skip
LAUNCH = Figure(
    0.14e-3, "to launch a graph and read its result back",
    f'{KILN}, "Collectives across chips" (trn1.2xlarge, SDK 2.32, 2026-10-03)',
)  # fmt: skip
ALL_REDUCE = Figure(26e-6, "for each all-reduce over the two NeuronCores of one chip", LAUNCH.source)
# for one launch with all its collectives: the first costs this, the others almost nothing
ACROSS_CHIPS = {
    ranks: Figure(
        seconds, f"to run a graph with collectives over {ranks} NeuronCores of several chips",
        f'{KILN}, "Collectives across chips" (trn1.32xlarge, SDK 2.32, 2026-10-03)',
    )
    for ranks, seconds in ((8, 2.45e-3), (16, 3.76e-3), (32, 5.10e-3))
}  # fmt: skip
# Llama-3.1-8B, TP 2, NxDI 0.10: 1,024 tokens took 131.8 ms on a trn1.2xlarge and 195.2 ms on an inf2.xlarge.
PREFILL = {
    family: Figure(
        share,
        f"of a NeuronCore's bfloat16 peak while a prompt is encoded on {family}",
        f"{TORCHNEURONX} {file} ({date})",
    )
    for family, share, file, date in (
        ("trn1", 0.59, "trn1/results/specdec/baseline.report.json", "2026-08-19"),
        ("inf2", 0.40, "inf2/results/extras/spec_decode/baseline.extract.txt", "2026-07-31"),
    )
}
PUBLISHED_PORT = Figure(
    34.40, "tokens per second of NxD Inference's contributed SmolLM3-3B, TP 2, one sequence of 128 tokens, bfloat16",
    f"{PORT} (trn1.32xlarge, 2026-03-18)",
)  # fmt: skip
FIGURES = (HBM, LAUNCH, ALL_REDUCE, *ACROSS_CHIPS.values(), *PREFILL.values(), PUBLISHED_PORT)


@dataclass(frozen=True)
class Expectation:
    """Of `estimate` on an instance such as "trn1.2xlarge". None: nobody published what it would take to say."""

    estimate: Estimate
    instance: str

    @property
    def family(self) -> str:
        return "inf2" if self.instance.startswith("inf2") else "trn1"

    @property
    def launch(self) -> float:
        """Seconds that a graph costs once, whatever is in it; across chips the whole overhead was measured so."""
        return LAUNCH.value if self.estimate.tp_degree <= 2 else self.overhead

    @property
    def overhead(self) -> float | None:
        """Seconds of a graph beside its memory and its products: its launch and its collectives."""
        ranks = self.estimate.tp_degree
        if ranks <= 2:
            all_reduces = 2 * self.estimate.config.num_hidden_layers if ranks == 2 else 0
            return LAUNCH.value + all_reduces * ALL_REDUCE.value
        figure = ACROSS_CHIPS.get(ranks) if self.family == "trn1" else None
        return figure and figure.value

    @property
    def decode_seconds(self) -> float | None:
        """Of one step of the whole batch; the caches of all compiled slots are read, whatever the load."""
        of = self.estimate
        if self.overhead is None or of.dtype != "bfloat16":
            return None
        return self.overhead + max(of.decode_bytes / HBM.value, of.decode_flops / self._flops)

    @property
    def verify_seconds(self) -> float | None:
        """Of one step of the whole batch that verifies the estimate's `speculation_length` tokens.

        With a draft it has as many steps of that in it, one after the other; the launch of their graph counts once.
        """
        of = self.estimate
        if self.overhead is None or of.dtype != "bfloat16":
            return None
        seconds = self.overhead + max(of.verify_bytes / HBM.value, of.verify_flops / self._flops)
        if of.draft is None:
            return seconds
        draft = Expectation(of.of_draft, self.instance)
        return seconds + of.speculation_length * (draft.decode_seconds - draft.launch)

    def speculated_tokens_per_second(self, accepted: float) -> float | None:
        """Of the whole batch, where every step has all its candidates and this share of them is accepted, 0 to 1."""
        if self.verify_seconds is None:
            return None
        of = self.estimate
        return of.batch_size * (1 + accepted * (of.speculation_length - 1)) / self.verify_seconds

    @property
    def prefill_seconds(self) -> float | None:
        """To the first token of one prompt batch of the whole context."""
        of = self.estimate
        if self.overhead is None or of.dtype != "bfloat16":
            return None
        # the share was measured with the all-reduces of one chip in it
        across = self.overhead if of.tp_degree > 2 else 0
        return across + max(of.prefill_bytes / HBM.value, of.prefill_flops / self._flops)

    @property
    def _flops(self) -> float:
        return FLOPS * PREFILL[self.family].value

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole batch."""
        return self.decode_seconds and self.estimate.batch_size / self.decode_seconds
