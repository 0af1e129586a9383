# SPDX-License-Identifier: Apache-2.0
"""Cut a graph into parts: what comes before the layers, each layer, what comes after them.

Layers of one kind have parts that differ only in the tensors they are given.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_CACHE = "kv_mgr."
_WITHOUT_EFFECT = (torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten.alias.default)


@dataclass
class Part:
    """A piece of a graph as a graph of its own. `inputs` and `outputs` are the names that the whole graph has for them;
    parts with the same `key` compute the same."""

    graph_module: fx.GraphModule
    inputs: list[str]
    outputs: list[str]
    key: str


def cut(exported: fx.Graph, states: dict[str, str]) -> tuple[list[Part], str]:
    """The parts in the order they run, and the name of the first output. `states` maps the placeholders of weights and
    caches to their names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(exported, {}))
    for node in list(graph.nodes):
        if node.target in _WITHOUT_EFFECT:
            if node.users:
                node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    once, layered = _split(graph, states)
    bounds = [0, *(len(once) + index for index in _boundaries(layered, states)), None]
    nodes = once + layered
    parts = [_part(nodes[first:last]) for first, last in zip(bounds, bounds[1:])]
    return parts, graph.output_node().args[0][0].name


def _split(graph: fx.Graph, states: dict[str, str]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What no weight or cache has a part in (masks, cos and sin: the same for all layers), and the rest."""
    from_state: set[fx.Node] = {node for node in graph.find_nodes(op="placeholder") if node.name in states}
    once: dict[Any, fx.Node] = {}
    rest: dict[fx.Node, None] = {}
    views: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not from_state & set(node.all_input_nodes):
            same = once.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            continue
        from_state.add(node)
        if _is_view(node) and all(i.name in states or i in views for i in node.all_input_nodes):
            views.add(node)  # belongs to the layer that uses it
        else:
            _append(node, views, rest)
    return list(once.values()), list(rest)


def _append(node: fx.Node, views: set[fx.Node], nodes: dict[fx.Node, None]) -> None:
    for view in node.all_input_nodes:
        if view in views:
            _append(view, views, nodes)
    nodes.setdefault(node)


def _is_view(node: fx.Node) -> bool:
    arguments = getattr(node.target, "_schema", None) and node.target._schema.arguments
    return bool(arguments and arguments[0].alias_info and not arguments[0].alias_info.is_write)


def _boundaries(nodes: Sequence[fx.Node], states: dict[str, str]) -> list[int]:
    """Where one owner's weights end and another's begin: there, the place that the fewest values cross."""
    uses = []
    for index, node in enumerate(nodes):
        for name in (states.get(i.name, _CACHE) for i in node.all_input_nodes):
            if not name.startswith(_CACHE):
                layer = _LAYER.search(name)
                uses.append((index, layer and layer[1]))
    order = {node: index for index, node in enumerate(nodes)}
    lives = [(order[node], max((order.get(user, len(nodes)) for user in node.users), default=0)) for node in nodes]
    boundaries = []
    for (last, before), (first, after) in zip(uses, uses[1:]):
        if before != after:
            places = range(last + 1, first + 1)
            crossing = {place: sum(begin < place <= end for begin, end in lives) for place in places}
            boundaries.append(min(crossing, key=crossing.__getitem__))
    return boundaries


def _part(nodes: Sequence[fx.Node]) -> Part:
    graph, own, lines = fx.Graph(), {}, []
    inside = set(nodes)
    inputs = list(dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in inside))
    for number, node in enumerate(inputs):
        own[node] = graph.placeholder(f"x{number}")
        own[node].meta["val"] = value = node.meta["val"]
        lines.append(f"{tuple(value.shape)} {value.stride()} {value.dtype}")
    for number, node in enumerate(nodes):
        own[node] = graph.node_copy(node, own.__getitem__)
        own[node].name = f"v{number}"
        lines.append(own[node].format_node())
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(own[node] for node in outputs))
    lines.append(str([own[node].name for node in outputs]))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Part(module, [node.name for node in inputs], [node.name for node in outputs], "\n".join(map(str, lines)))
