# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable

from transformers import AutoConfig, PretrainedConfig

from neuronx_distributed_inference.models.config import InferenceConfig, to_torch_dtype


def load_pretrained_config(
    model_path_or_name: str | os.PathLike | None = None, hf_config: PretrainedConfig | None = None
) -> Callable[[InferenceConfig], None]:
    """A `load_config` that takes over a transformers config. ValueError unless exactly one of the two is given."""

    def load_config(self: InferenceConfig) -> None:
        if (model_path_or_name is None) == (hf_config is None):
            raise ValueError('Please provide only one of "model_path_or_name" or "hf_config"')
        config = hf_config if hf_config is not None else AutoConfig.from_pretrained(model_path_or_name)
        attributes = config.to_dict()
        if config.transformers_version is not None:  # to_dict writes the installed one
            attributes["transformers_version"] = config.transformers_version
        dtypes = [attributes.pop(name, None) for name in ("dtype", "torch_dtype")]
        dtype = next((dtype for dtype in dtypes if dtype is not None), None)
        if dtype is not None and self.neuron_config is not None and not self.neuron_config.overrides_torch_dtype:
            self.neuron_config.torch_dtype = to_torch_dtype(dtype) if isinstance(dtype, str) else dtype
        self.__dict__.update(attributes)
        if hasattr(config, "attribute_map"):
            self.attribute_map = config.attribute_map

    return load_config
