# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime's ranks with modules in the place of compiled graphs: values inside the model can be looked at.

It is imported after `ensure_neuronx` of the model's package has put the CPU runtime on the path.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed._cpu import RankThreads
from neuronx_distributed._shard import SHARD_FILE
from neuronx_distributed_inference._graph import map_shard
from torch import Tensor


class EagerRanks:
    """Every rank's model as modules over the artifact's shards, in the place of the CPU runtime's compiled graphs."""

    def __init__(self, app, weights: Path):
        self.threads = RankThreads(app.neuron_config.tp_degree)
        self.models = []
        for rank in range(app.neuron_config.tp_degree):
            model = app.context_encoding_model._build(app.neuron_config.max_context_length)
            state = map_shard(str(weights / SHARD_FILE.format(rank=rank)), app.neuron_config.torch_dtype)
            for name, parameter in model.named_parameters():
                if name.startswith("kv_mgr."):
                    state[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            model.load_state_dict(state, assign=True)
            self.models.append(model)
        for wrapper in app.models:
            wrapper.model = self
        self.around: Callable[[int], Any] | None = None  # rank -> a context to run the rank's model in

    def run(self, tag: str, bucket: int, inputs: Sequence[Tensor]) -> Tensor:
        def step(rank: int) -> Tensor:
            self.models[rank].n_positions = bucket
            if self.around is None:
                return self.models[rank](*inputs)[0]
            with self.around(rank):
                return self.models[rank](*inputs)[0]

        return self.threads.run(step)[0]
