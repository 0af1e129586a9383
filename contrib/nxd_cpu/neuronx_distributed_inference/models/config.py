# SPDX-License-Identifier: Apache-2.0
"""NeuronConfig and InferenceConfig with NxDI's attributes, defaults and JSON."""

import inspect
import json
import logging
import os
from typing import Any

import torch

from neuronx_distributed_inference.models._defaults import HONOURED, UNSUPPORTED

CONFIG_FILE = "neuron_config.json"


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """The torch dtype of that name. AssertionError for one that NxDI does not take."""
    names = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert dtype_str in names, f"Unsupported dtype: {dtype_str}"
    return getattr(torch, dtype_str)


def to_dict(obj: Any) -> Any:
    """What JSON can hold: objects become their attributes, classes their module and name, dtypes their name."""
    if type(obj) is dict:
        return {key: to_dict(value) for key, value in obj.items()}
    if type(obj) is list:
        return [to_dict(value) for value in obj]
    if inspect.isclass(obj):
        return {"__module__": obj.__module__, "__name__": obj.__name__}
    if isinstance(obj, torch.dtype):
        return str(obj).removeprefix("torch.")
    if hasattr(obj, "__dict__"):
        return to_dict(dict(vars(obj)))
    return obj


class OnDeviceSamplingConfig:
    def __init__(self, **kwargs):
        defaults = dict(
            do_sample=False,
            top_k=1,
            top_p=1.0,
            temperature=1.0,
            dynamic=False,
            deterministic=False,
            global_topk=256,
            on_device_sampling_config=True,
            top_k_kernel_enabled=False,
            sampling_dp_degree=1,
        )
        vars(self).update({name: kwargs.get(name, default) for name, default in defaults.items()})


class NeuronConfig:
    """How a model is compiled. A keyword that is no attribute is dropped with a warning, as NxDI does."""

    def __init__(self, **kwargs) -> None:
        for defaults in (HONOURED, UNSUPPORTED):
            for name, default in defaults.items():
                setattr(self, name, kwargs.pop(name, default))
        self.seq_len = kwargs.pop("seq_len", 128)
        for name in ("n_active_tokens", "n_positions", "max_context_length", "max_length", "pa_block_size"):
            setattr(self, name, kwargs.pop(name, self.seq_len))
        self.max_new_tokens = kwargs.pop("max_new_tokens", self.seq_len - self.max_context_length) or None
        self.buckets = kwargs.pop("buckets", [self.seq_len])
        for name in ("ctx", "tkg", "max", "kv_cache", "spec"):
            setattr(self, f"{name}_batch_size", kwargs.pop(f"{name}_batch_size", self.batch_size))
        self.pa_num_blocks = kwargs.pop("pa_num_blocks", self.batch_size)
        # whether a checkpoint's dtype may take the place of this one
        self.overrides_torch_dtype = "torch_dtype" in kwargs and kwargs.pop("overrides_torch_dtype", True)
        self.torch_dtype = _dtype(kwargs.pop("torch_dtype", torch.bfloat16))
        self.rpl_reduce_dtype = _dtype(kwargs.pop("rpl_reduce_dtype", None))
        self.attention_dtype = _dtype(kwargs.pop("attention_dtype", None))
        self.world_size = kwargs.pop("world_size", None) or self.tp_degree * self.pp_degree * self.ep_degree
        self.local_ranks_size = kwargs.pop("local_ranks_size", None) or self.world_size
        deprecated = kwargs.pop("logical_neuron_cores", 1)
        self.logical_nc_config = int(kwargs.pop("logical_nc_config", deprecated))
        self.lm_head_pad = kwargs.pop("lm_head_pad", self.logical_nc_config > 1)
        self.weights_to_skip_layout_optimization = kwargs.pop("weights_to_skip_layout_optimization", [])
        if isinstance(self.on_device_sampling_config, dict):
            self.on_device_sampling_config = OnDeviceSamplingConfig(**self.on_device_sampling_config)

        # derived: NxDI writes them to the JSON, but takes none of them from there
        self.is_prefill_stage = None
        self.is_hidden_dim_shuffled = self.is_intermediate_dim_shuffled = self.is_mxfp4_compute
        self.enable_fused_speculation |= self.enable_eagle_speculation
        self.enable_token_tree = self.token_tree_config is not None
        self.is_chunked_prefill = self.chunked_prefill_config is not None
        self.kv_cache_tiling = self.kv_cache_update_with_kernel = self.tile_cc = False
        self.enable_long_context_mode = self.max_context_length >= 32 * 1024
        page_size = kwargs.pop("scratchpad_page_size", 1024 if self.enable_long_context_mode else None)
        self.scratchpad_page_size = page_size and int(page_size)

        if kwargs:
            logging.warning(f"NeuronConfig init: Unexpected keyword arguments: {kwargs}")
        self._validate()

    def _validate(self) -> None:
        if self.cast_type not in ("config", "as-declared"):
            raise ValueError("cast_type must be one of config, as-declared")
        if self.attention_dtype not in (None, self.torch_dtype):
            assert self.cast_type == "as-declared", "attention_dtype differs from torch_dtype: cast_type='as-declared'"
        assert self.max_context_length <= self.max_length, "max_context_length cannot be more than max_length"
        limits = dict(context_encoding_buckets=self.max_context_length, token_generation_buckets=self.max_length)
        for name, limit in limits.items():
            if getattr(self, name) is not None:
                getattr(self, name).sort()
                assert getattr(self, name)[-1] <= limit, f"{name} {getattr(self, name)} should be <= {limit}"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    return to_torch_dtype(dtype) if isinstance(dtype, str) else dtype


def _refuse_unsupported(config: NeuronConfig) -> None:
    """NotImplementedError for the first option that is not at the default which this runtime needs."""
    needed = dict(padding_side="right", world_size=config.tp_degree, tkg_batch_size=config.kv_cache_batch_size)
    for name, value in {**UNSUPPORTED, **needed}.items():
        if getattr(config, name) != value:
            given = getattr(config, name)
            raise NotImplementedError(f"the CPU runtime does not support {name}={given!r}, only {value!r}")


class InferenceConfig:
    """A model's configuration: what `load_config` and the keywords set, and its NeuronConfig."""

    attribute_map: dict[str, str] = {}

    def __init__(
        self,
        neuron_config: NeuronConfig,
        fused_spec_config=None,
        load_config=None,
        metadata: dict | None = None,
        **kwargs,
    ):
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        load_config(self) if load_config is not None else self.load_config()
        self.metadata = metadata
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.add_derived_config()
        self.validate_config()

    def __setattr__(self, key, value):
        super().__setattr__(super().__getattribute__("attribute_map").get(key, key), value)

    def __getattribute__(self, key):
        if key != "attribute_map":
            key = super().__getattribute__("attribute_map").get(key, key)
        return super().__getattribute__(key)

    def add_derived_config(self):
        """Set what follows from the rest. Runs again when a saved config is loaded."""
        self.num_cores_per_group = 1

    def load_config(self):
        """Set the model's attributes where no `load_config` was given."""

    def get_required_attributes(self) -> list[str]:
        return []

    def validate_config(self):
        """AssertionError if a required attribute is missing."""
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        assert not missing, f"Config must define {missing}"

    def save(self, model_path: str | os.PathLike):
        """Write `neuron_config.json` into the folder `model_path`."""
        os.makedirs(model_path, exist_ok=True)
        with open(os.path.join(model_path, CONFIG_FILE), "w", encoding="utf-8") as writer:
            writer.write(self.to_json_string() + "\n")

    def to_json_string(self) -> str:
        return json.dumps(to_dict(self), indent=2, sort_keys=True)

    def get_text_config(self):
        """The text model's config, which for a text model is this one."""
        text_config = getattr(self, "text_config", None)
        return self if text_config is None else text_config

    @classmethod
    def load(cls, model_path: str | os.PathLike, **kwargs) -> "InferenceConfig":
        """Read `neuron_config.json` from the folder `model_path`; the keywords win over it."""
        with open(os.path.join(model_path, CONFIG_FILE), encoding="utf-8") as reader:
            return cls.from_json_string(reader.read(), **kwargs)

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs) -> "InferenceConfig":
        attributes = {**json.loads(json_string), **kwargs}
        if isinstance(attributes.get("neuron_config"), dict):
            attributes["neuron_config"] = cls.get_neuron_config_cls()(**attributes["neuron_config"])
        return cls(**attributes)

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig
