"""A plugin of pytest: of the library only NeuronConfig and the reader of config.json can be imported.

The tests of refusals that docs/evidence.md calls "before the library is called" pass with it.
"""

import importlib
import importlib.machinery
import sys

from smollm3_neuron.machine.runtime import ensure_neuronx

LIBRARY = ("neuronx_distributed", "neuronx_distributed_inference")
ensure_neuronx()
for module in ("models.config", "utils.hf_adapter"):
    importlib.import_module(f"neuronx_distributed_inference.{module}")
KEPT = {name for name in sys.modules if name.partition(".")[0] in LIBRARY}


class Refused:
    """A finder and a loader of all else: it is there, and importing it fails."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LIBRARY and name not in KEPT:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(f"{spec.name} is kept away from this test")

    def exec_module(self, module):
        raise AssertionError("create_module has refused it")


sys.meta_path.insert(0, Refused())
