# SPDX-License-Identifier: Apache-2.0
"""compile -> artifact folder -> load, and the way of a checkpoint into the shards."""

import os

import torch
from neuronx_distributed._cpu import refuse
from neuronx_distributed._shard import SHARD_FILE, shard_checkpoint
from torch import nn

from neuronx_distributed_inference._graph import LoadedModel, load_graphs, map_shard, save_graphs
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig, _refuse_unsupported
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper
from neuronx_distributed_inference.modules.checkpoint import load_state_dict

COMPILED_MODEL_FILE_NAME = "model.pt"


class _Builder:
    """What NxDI's ModelBuilder does for the application."""

    def __init__(self, app: "NeuronApplicationBase"):
        self._app = app

    def trace(self) -> list:
        return [graph for model in self._app.models for graph in model._export()]

    def shard_checkpoint(self, serialize_path: str | None = None) -> list[dict[str, torch.Tensor]]:
        """The ranks' state dicts; with a path they are written there instead of returned."""
        refuse(quantized=self._app.neuron_config.quantized)  # it reads 8-bit shards, and makes none
        first, count = self._app.neuron_config.start_rank_id, self._app.neuron_config.local_ranks_size
        model = self._app.models[0]._build(bucket=1)  # for its parameters only
        return shard_checkpoint(self._app.checkpoint_loader_fn(), model, range(first, first + count), serialize_path)


class NeuronApplicationBase(nn.Module):
    """A model with its submodels in `models`. NotImplementedError for an option that this runtime leaves out."""

    _STATE_DICT_MODEL_PREFIX = "model."
    _NEW_STATE_DICT_MODEL_PREFIX = ""

    def __init__(
        self,
        model_path: str,
        config: InferenceConfig | None = None,
        neuron_config: NeuronConfig | None = None,
    ):
        super().__init__()
        model_path = os.path.join(os.path.normpath(model_path), "")
        if config is None:
            config = self.get_config_cls().load(model_path)
        if neuron_config is not None:
            config.neuron_config = neuron_config
        self.validate_config(config)
        _refuse_unsupported(config.neuron_config)
        self.config, self.neuron_config, self.model_path = config, config.neuron_config, model_path
        self.models: list[ModelWrapper] = []
        self.traced_model: LoadedModel | None = None

    def get_builder(self, debug: bool = False) -> _Builder:
        return _Builder(self)

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        if not hasattr(config, "neuron_config"):
            raise ValueError("Config must include a NeuronConfig")

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        raise NotImplementedError("get_config_cls is not implemented")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return cls.get_config_cls().get_neuron_config_cls()

    def get_compiler_args(self) -> str | None:
        return None

    def compile(self, compiled_model_path, debug=False) -> None:
        """Write `neuron_config.json`, `model.pt` and the shards."""
        self.config.save(compiled_model_path)
        self.graphs = self.get_builder(debug).trace()
        save_graphs(self.graphs, os.path.join(compiled_model_path, COMPILED_MODEL_FILE_NAME))
        self.shard_weights(compiled_model_path, debug)

    def shard_weights(self, compiled_model_path, debug=False) -> None:
        """Write the shards into `weights` if the NeuronConfig says so."""
        if self.neuron_config.save_sharded_checkpoint and not self.neuron_config.skip_sharding:
            path = os.path.join(compiled_model_path, "weights/")
            self.get_builder(debug).shard_checkpoint(serialize_path=path)

    def load(self, compiled_model_path, start_rank_id=None, local_ranks_size=None, skip_warmup=False) -> None:
        """Read the graphs, the shards and zeroed caches. FileNotFoundError or ValueError names a file not right."""
        self.graphs = load_graphs(os.path.join(compiled_model_path, COMPILED_MODEL_FILE_NAME))
        self.load_weights(compiled_model_path, start_rank_id, local_ranks_size)

    def load_weights(self, compiled_model_path, start_rank_id=None, local_ranks_size=None) -> None:
        """Give the loaded graphs weights: the shards, or the checkpoint sharded now."""
        tp_degree = self.neuron_config.tp_degree
        if (start_rank_id or 0) != 0 or (local_ranks_size or tp_degree) != tp_degree:
            raise NotImplementedError("the CPU runtime does not support start_rank_id and local_ranks_size")
        if self.neuron_config.save_sharded_checkpoint:
            folder = os.path.join(compiled_model_path, "weights")
            files = [f"{folder}/{SHARD_FILE.format(rank=rank)}" for rank in range(tp_degree)]
            shards = [map_shard(file, self.neuron_config.torch_dtype) for file in files]
        else:
            shards = self.get_builder().shard_checkpoint()
        self.traced_model = LoadedModel(self.graphs, shards, tp_degree)
        for model in self.models:
            model.model = self.traced_model

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, torch.Tensor]:
        """The whole state dict by this model's names, in torch_dtype."""
        path = getattr(self.config, "_name_or_path", None)
        if path is None or not os.path.exists(path):
            path = self.model_path
        state_dict = self.get_state_dict(path, self.config)
        dtype = self.neuron_config.torch_dtype
        if self.neuron_config.cast_type == "config" and dtype != torch.float32:
            for name, tensor in state_dict.items():
                if tensor.is_floating_point():
                    state_dict[name] = tensor.to(dtype)
        return state_dict

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: InferenceConfig) -> dict[str, torch.Tensor]:
        """Read a checkpoint (a folder, or a name for `load_hf_model`) and rename its weights."""
        if os.path.isdir(model_name_or_path):
            state_dict = load_state_dict(model_name_or_path)
        else:
            state_dict = cls.load_hf_model(model_name_or_path).state_dict()
        old, new = cls._STATE_DICT_MODEL_PREFIX, cls._NEW_STATE_DICT_MODEL_PREFIX
        state_dict = {(new + key[len(old) :] if key.startswith(old) else key): t for key, t in state_dict.items()}
        state_dict = cls.convert_hf_to_neuron_state_dict(state_dict, config)
        if getattr(config, "tie_word_embeddings", False):
            cls.update_state_dict_for_tied_weights(state_dict)
        return state_dict

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict, config: InferenceConfig) -> dict:
        return state_dict

    @staticmethod
    def load_hf_model(model_path):
        raise NotImplementedError("load_hf_model is not implemented")

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict) -> None:
        raise NotImplementedError("State-dict update not implemented")

    def reset(self) -> None:
        """Start a new batch of sequences."""
