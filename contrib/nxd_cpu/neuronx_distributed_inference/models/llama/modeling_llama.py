# SPDX-License-Identifier: Apache-2.0
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from transformers.activations import ACT2FN


class NeuronLlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)), the intermediate dimension cut over the ranks and padded to their multiple."""

    def __init__(self, config, tensor_model_parallel_group=None):
        super().__init__()
        self.config = config
        self.neuron_config = config.neuron_config
        group = tensor_model_parallel_group or parallel_state.get_tensor_model_parallel_group()
        self.tensor_model_parallel_group = group
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.act_fn = ACT2FN[config.hidden_act]
        common = dict(
            bias=getattr(config, "mlp_bias", False),
            dtype=config.neuron_config.torch_dtype,
            pad=True,
            tensor_model_parallel_group=group,
        )
        self.gate_proj = ColumnParallelLinear(self.hidden_size, self.intermediate_size, gather_output=False, **common)
        self.up_proj = ColumnParallelLinear(self.hidden_size, self.intermediate_size, gather_output=False, **common)
        self.down_proj = RowParallelLinear(
            self.intermediate_size,
            self.hidden_size,
            input_is_parallel=True,
            reduce_dtype=config.neuron_config.rpl_reduce_dtype,
            **common,
        )

    def preshard_hook(self, model_state_dict: dict, prefix: str) -> bool:
        """Pad the three whole weights."""
        prefix = prefix.rpartition(".")[0]
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self, name).preshard_hook(model_state_dict, f"{prefix}.{name}.weight")
        return True

    def forward(self, x: Tensor, rmsnorm=None, residual=None, adapter_ids=None):
        """The output and None, which would be the residual had it been added in a kernel."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), None
