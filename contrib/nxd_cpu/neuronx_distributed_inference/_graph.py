"""The compiled model: exported CPU graphs in one zip file, and the ranks that run them.

A graph takes the five inputs and then, by name, every weight and cache of one rank, so that all ranks and all graphs
share the same memory and the file holds no weights.
"""

import io
import json
import os
import zipfile
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.func import functional_call

from neuronx_distributed._cpu import RankThreads

_MANIFEST = "nxd_cpu.json"
_FORMAT = 1


@dataclass
class Graph:
    tag: str
    bucket: int
    state_names: List[str]
    program: ExportedProgram


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
            made_by="nxd_cpu", format=_FORMAT, torch=torch.__version__, graphs=entries,
            about="Exported graphs for the CPU, without weights. Not a NEFF: no Neuron device can load this file.",
        )
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))


def load_graphs(path: str) -> List[Graph]:
    """FileNotFoundError or ValueError, naming the file, if it is not there or not what `save_graphs` wrote."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no compiled model at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if _MANIFEST not in archive.namelist():
                raise ValueError(f"{path} was not made by the CPU runtime")
            manifest = json.loads(archive.read(_MANIFEST))
            if manifest["format"] != _FORMAT:
                raise ValueError(f"{path} has format {manifest['format']}, not {_FORMAT}: compile again")
            files = [io.BytesIO(archive.read(entry["file"])) for entry in manifest["graphs"]]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    try:
        programs = [torch.export.load(file) for file in files]
    except Exception as error:  # whatever torch's own loader stumbles over
        compiled = f"compiled with torch {manifest['torch']}, this is {torch.__version__}"
        raise ValueError(f"{path} cannot be loaded ({compiled}): {error}") from error
    return [Graph(e["tag"], e["bucket"], e["state_names"], p) for e, p in zip(manifest["graphs"], programs)]


def map_shard(path: str) -> Dict[str, Tensor]:
    """A rank's weights, mapped from the file. FileNotFoundError or ValueError naming it."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no sharded checkpoint at {path}")
    try:
        with safe_open(path, "pt") as shard:
            return {name: shard.get_tensor(name) for name in shard.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


class LoadedModel:
    """The graphs, with one state per rank: its weights and its caches."""

    def __init__(self, graphs: Sequence[Graph], shards: Sequence[Dict[str, Tensor]], tp_degree: int):
        self._ranks = RankThreads(tp_degree)
        self._caches: List[Dict[str, Tensor]] = [{} for _ in shards]
        self._modules = {(graph.tag, graph.bucket): graph.program.graph_module for graph in graphs}
        self._arguments = {
            (graph.tag, graph.bucket): [self._bind(graph, rank, shard) for rank, shard in enumerate(shards)]
            for graph in graphs
        }

    def _bind(self, graph: Graph, rank: int, shard: Dict[str, Tensor]) -> Tuple[int, List[Tensor]]:
        """The graph's arguments on one rank, and where its inputs have to be put in."""
        arguments: List[Tensor] = []
        placeholders = graph.program.graph.find_nodes(op="placeholder")
        specs = list(zip(graph.program.graph_signature.input_specs, placeholders))
        user = [node for spec, node in specs if spec.kind == InputKind.USER_INPUT]
        names = dict(zip(user[len(user) - len(graph.state_names) :], graph.state_names))
        for spec, node in specs:
            if spec.kind != InputKind.USER_INPUT:
                arguments.append(graph.program.constants[spec.target])
            elif node in names and node.users:
                arguments.append(self._state(names[node], node.meta["val"], rank, shard))
            else:
                arguments.append(None)  # an input of the step, or a weight that the graph has no use for
        return placeholders.index(user[0]), arguments

    def _state(self, name: str, like: Tensor, rank: int, shard: Dict[str, Tensor]) -> Tensor:
        if name.startswith("kv_mgr."):
            return self._caches[rank].setdefault(name, torch.zeros(like.shape, dtype=like.dtype))
        if name not in shard:
            raise ValueError(f"the weights of rank {rank} have no {name}")
        found, needed = (shard[name].shape, shard[name].dtype), (like.shape, like.dtype)
        if found != needed:
            raise ValueError(f"{name} of rank {rank} is {found}, but the model was compiled for {needed}")
        return shard[name]

    def run(self, tag: str, bucket: int, inputs: Sequence[Tensor]) -> Tensor:
        """One step on all ranks. They end with the same output."""
        module, bound = self._modules[tag, bucket], self._arguments[tag, bucket]

        def step(rank: int) -> Tensor:
            first, arguments = bound[rank][0], list(bound[rank][1])
            arguments[first : first + len(inputs)] = inputs
            return module.forward(*arguments)[0]

        return self._ranks.run(step)[0]
