"""The application over shards of its own, with ranks that run uncompiled (nxd_cpu_compiler/eager_ranks.py)."""

from pathlib import Path

import pytest


def load(folder: Path, out: Path, dtype: str = "float32", seq_len: int = 48, **settings):
    """The application and its ranks, over shards of the checkpoint in `folder` that are written to `out`."""
    from smollm3_neuron.machine.runtime import ensure_neuronx

    if ensure_neuronx() != "cpu":
        pytest.skip("the Neuron SDK is installed here: nxd_cpu is not used")
    from nxd_cpu_compiler.eager_ranks import EagerRanks
    from smollm3_neuron.artifact.build import build_config
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
    from smollm3_neuron.weights.shard_writer import write_shards

    config = build_config(folder, Settings(**{"tp_degree": 1, "seq_len": seq_len, "torch_dtype": dtype, **settings}))
    write_shards(folder, config.checkpoint_config, config.neuron_config, out)
    app = NeuronSmolLM3ForCausalLM(str(folder), config)
    return app, EagerRanks(app, out)
