# SPDX-License-Identifier: Apache-2.0
"""Several tokens in one step: candidates that the model's graph of `speculation_length` tokens verifies at once.

They are looked up in the prompt and the answer so far by transformers' `PromptLookupCandidateGenerator`: what followed
there on the last tokens. A step takes an answer's last token and the candidates behind it, and its logits say of each
whether it is what the model itself chooses: the first that is not is replaced by the choice, and what follows it is
dropped. So the answer is that of steps of one token, sampled ones included: every token is drawn from the same logits
with the same random numbers. The cache keeps K and V of dropped candidates until the tokens of their places come; no
query sees them, as each sees only what stands before it.
"""

import sys
from collections.abc import Sequence

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ..errors import SmolLM3Error

MATCHING = 3  # the most tokens of an answer's end that are looked up; the longest match wins
LONGEST_PAUSE = 16  # steps that a row does without candidates, at most


def check_prompt_lookup(count: int, speculation_length: int) -> None:
    """Raises SmolLM3Error for a number of candidates that graphs of `speculation_length` tokens cannot verify."""
    if not speculation_length:
        raise SmolLM3Error(
            f"prompt_lookup is {count}, but the model has no graph that verifies tokens: compile with a "
            f"speculation_length of {count + 1} or more, or leave prompt_lookup out"
        )
    if not 1 <= count < speculation_length:
        raise SmolLM3Error(
            f"prompt_lookup is {count}, allowed is a whole number from 1 to {speculation_length - 1}, one below the "
            "model's speculation_length"
        )


class PromptLookup:
    """Candidates for each row of a batch.

    A row whose candidates are all dropped does without for a step, then four, then LONGEST_PAUSE, until half of them
    are accepted again: a text that repeats nothing is not slowed down by verifying what is wrong, and a hit by chance
    changes little.
    """

    def __init__(self, count: int, rows: int):
        self.count = count
        self.generator = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor([]),  # whatever ends an answer ends it when it is accepted
            num_output_tokens=count,
            max_matching_ngram_size=MATCHING,
            max_length=sys.maxsize,
        )
        self.pauses, self.left = [0] * rows, [0] * rows

    def __call__(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Returns up to `count` token ids that may follow on `tokens`, a row's prompt and answer so far."""
        if self.left[row]:
            self.left[row] -= 1
            return []
        found, _ = self.generator.get_candidates(torch.tensor([list(tokens)]))
        return found[0, len(tokens) :].tolist()

    def judged(self, row: int, accepted: int, offered: int) -> None:
        """Takes note of how many of a row's candidates were accepted."""
        pause = self.pauses[row]
        if 2 * accepted >= offered:
            pause = 0
        elif accepted:
            pause //= 2
        else:
            pause = min(max(1, 4 * pause), LONGEST_PAUSE)
        self.pauses[row] = self.left[row] = pause
