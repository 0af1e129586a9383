"""A model for tests of what stands around one."""

from collections.abc import Callable
from types import SimpleNamespace

import torch


class Random:
    """A model whose logits are random, or what `change` makes of them."""

    neuron_config = SimpleNamespace(
        batch_size=1, seq_len=16, max_context_length=8, is_prefix_caching=False, on_device_sampling_config=None
    )

    def __init__(self, vocab_size: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits):
        self.config = SimpleNamespace(vocab_size=vocab_size, neuron_config=self.neuron_config)
        self.change = change

    def reset(self) -> None:
        pass

    def __call__(self, **inputs) -> SimpleNamespace:
        return SimpleNamespace(logits=self.change(torch.randn(1, 1, self.config.vocab_size)))
