# SPDX-License-Identifier: Apache-2.0
"""The entry point in `vllm.general_plugins`: makes SmolLM3 one of the models that vllm-neuron finds in NxD Inference.

vLLM calls it in every process, before NxD Inference is imported and any number of times. So it imports neither torch
nor NxD Inference: it waits for the module whose table vllm-neuron reads, and adds the model's class when that has been
imported. Where there is no NxD Inference nothing ever happens.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys

from ..errors import SmolLM3Error

TABLE = "neuronx_distributed_inference.utils.constants"
logger = logging.getLogger("smollm3_neuron")


def register() -> None:
    """Adds MODEL_TYPES["smollm3"]["causal-lm"] now, or as soon as NxD Inference's table is imported."""
    if TABLE in sys.modules:
        add_model(sys.modules[TABLE])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def add_model(table) -> None:
    """Adds the model to `table.MODEL_TYPES`, which vllm-neuron holds by reference.

    With a release of NxD Inference that is not supported it logs that, and adds nothing.
    """
    from ..model.releases import check_nxdi

    try:
        check_nxdi(importlib.metadata.version("neuronx-distributed-inference"))
    except importlib.metadata.PackageNotFoundError:
        pass  # its sources on the path: whoever put them there knows which
    except SmolLM3Error as error:
        logger.error("SmolLM3 is not registered: %s", error)
        return
    try:  # it compares what it uses with a release that has no public sources
        from ..modeling_smollm3_3b import NeuronSmolLM3ForCausalLM, SmolLM3InferenceConfig
    except SmolLM3Error as error:
        logger.error("SmolLM3 is not registered: %s", error)
        return
    from .serving import check_folder

    SmolLM3InferenceConfig.further_checks = (check_folder,)
    table.MODEL_TYPES["smollm3"] = {"causal-lm": NeuronSmolLM3ForCausalLM}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the table's module where the other finders do, and has its loader call `add_model` afterwards."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                add_model(module)

            spec.loader.exec_module = exec_module
        return spec
