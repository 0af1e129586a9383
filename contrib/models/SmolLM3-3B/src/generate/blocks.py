# SPDX-License-Identifier: Apache-2.0
"""The block layout of the cache, which prefix caching has: which blocks each prompt of a batch is given.

No block is shared here: an artifact with prefix caching answers as one without. vLLM hands blocks out for real.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import SmolLM3Error


class BlockTables:
    """Blocks for each prompt of a batch and `new_tokens` more, one after the other.

    Raises SmolLM3Error where the cache has too few.
    """

    def __init__(self, neuron_config: Any, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]):
        self.size, self.prompts = neuron_config.pa_block_size, prompts
        longest, free = neuron_config.seq_len // self.size, 0
        tables = []
        for prompt, count in zip(prompts, new_tokens):
            blocks = -(-min(len(prompt) + count, neuron_config.seq_len) // self.size)
            tables.append([*range(free, free + blocks), *[0] * (longest - blocks)])
            free += blocks
        if free > neuron_config.pa_num_blocks:
            raise SmolLM3Error(
                f"{free} blocks of {self.size} tokens are needed for a batch of {len(prompts)} prompts with their new "
                f"tokens, pa_num_blocks is {neuron_config.pa_num_blocks}: ask for fewer prompts or tokens, or compile "
                "with more blocks"
            )
        self.tables = torch.tensor(tables)

    def prompt(self, row: int) -> dict[str, torch.Tensor]:
        """The model's inputs that encode one prompt: input_ids and position_ids [1, length], lengths [1, 1]."""
        input_ids = torch.tensor(self.prompts[row])[None]
        positions = torch.arange(input_ids.shape[1])[None]
        return dict(
            input_ids=input_ids,
            position_ids=positions,
            seq_ids=torch.tensor([row]),
            block_table=self.tables[row : row + 1],
            slot_mapping=self._slots(self.tables[row : row + 1], positions),
            full_context_lens=torch.tensor([[input_ids.shape[1]]]),
            computed_context_lens=torch.tensor([[0]]),
        )

    def step(self, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The further inputs of a token per row at `position_ids` [batch, 1]."""
        return dict(
            block_table=self.tables,
            slot_mapping=self._slots(self.tables, position_ids),
            full_context_lens=position_ids + 1,
            computed_context_lens=position_ids,
        )

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return tables.gather(1, positions // self.size) * self.size + positions % self.size
