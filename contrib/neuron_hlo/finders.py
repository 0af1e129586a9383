# SPDX-License-Identifier: Apache-2.0
"""Finds in a lowered graph what patterns.py looks for. Each finder yields the instructions that have it."""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from .hlo import dtype_name

INTEGERS = {"S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64"}
LONG = {"S64": (-(1 << 31), (1 << 31) - 1), "U64": (0, (1 << 32) - 1)}
FLOATS = {"F16", "BF16", "F32"}
MOVES = {"transpose", "reshape", "convert", "copy", "bitcast", "broadcast"}
ELEMENTWISE = {"add", "subtract", "multiply", "divide", "negate", "convert", "reshape", "copy", "select"}
LONGEST = 1 << 17  # positions
HALF_OF_THE_LEAST = -1.7e38  # of float32 and bfloat16: two such values add up to -inf


class Reader:
    """A module's instructions in the order of their operands.

    `constants`: values of parameters that are no inputs, states or weights: torch_xla makes Python scalars parameters.
    None where the tracer kept no record of them.
    """

    def __init__(self, module, constants: dict[int, list[float]] | None, compiler_args: str):
        self.compiler_args = compiler_args
        self.computations = {computation.id: computation for computation in module.computations}
        self.all = [i for computation in module.computations for i in computation.instructions]
        self.by_id = {i.id: i for i in self.all}
        entry = self.computations[module.entry_computation_id]
        self.parameters = {
            i.id: (constants or {}).get(i.parameter_number) for i in entry.instructions if i.opcode == "parameter"
        }

    def of(self, *opcodes: str) -> Iterator[Any]:
        return (i for i in self.all if i.opcode in opcodes)

    def operands(self, instruction) -> list:
        return [self.by_id[number] for number in instruction.operand_ids]

    def origin(self, instruction, through=MOVES):
        """The instruction before what only moves, widens or narrows it."""
        while instruction.opcode in through or (
            instruction.opcode == "concatenate" and len(instruction.operand_ids) == 1
        ):
            instruction = self.by_id[instruction.operand_ids[0]]
        return instruction

    def values(self, instruction) -> list[float] | None:
        """Of a constant, or of a parameter whose value is known."""
        if instruction.opcode != "constant":
            return self.parameters.get(instruction.id)
        literal = instruction.literal
        if literal.bf16s:
            return [
                struct.unpack("<f", b"\0\0" + literal.bf16s[at : at + 2])[0] for at in range(0, len(literal.bf16s), 2)
            ]
        if literal.f16s:
            return [value for (value,) in struct.iter_unpack("<e", literal.f16s)]
        return [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s, *literal.f32s, *literal.f64s] or None

    def combiner(self, instruction) -> set[str]:
        """Opcodes of what a scatter or a reduction does with two values."""
        return {i.opcode for at in instruction.called_computation_ids for i in self.computations[at].instructions}


def dtypes(graph: Reader, instruction) -> list[str]:
    return [dtype_name(operand.shape) for operand in graph.operands(instruction)]


def top_ks(graph: Reader) -> Iterator[tuple[Any, int]]:
    """Sorts and top-k calls, with the length of what is sorted."""
    for i in graph.of("sort", "topk", "custom-call"):
        if i.opcode != "custom-call" or "TopK" in i.custom_call_target:
            shape = graph.by_id[i.operand_ids[0]].shape
            yield i, shape.dimensions[i.dimensions[0] if i.opcode == "sort" else -1]


def inexact(divisor: float) -> bool:
    """Whether floor(x / divisor), as float32 x times the float32 reciprocal, is too small for an x that it divides.

    For x up to LONGEST. For 6284 it gives the quotients that were reported wrong, for 4768, reported right, none.
    """
    if divisor < 1:
        return True
    quotients = numpy.arange(1, LONGEST // int(divisor) + 1)
    reckoned = numpy.floor(numpy.float32(quotients * int(divisor)) * numpy.float32(1 / divisor))
    return bool((reckoned < quotients).any())


def inexact_division(graph: Reader) -> Iterator[Any]:
    """Of integers; torch_xla writes floor division as one of float32. A divisor that is not known counts as inexact."""
    for i in graph.of("divide", "remainder"):
        left, right = (graph.origin(operand, MOVES | {"abs"}) for operand in graph.operands(i))
        if {dtype_name(left.shape), dtype_name(right.shape)} <= INTEGERS:
            divisors = graph.values(right)
            if divisors is None or any(map(inexact, divisors)):
                yield i


def unequal_split(graph: Reader) -> Iterator[Any]:
    """Slices that cut the last axis of one tensor into parts of different lengths."""
    cuts: dict[int, list] = {}
    for i in graph.of("slice"):
        *others, last = i.slice_dimensions
        whole = graph.by_id[i.operand_ids[0]].shape.dimensions
        if last.stride == 1 and all(d.limit - d.start == n for d, n in zip(others, whole)):
            cuts.setdefault(i.operand_ids[0], []).append(i)
    for number, slices in cuts.items():
        parts = sorted({last_slice(i)[1:] for i in slices})
        ends = [0, *(limit for _, limit in parts)]
        lengths = {limit - start for start, limit in parts}
        if [start for start, _ in parts] == ends[:-1] and ends[-1] == graph.by_id[number].shape.dimensions[-1]:
            yield from slices if len(lengths) > 1 else ()


def two_least_values(graph: Reader) -> Iterator[Any]:
    """An addition of two values that may both be a dtype's least."""
    least = set()
    for i in graph.all:
        operands = list(i.operand_ids)
        if i.opcode in ("constant", "parameter"):
            if any(value <= HALF_OF_THE_LEAST for value in graph.values(i) or ()):
                least.add(i.id)
        elif i.opcode == "add" and len(operands) == 2 and least.issuperset(operands):
            yield i
        elif dtype_name(i.shape) in FLOATS:
            if i.opcode in ("slice", "dynamic-slice", "gather", "subtract", "pad"):
                operands = operands[:1]
            elif i.opcode == "select":
                operands = operands[1:]
            elif i.opcode not in MOVES | {"add", "multiply", "concatenate", "maximum"}:
                continue
            if least.intersection(operands):
                least.add(i.id)


def round_trip(graph: Reader) -> Iterator[Any]:
    """float32 to bfloat16 or float16 and back, with nothing between that computes."""
    for i in graph.of("convert"):
        narrow = graph.origin(graph.by_id[i.operand_ids[0]], MOVES - {"convert"} | {"slice"})
        both_ways = dtype_name(i.shape) == "F32" and narrow.opcode == "convert" and dtypes(graph, narrow) == ["F32"]
        if both_ways and dtype_name(narrow.shape) in ("BF16", "F16"):
            yield i


def last_slice(instruction) -> tuple[int, int, int] | None:
    """(operand, start, limit) of a slice of the last axis."""
    if instruction.opcode == "slice":
        return (
            instruction.operand_ids[0],
            instruction.slice_dimensions[-1].start,
            instruction.slice_dimensions[-1].limit,
        )


def partial_rotation(graph: Reader) -> Iterator[Any]:
    """A part of the last axis computed with, the rest as it was, concatenated where they stood."""
    for i in graph.of("concatenate"):
        operands = graph.operands(i)
        last = len(i.shape.dimensions) - 1
        if len(operands) < 2 or i.dimensions[0] != last or dtype_name(i.shape) not in FLOATS:
            continue
        at, as_they_were, changed = 0, set(), set()
        for operand in operands:
            end = at + operand.shape.dimensions[-1]
            cut = last_slice(operand)
            if cut and cut[1:] == (at, end):
                as_they_were.add(cut[0])
            elif not cut:
                todo, seen = [operand], set()
                while todo:
                    one = todo.pop()
                    cut = last_slice(one)
                    if cut and cut[1:] == (at, end):
                        changed.add(cut[0])
                    elif one.opcode in ELEMENTWISE and one.id not in seen:
                        seen.add(one.id)
                        todo += graph.operands(one)
            at = end
        if as_they_were & changed:
            yield i


def large_constant(graph: Reader) -> Iterator[Any]:
    for i in graph.of("constant", "parameter"):
        if dtype_name(i.shape) in LONG:
            low, high = LONG[dtype_name(i.shape)]
            if any(not low <= value <= high for value in graph.values(i) or ()):
                yield i


def index_beyond(graph: Reader) -> Iterator[Any]:
    """A gather or scatter whose indices count on beyond what they index."""
    for i in graph.of("gather", "scatter"):
        operand, indices, *_ = graph.operands(i)
        if i.opcode == "gather":
            axes = i.gather_dimension_numbers.start_index_map
        else:
            axes = i.scatter_dimension_numbers.scatter_dims_to_operand_dims
        while (indices := graph.origin(indices)).opcode == "select":  # negative indices count from the end
            indices = graph.by_id[indices.operand_ids[2]]
        if indices.opcode == "iota":
            end = indices.shape.dimensions[indices.dimensions[0]]
        else:
            end = max(graph.values(indices) or [-1]) + 1
        if len(axes) == 1 and end > operand.shape.dimensions[axes[0]]:
            yield i


def integer_scatter(graph: Reader) -> Iterator[Any]:
    for i in graph.of("scatter"):
        if dtype_name(i.shape) in INTEGERS | {"PRED"} and graph.combiner(i) & {"add", "multiply", "minimum", "maximum"}:
            yield i


def long_scatter(graph: Reader) -> Iterator[Any]:
    return (i for i in graph.of("scatter") if {*dtypes(graph, i)[::2]} & {"S64", "U64"})


def integer_top_k(graph: Reader) -> Iterator[Any]:
    return (i for i, _ in top_ks(graph) if dtypes(graph, i)[0] in INTEGERS)


def of_dtype(*names: str) -> Callable[[Reader], Iterator[Any]]:
    return lambda graph: (i for i in graph.all if dtype_name(i.shape) in names)


def with_operands(dtype: set[str], *opcodes: str) -> Callable[[Reader], Iterator[Any]]:
    return lambda graph: (i for i in graph.of(*opcodes) if dtype.intersection(dtypes(graph, i)))


def sorted_axis(wanted: Callable[[int], bool]) -> Callable[[Reader], Iterator[Any]]:
    return lambda graph: (i for i, length in top_ks(graph) if wanted(length))
