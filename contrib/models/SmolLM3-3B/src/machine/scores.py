# SPDX-License-Identifier: Apache-2.0
"""What encoding long contexts without the attention kernel may take of a core's memory. Imports no torch."""

from typing import Any

from ..model.config import CheckpointConfig
from ..model.switches import KERNEL_REPORTS
from .roofline import GB, HBM_PER_CORE, Estimate

LONGEST_REPORTED = 8192  # tokens of a context, encoded without the attention kernel: see docs/device_facts.md


def notes_on_attention(config: CheckpointConfig, settings: Any) -> list[str]:
    """A line for each thing that trn1 and inf2 may not do in encoding contexts. `settings`: an artifact's, checked."""
    if settings.attn_kernel_enabled:
        return [KERNEL_REPORTS]
    estimate = Estimate(
        config.padded(settings), settings.tp_degree, settings.seq_len, settings.batch_size, settings.torch_dtype,
        window=settings.windowed_context_encoding_size, apply_seq_ids_mask=settings.apply_seq_ids_mask,
    )  # fmt: skip
    notes = []
    for length in settings.context_lengths():
        scores = settings.ctx_batch_size * estimate.scores(length)
        if estimate.total + scores > HBM_PER_CORE:
            notes.append(
                f"the context bucket of {length} tokens may take {(estimate.total + scores) / GB:.1f} GB of a core's "
                f"{HBM_PER_CORE / GB:.0f} GB, {scores / GB:.1f} GB of it for scores: encode contexts in parts with "
                "windowed_context_encoding_size, or lower max_context_length"
            )
    longest = settings.windowed_context_encoding_size or settings.max_context_length
    if longest > LONGEST_REPORTED:
        notes.append(
            f"contexts are encoded {longest} tokens at a time: no report of a trn1 or inf2 goes beyond "
            f"{LONGEST_REPORTED} without the attention kernel"
        )
    return notes
