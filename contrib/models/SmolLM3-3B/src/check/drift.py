# SPDX-License-Identifier: Apache-2.0
"""Does a model err more than its dtype does, a little everywhere? What the largest error of any position cannot show.

In 16 bits every value that a layer writes is rounded, by transformers as by the model: both are off from the wider run
by about as much, position for position. So the ratio of the two errors, in the geometric mean over many positions, is
near 1 for a right model whatever the order of its sums, and a small fault that hides below the largest rounding error
moves it. In float32 the order of the sums is the error, the ratio says nothing, and the largest error is small enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# how much more than transformers a right model may err in the mean: of right models at least 1.09 was certain, with
# TP 8, and of seeded faults that are found at least 1.12
RATIO = 1.1
DEVIATIONS = 3.0  # standard errors by which the mean must be above that
LEAST_CASES = 8  # fewer say too little of their own scatter
DTYPES = (torch.bfloat16, torch.float16)
FAULTS = 46  # the seeded ones of test/checkpoint_faults.py
# how many of them are called wrong, by dtype and whether the mean error is judged (test/test_drift.py): without it as
# measured on 18 of the 64 cases of `tiny`
FOUND = {(torch.float32, False): 46, (torch.bfloat16, True): 42, (torch.bfloat16, False): 34}


@dataclass(frozen=True)
class Drift:
    """The mean of the error's ratio to transformers' over `positions` of `cases`, and what it can be at least."""

    ratio: float
    at_least: float
    cases: int
    positions: int

    @property
    def is_wrong(self) -> bool:
        """Whether the model errs more than a right one may."""
        return self.at_least > RATIO

    def __str__(self) -> str:
        return (
            f"errors are {self.ratio:.3f} times transformers' in the mean over {self.positions} tokens, at least "
            f"{self.at_least:.3f}, where {RATIO} is allowed"
        )


def log_ratios(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    """Returns the logarithm of the ratio of two errors [positions, vocab_size], each position's root mean square."""
    sizes = [error.double().square().mean(-1).sqrt() + torch.finfo(torch.float32).tiny for error in (ours, theirs)]
    return (sizes[0] / sizes[1]).log().tolist()


def drift_of(ratios: Sequence[Sequence[float]]) -> Drift | None:
    """Returns what the log ratios of each case say together; None where there are too few cases.

    A case's positions share one cache and so are not independent: the scatter is that of whole cases, each with the
    weight of its positions.
    """
    positions = sum(map(len, ratios))
    if len(ratios) < LEAST_CASES:
        return None
    mean = sum(map(sum, ratios)) / positions
    spread = sum((sum(case) - mean * len(case)) ** 2 for case in ratios)
    error = math.sqrt(spread * len(ratios) / (len(ratios) - 1)) / positions
    return Drift(math.exp(mean), math.exp(mean - DEVIATIONS * error), len(ratios), positions)


def power(dtype: torch.dtype, drift: Drift | None) -> str:
    """Returns in words how many seeded faults such a judgement finds, as measured on `tiny` and its own prompts."""
    name, found = str(dtype).removeprefix("torch."), FOUND.get((dtype, drift is not None))
    if found is None:
        return f"how many seeded faults this finds in {name} was not measured"
    return f"finds {found} of {FAULTS} seeded faults in {name}"
