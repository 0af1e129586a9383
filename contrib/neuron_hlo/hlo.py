# SPDX-License-Identifier: Apache-2.0
"""Reads a lowered graph: operations, collectives, what became of K and V, aliases, operations and bytes per step."""

import math
from collections import Counter
from typing import Any

from . import protos

BYTES = {
    "PRED": 1,
    "S8": 1,
    "U8": 1,
    "S16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "S32": 4,
    "U32": 4,
    "F32": 4,
    "S64": 8,
    "U64": 8,
    "F64": 8,
    "F8E4M3FN": 1,
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# where the way from a K or V output back to its projection ends
ENDS = ("dot", "parameter", "constant", *COLLECTIVES)


def dtype_name(shape) -> str:
    return protos.PrimitiveType.Name(shape.element_type)


def nbytes(shape) -> int:
    if shape.tuple_shapes:
        return sum(nbytes(part) for part in shape.tuple_shapes)
    return math.prod(shape.dimensions) * BYTES.get(dtype_name(shape), 0)


class Graph:
    """An HloModuleProto with its instructions by id."""

    def __init__(self, module):
        self.module = module
        self.entry = next(c for c in module.computations if c.id == module.entry_computation_id)
        self.by_id = {instruction.id: instruction for instruction in self.entry.instructions}
        self.outputs = self.by_id[self.entry.root_id].operand_ids
        self.parameters = {i.parameter_number: i for i in self.entry.instructions if i.opcode == "parameter"}

    def instructions(self):
        for computation in self.module.computations:
            yield from computation.instructions

    def opcodes(self) -> Counter:
        return Counter(instruction.opcode for instruction in self.instructions())

    def custom_calls(self) -> Counter:
        return Counter(i.custom_call_target for i in self.instructions() if i.opcode == "custom-call")

    def collectives(self) -> Counter:
        """(opcode, replica groups) -> how often."""
        counted = Counter()
        for instruction in self.instructions():
            if instruction.opcode in COLLECTIVES:
                groups = instruction.replica_groups or instruction.collective_device_list.replica_groups
                counted[instruction.opcode, str([list(group.replica_ids) for group in groups])] += 1
        return counted

    def way_back(self, output: int) -> list:
        """Instructions on the way from an output back to the nearest matrix products, these included."""
        todo, seen, way = [self.outputs[output]], set(), []
        while todo:
            instruction = self.by_id[todo.pop()]
            if instruction.id not in seen:
                seen.add(instruction.id)
                way.append(instruction)
                if instruction.opcode not in ENDS:
                    todo += instruction.operand_ids
        return way

    def rotated(self) -> tuple[list[int], list[int]]:
        """Per layer whether K, and whether V, is rotated on its way to the cache: only rotate_half negates there."""
        ways = [self.way_back(output) for output in range(1, len(self.outputs))]
        rotated = [int(any(instruction.opcode == "negate" for instruction in way)) for way in ways]
        return rotated[0::2], rotated[1::2]

    def projections(self, weights: dict[int, str]) -> list[list[str]]:
        """Per K and V output the weights of the matrix products that it comes from; `weights` by parameter number."""
        found = []
        for output in range(1, len(self.outputs)):
            dots = [instruction for instruction in self.way_back(output) if instruction.opcode == "dot"]
            operands = [self.operand(number) for dot in dots for number in dot.operand_ids]
            numbers = {operand.parameter_number for operand in operands if operand.opcode == "parameter"}
            found.append(sorted(weights[number] for number in numbers & weights.keys()))
        return found

    def operand(self, number: int):
        """The instruction before what only moves it in memory."""
        instruction = self.by_id[number]
        while instruction.opcode in ("transpose", "reshape", "convert", "copy", "bitcast"):
            instruction = self.by_id[instruction.operand_ids[0]]
        return instruction

    def aliases(self) -> dict[int, int]:
        """Output -> the parameter whose memory it takes."""
        return {e.output_shape_index[0]: e.parameter_number for e in self.module.input_output_alias.entries}

    def dynamic(self) -> int:
        """Instructions whose shape depends on values."""
        return sum(any(i.shape.is_dynamic_dimension) for i in self.instructions())

    def flops(self) -> int:
        """Of the matrix products; a multiplication and an addition are two."""
        total = 0
        for dot in self.entry.instructions:
            if dot.opcode == "dot":
                left = self.by_id[dot.operand_ids[0]].shape.dimensions
                contracted = math.prod(left[at] for at in dot.dot_dimension_numbers.lhs_contracting_dimensions)
                total += 2 * math.prod(dot.shape.dimensions) * contracted
        return total

    def bytes_read(self) -> int:
        """Parameters that the graph reads, each once; of a table that is only gathered from (the embeddings), its rows.

        A lower bound of the memory's traffic: activations are not counted.
        """
        users = {}
        for instruction in self.entry.instructions:
            for operand in instruction.operand_ids:
                users.setdefault(operand, []).append(instruction)
        total = 0
        for parameter in self.parameters.values():
            read_by = users.get(parameter.id, [])
            if read_by and all(user.opcode == "gather" and user.operand_ids[0] == parameter.id for user in read_by):
                total += sum(nbytes(user.shape) for user in read_by)
            elif read_by:
                total += nbytes(parameter.shape)
        return total


def facts(module, record) -> dict[str, Any]:
    """What is to be known of a graph, as JSON takes it; `record` is stand_ins.py's, or None where the SDK traced."""
    graph = Graph(module)
    opcodes = graph.opcodes()
    keys, values = graph.rotated()
    found = {
        "instructions": sum(opcodes.values()),
        "opcodes": dict(opcodes.most_common()),
        "custom_calls": dict(graph.custom_calls()),
        "collectives": {f"{opcode} {groups}": count for (opcode, groups), count in graph.collectives().items()},
        "keys_rotated": keys,
        "values_rotated": values,
        "outputs": [
            [dtype_name(graph.by_id[at].shape), list(graph.by_id[at].shape.dimensions)] for at in graph.outputs
        ],
        "dynamic": graph.dynamic(),
        "float64": sum(dtype_name(i.shape) == "F64" for i in graph.instructions()),
        "flops": graph.flops(),
        "bytes_read": graph.bytes_read(),
        "parameter_bytes": sum(nbytes(parameter.shape) for parameter in graph.parameters.values()),
    }
    if record:

        def shape_of(number):
            shape = graph.parameters[number].shape
            return [dtype_name(shape), list(shape.dimensions)]

        found |= {
            "inputs": record.inputs,
            "states": {name: [n, *shape_of(n)] for n, name in record.states.items() if n >= 0},
            "weights": {name: [n, *shape_of(n)] for n, name in record.weights.items()},
            "constants": {n: [str(value.dtype), list(value.shape)] for n, value in record.constants.items()},
            "uniform": record.uniform,
            "buffers": record.buffers,
            "projections": graph.projections(record.weights),
            "aliased": {output: record.states.get(n) for output, n in sorted(graph.aliases().items())},
            "unread": record.unread,
            "fallbacks": record.fallbacks,
            "executions": record.executions,
        }
    return found
