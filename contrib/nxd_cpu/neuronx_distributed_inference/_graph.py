# SPDX-License-Identifier: Apache-2.0
"""The compiled model: exported CPU graphs in one zip file, and the ranks that run them.

A graph takes the five inputs and then, by name, every weight and cache of one rank, so that all ranks and all graphs
share the same memory and the file holds no weights.
"""

import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from neuronx_distributed._cpu import RankThreads
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.func import functional_call

from neuronx_distributed_inference._archive import load_program
from neuronx_distributed_inference._products import widen_products

_MANIFEST = "nxd_cpu.json"
_FORMAT = 1


@dataclass
class Graph:
    tag: str
    bucket: int
    state_names: list[str]
    program: ExportedProgram

    def arguments(self) -> list[tuple[str | None, Tensor | None]]:
        """What a call takes, in order: a weight's or cache's name and a tensor like it; None and a constant; None and
        None for an input of the step, and for a weight that the graph has no use for."""
        placeholders = self.program.graph.find_nodes(op="placeholder")
        names = [None] * (len(placeholders) - len(self.state_names)) + self.state_names
        arguments = [
            (name, node.meta["val"]) if name and node.users else (None, None) for node, name in zip(placeholders, names)
        ]
        for place, spec in enumerate(self.program.graph_signature.input_specs):
            if spec.kind != InputKind.USER_INPUT:
                arguments[place] = None, self.program.constants[spec.target]
        return arguments

    def __call__(self, *arguments: Tensor) -> Tensor:
        return self.program.graph_module.forward(*arguments)[0]


def export_graph(model: nn.Module, tag: str, bucket: int, inputs: Sequence[Tensor]) -> Graph:
    """Export `model(*inputs)`. Its weights may be on meta; only shapes and dtypes of `inputs` count."""
    state = dict(model.named_parameters())
    names = list(state)

    class FromState(nn.Module):  # the model is not its submodule: nothing but the arguments becomes an input
        def forward(self, *tensors: Tensor) -> Tensor:
            return functional_call(model, dict(zip(names, tensors[len(inputs) :])), tensors[: len(inputs)])[0]

    with FakeTensorMode():
        shapes = [torch.empty(x.shape, dtype=x.dtype) for x in (*inputs, *state.values())]
    with torch.no_grad():
        program = torch.export.export(FromState(), tuple(shapes), strict=False)
    program._example_inputs = None
    for node in program.graph.nodes:  # where in the source it came from is most of the file
        node.meta = {key: value for key, value in node.meta.items() if key == "val"}
    return Graph(tag, bucket, names, program)


def save_graphs(graphs: Sequence[Graph], path: str) -> None:
    entries = []
    with zipfile.ZipFile(path, "w") as archive:
        for graph in graphs:
            file = f"{graph.tag}/{graph.bucket}.pt2"
            program = io.BytesIO()
            torch.export.save(graph.program, program)
            archive.writestr(file, program.getvalue())
            entries.append(dict(tag=graph.tag, bucket=graph.bucket, state_names=graph.state_names, file=file))
        manifest = dict(
            made_by="nxd_cpu",
            format=_FORMAT,
            torch=torch.__version__,
            graphs=entries,
            about="Exported graphs for the CPU, without weights. Not a NEFF: no Neuron device can load this file.",
        )
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))


def load_graphs(path: str) -> list[Graph]:
    """The graphs, with products as this CPU computes them best; the file has them for any.

    FileNotFoundError or ValueError, naming the file, if it is not there or not what `save_graphs` wrote."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no compiled model at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if _MANIFEST not in archive.namelist():
                raise ValueError(f"{path} was not made by the CPU runtime")
            manifest = json.loads(archive.read(_MANIFEST))
            if manifest["format"] != _FORMAT:
                raise ValueError(f"{path} has format {manifest['format']}, not {_FORMAT}: compile again")
            files = [archive.read(entry["file"]) for entry in manifest["graphs"]]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    try:
        programs = [load_program(file) for file in files]
    except Exception as error:  # whatever torch's own loader stumbles over
        compiled = f"compiled with torch {manifest['torch']}, this is {torch.__version__}"
        raise ValueError(f"{path} cannot be loaded ({compiled}): {error}") from error
    for program in programs:
        widen_products(program.graph_module)
    return [Graph(e["tag"], e["bucket"], e["state_names"], p) for e, p in zip(manifest["graphs"], programs)]


def map_shard(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A rank's weights, mapped from the file; those of 8 bits become, in memory, the values in `dtype` that they stand
    for. FileNotFoundError or ValueError naming the file."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no sharded checkpoint at {path}")
    try:
        with safe_open(path, "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for name in [name for name in tensors if name.endswith(".scale")]:
        weight = name.removesuffix("scale") + "weight"
        tensors[weight] = (tensors[weight].float() * tensors.pop(name)).to(dtype)
    return tensors


class LoadedModel:
    """The graphs, with one state per rank: its weights and its caches."""

    def __init__(self, graphs: Sequence[Graph], shards: Sequence[dict[str, Tensor]], tp_degree: int):
        self._ranks = RankThreads(tp_degree)
        self._caches: list[dict[str, Tensor]] = [{} for _ in shards]
        self._graphs = {(graph.tag, graph.bucket): graph for graph in graphs}
        self._arguments: dict[tuple[str, int], list[list[Tensor | None]]] = {}
        for key, graph in self._graphs.items():
            ranks, arguments = enumerate(shards), graph.arguments()
            self._arguments[key] = [[self._state(*a, *rank) if a[0] else a[1] for a in arguments] for rank in ranks]

    def _state(self, name: str, like: Tensor, rank: int, shard: dict[str, Tensor]) -> Tensor:
        if name.startswith("kv_mgr."):
            return self._caches[rank].setdefault(name, torch.zeros(like.shape, dtype=like.dtype))
        if name not in shard:
            raise ValueError(f"the weights of rank {rank} have no {name}")
        given, needed = (shard[name].shape, shard[name].dtype), (like.shape, like.dtype)
        if given != needed:
            raise ValueError(f"{name} of rank {rank} is {given}, but the model was compiled for {needed}")
        return shard[name]

    def run(self, tag: str, bucket: int, inputs: Sequence[Tensor]) -> Tensor:
        """One step on all ranks. They end with the same output."""
        graph, bound = self._graphs[tag, bucket], self._arguments[tag, bucket]

        def step(rank: int) -> Tensor:
            given = iter(inputs)  # the inputs of the step come before any weight
            return graph(*(next(given, None) if argument is None else argument for argument in bound[rank]))

        return self._ranks.run(step)[0]
