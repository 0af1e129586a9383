# SPDX-License-Identifier: Apache-2.0
"""Load compiled parts and run a step with them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from neuronx_distributed_inference._products import product_dtype
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

FOLDER = "compiled"
PLAN = "graphs.json"
CONSTANTS = "constants.safetensors"
PART = re.compile(r"[0-9a-f]{16}\.so")


def cpu_features() -> set[str]:
    """What the kernel says this CPU can do; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "").split())


def product_dtypes(dtypes: Iterable[str]) -> dict[str, str]:
    """The name of the dtype in which this CPU is to compute products of each dtype that is named."""
    return {name: str(product_dtype(getattr(torch, name))).removeprefix("torch.") for name in dtypes}


class CompiledGraph:
    """One submodel at one bucket, in the place of an exported graph."""

    def __init__(self, plan: dict, parts: dict, constants: dict[str, Tensor]):
        self.tag, self.bucket = plan["tag"], plan["bucket"]
        self._arguments, self._size, self._output = plan["arguments"], plan["size"], plan["output"]
        self._constants = constants
        self._steps = [(parts[step["file"]].run, step["inputs"], step["outputs"]) for step in plan["steps"]]

    def arguments(self) -> list[tuple[str | None, Tensor | None]]:
        """See `Graph.arguments`."""
        return [self._argument(argument) if argument else (None, None) for argument in self._arguments]

    def _argument(self, argument: dict) -> tuple[str | None, Tensor]:
        if "constant" in argument:
            return None, self._constants[argument["constant"]]
        dtype = getattr(torch, argument["dtype"])
        return argument["name"], torch.empty(argument["shape"], dtype=dtype, device="meta")

    def __call__(self, *arguments: Tensor) -> Tensor:
        tensors = [*arguments, *[None] * (self._size - len(arguments))]
        for run, inputs, outputs in self._steps:
            for place, tensor in zip(outputs, run([tensors[place] for place in inputs])):
                tensors[place] = tensor
        return tensors[self._output]


def read_plan(folder: str) -> dict | None:
    """What `compile_ahead` wrote beside the parts, which it does not open; None: there is nothing.

    ValueError if it was made for a CPU that can do more or computes products in another dtype, is damaged, or names
    a file that is not in its folder."""
    path = Path(folder, FOLDER)
    if not path.is_dir():
        return None
    try:
        plan = json.loads((path / PLAN).read_text())
        missing = set(plan["cpu"]) - cpu_features()
        other = plan["products"].items() - product_dtypes(plan["products"]).items()
        files = {step["file"] for graph in plan["graphs"] for step in graph["steps"]}
        wrong = [file for file in files if not PART.fullmatch(file)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / PLAN} is damaged ({type(error).__name__}): compile again") from error
    if wrong:
        raise ValueError(f"{path / PLAN} names {wrong[0]!r}, which is no part of it: compile again")
    if missing:
        lacks = ", ".join(sorted(missing))
        raise ValueError(f"{path} was compiled for a CPU with {lacks}, which this one lacks: compile again")
    if other:
        dtype, computed_in = min(other)
        raise ValueError(
            f"{path} computes products of {dtype} in {computed_in}, as another CPU needs it: compile again"
        )
    return plan


def load(folder: str) -> list[CompiledGraph] | None:
    """The graphs that `compile_ahead` left in an artifact's folder; None: there are none.

    Opening a part runs code in it. ValueError as of `read_plan`, and if a part cannot be loaded."""
    plan = read_plan(folder)
    if plan is None:
        return None
    path = Path(folder, FOLDER)
    files = {step["file"] for graph in plan["graphs"] for step in graph["steps"]}
    try:
        parts = {file: torch._C._aoti.AOTIModelContainerRunnerCpu(str(path / file), 1) for file in files}
        constants = load_file(path / CONSTANTS) if (path / CONSTANTS).is_file() else {}
        missing = {a["constant"] for graph in plan["graphs"] for a in graph["arguments"] if a and "constant" in a}
        if missing - constants.keys():
            raise RuntimeError(f"{CONSTANTS} has no {min(missing - constants.keys())}")
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be loaded ({str(error).splitlines()[0]}): compile again") from error
    return [CompiledGraph(graph, parts, constants) for graph in plan["graphs"]]
