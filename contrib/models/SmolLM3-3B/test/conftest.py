"""The unit tests import `smollm3_neuron`; where only this folder is there, that is its `src`."""

import importlib.util
import os
import sys
from pathlib import Path

# before the first import of torch: a second thread slows models as small as the tests' many times over
os.environ.setdefault("OMP_NUM_THREADS", "1")

SRC = Path(__file__).resolve().parents[1] / "src"

if importlib.util.find_spec("smollm3_neuron") is None:
    spec = importlib.util.spec_from_file_location(
        "smollm3_neuron", SRC / "__init__.py", submodule_search_locations=[str(SRC)]
    )
    sys.modules["smollm3_neuron"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["smollm3_neuron"])

if importlib.util.find_spec("smollm3_neuron.machine") is not None:
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()  # where there is no SDK, the CPU runtime
