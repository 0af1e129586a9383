# SPDX-License-Identifier: Apache-2.0
"""What neuronx-cc or a NeuronCore-v2 is publicly reported to get wrong, looked for in a lowered graph.

Each pattern has its effect and its source. A place that has one may be known to be harmless: HARMLESS has the reasons.
A graph without any may still be refused or miscompiled: only what was reported is looked for, as far as HLO shows it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import finders, protos
from .finders import MOVES, Reader, of_dtype, sorted_axis, with_operands
from .hlo import dtype_name

KILN = "https://github.com/foxl-ai/kiln docs/neuron-notes.md"
CODES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes"
ISSUES = "https://github.com/aws-neuron/aws-neuron-sdk/issues"
WIDE = {"S32", "S64", "U32", "U64"}
NO_CONSTANTS = "the tracer keeps no record of constants"
FP8_FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
KNOWN_CALLS = {
    "AwsNeuronErf", "AwsNeuronGelu", "AwsNeuronGeluApprxTanh", "AwsNeuronGeluBackward", "AwsNeuronSilu",
    "AwsNeuronSiluBackward", "AwsNeuronRmsNorm", "AwsNeuronSoftmax", "AwsNeuronSoftmaxBackward",
    "AwsNeuronCollectiveMatmul", "AwsNeuronIntMatmult", "AwsNeuronArgMax", "AwsNeuronArgMin", "AwsNeuronTopK",
    "AwsNeuronDropoutMaskV1", "AwsNeuronCustomNativeKernel", "AwsNeuronCustomOp", "AwsNeuronDevicePrint",
    "ResizeNearest", "ResizeBilinear", "ResizeNearestGrad", "AwsNeuronLNCShardingConstraint",
    "AwsNeuronTransferWithStaticRing", "AwsNeuronModuleMarkerStart-Forward", "AwsNeuronModuleMarkerStart-Backward",
    "AwsNeuronModuleMarkerEnd-Forward", "AwsNeuronModuleMarkerEnd-Backward", "NeuronBoundaryMarker-Start",
    "NeuronBoundaryMarker-End",
}  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """`find` yields the instructions that have it; `effect` is what was reported, at `source`."""

    name: str
    effect: str
    source: str
    find: Callable[[Reader], Iterator[Any]]
    needs_constants: bool = False


def unknown_call(graph: Reader) -> Iterator[Any]:
    return (i for i in graph.of("custom-call") if i.custom_call_target not in KNOWN_CALLS)


def float8(graph: Reader) -> Iterator[Any]:
    """float8_e4m3fn without the flag that makes the compiler take it on trn1 and inf2."""
    return iter(()) if FP8_FLAG in graph.compiler_args else of_dtype("F8E4M3FN")(graph)


PATTERNS = (
    Pattern(
        "top-k of 2", "wrong values: a top-k over an axis of two elements",
        f'{KILN}, "MLA and DSA on trn1" (SDK 2.32, 2026-10-03)', sorted_axis(lambda length: length == 2),
    ),
    Pattern(
        "short top-k", "NCC_IXCG856: MATCH_REPLACE8 needs at least 8 elements per partition",
        f"{ISSUES}/1303 (SDK 2.28, inf2, 2026-03-30)", sorted_axis(lambda length: length < 8),
    ),
    Pattern(
        "long sort", "NCC_EVRF014: sort and slice become a top-k of the whole axis, of which 16,384 are allowed",
        f"{ISSUES}/1339 (SDK 2.30 and 2.31, 2026-06-02)", sorted_axis(lambda length: length > 16384),
    ),
    Pattern(
        "integer division", "wrong values: x // c and x % c go through the float32 reciprocal of c",
        f'{KILN}, "Integer division by a constant is inexact" (SDK 2.32, 2026-10-03)', finders.inexact_division, True,
    ),
    Pattern(
        "float64", "NCC_ESPP004: float64 is not supported; a comparison with a Python float can bring it",
        f'{KILN}, "Float-literal comparisons can lower to f64" (SDK 2.32, 2026-10-02); {CODES}/ESPP004.html',
        of_dtype("F64"),
    ),
    Pattern(
        "index_put of int64", "a tracer's error: int64 values written into an int64 tensor by index",
        f'{KILN}, "MLA and DSA on trn1" (SDK 2.32, 2026-10-03)', finders.long_scatter,
    ),
    Pattern(
        "unequal split", "wrong values: torch.split of the last axis into parts of different lengths (another tracer)",
        f"{KILN}, first section (SDK 2.32, 2026-10-02)", finders.unequal_split,
    ),
    Pattern(
        "two least values", "NaN on NeuronCore-v2: finfo.min + finfo.min is -inf, and its softmax NaN",
        "https://github.com/alpharomercoma/torchneuronx REPORT-EXTENSIONS.md, 35.3 (trn1 and inf2, August 2026)",
        finders.two_least_values, True,
    ),
    Pattern(
        "round trip", "float32 to bfloat16 and back is folded away: the values stay float32",
        f'{KILN}, "Where a GLM-5.3-Flash prefill step goes on trn1" (SDK 2.32, 2026-10-04)', finders.round_trip,
    ),
    Pattern(
        "partial rotation", "NCC_INLA001: part of each head rotated, the rest concatenated back",
        f'{KILN}, "MLA and DSA on trn1" (SDK 2.32, 2026-10-03)', finders.partial_rotation,
    ),
    Pattern(
        "cumsum", "aten::cumsum is not lowered, or was computed wrongly",
        "https://github.com/alpharomercoma/torchneuronx REPORT-EXTENSIONS.md, 36.2 (NxDI 0.10, August 2026); "
        f"{ISSUES}/767", lambda graph: graph.of("reduce-window"),
    ),
    Pattern("complex", "NCC_EVRF004: complex numbers", f"{CODES}/EVRF004.html", of_dtype("C64", "C128")),
    Pattern(
        "8-bit floats", "NCC_EVRF005, NCC_ESPP047: kinds of 8-bit floats that are not supported",
        f"{CODES}/EVRF005.html", of_dtype("F8E4M3B11FNUZ", "F8E5M2FNUZ", "F8E4M3FNUZ", "F8E3M4"),
    ),
    Pattern(
        "float8_e4m3fn", f"NCC_EVRF051: refused on trn1 and inf2 without {FP8_FLAG}", f"{CODES}/EVRF051.html", float8,
    ),
    Pattern(
        "large constant", "NCC_ESFH002: a 64-bit integer that 32 bits do not hold", f"{CODES}/ESFH002.html",
        finders.large_constant, True,
    ),
    Pattern(
        "unknown call", "NCC_EHCA005, NCC_EVRF015: a custom call that the compiler does not know",
        f"{CODES}/EHCA005.html", unknown_call,
    ),
    Pattern("integer top-k", "NCC_EVRF013: top-k of integers", f"{CODES}/EVRF013.html", finders.integer_top_k),
    Pattern(
        "integer scatter", "NCC_EVRF016, NCC_EVRF060: a scatter that adds, multiplies or compares integers",
        f"{CODES}/EVRF060.html", finders.integer_scatter,
    ),
    Pattern(
        "narrow shift", "NCC_EVRF022: a right shift of other than 32 bits", f"{CODES}/EVRF022.html",
        with_operands({"S8", "S16", "S64", "U8", "U16", "U64"}, "shift-right-arithmetic"),
    ),
    Pattern(
        "integer product", "NCC_EVRF035: a matrix product of 64-bit integers", f"{CODES}/EVRF035.html",
        with_operands({"S64", "U64"}, "dot"),
    ),
    Pattern(
        "integer reduction", "NCC_EVRF061, NCC_EVRF063: an all-reduce or reduce-scatter of 32- or 64-bit integers",
        f"{CODES}/EVRF061.html", with_operands(WIDE, "all-reduce", "reduce-scatter"),
    ),
    Pattern(
        "integer power", "NCC_EVRF062: a power of 64-bit integers", f"{CODES}/EVRF062.html",
        with_operands({"S64", "U64"}, "power"),
    ),
    Pattern(
        "index beyond", "NCC_EVRF031, NCC_EVRF056: counted indices that go beyond what they index",
        f"{CODES}/EVRF056.html", finders.index_beyond, True,
    ),
    Pattern(
        "random generator", "NCC_EVRF006: a random generator other than the default", f"{CODES}/EVRF006.html",
        lambda graph: (i for i in graph.of("rng-bit-generator") if i.rng_algorithm),
    ),
    Pattern(
        "dynamic shape", "NCC_EMOD025: a shape that depends on values", f"{CODES}/EMOD025.html",
        lambda graph: (i for i in graph.all if any(i.shape.is_dynamic_dimension) or i.opcode == "set-dimension-size"),
    ),
    Pattern(
        "unknown operator", "NCC_EUOC002, NCC_EVRF001: an operator that is not supported", f"{CODES}/EUOC002.html",
        lambda graph: graph.of("triangular-solve"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Harmless:
    """Places of a pattern that are known to do no harm, and why."""

    pattern: str
    reason: str
    holds: Callable[[Reader, Any], bool]


def of_positions(graph: Reader, instruction) -> bool:
    """Whether it is a cosine or sine, perhaps scaled, rounded or moved."""
    while instruction.opcode in MOVES | {"multiply"}:
        instruction = graph.by_id[instruction.operand_ids[0]]
    return instruction.opcode in ("cosine", "sine")


def scaled_product(graph: Reader, instruction) -> bool:
    """Whether it is a matrix product times a parameter."""
    product = graph.origin(instruction)
    factors = {graph.origin(operand).opcode for operand in graph.operands(product)}
    return product.opcode == "multiply" and factors == {"dot", "parameter"}


HARMLESS = (
    Harmless(
        "unequal split",
        "cut by slices, which the same source found exact: NxD Inference uses torch.tensor_split, not torch.split",
        lambda graph, i: bool(i.metadata.op_type) and not i.metadata.op_type.startswith("aten__split"),
    ),
    Harmless(
        "round trip",
        "the rotation's cosines and sines, which unrounded are only more exact; NxD Inference's Llama has the same",
        of_positions,
    ),
    Harmless(
        "round trip",
        "an 8-bit layer's product times its scale, unrounded only more exact; NxD Inference's Llama has the same",
        scaled_product,
    ),
    Harmless(
        "large constant",
        "the least int64, with which the library's maximum of positions begins; NxD Inference's Llama has the same",
        lambda graph, i: i.metadata.op_type == "aten__max" and graph.values(i) == [-(1 << 63)],
    ),
)


def values_of(tensors: dict[int, Any]) -> dict[int, list[float]]:
    """Of the parameters that a tracer recorded, torch tensors by parameter number."""
    return {number: t.flatten().tolist() for number, t in tensors.items() if not t.is_complex()}


def check(module, constants: dict[int, list[float]] | None, compiler_args: str = "") -> dict[str, Any]:
    """Which patterns stand in `module`, an HloModuleProto; `constants` as Reader takes them.

    {"checked": names of the patterns looked for, "not_checked": {name: why}, "found": one entry per pattern and reason,
    {"pattern", "effect", "source", "places": [...], "harmless": why, or None}}.
    """
    graph = Reader(protos.HloModuleProto.FromString(module.SerializeToString()), constants, compiler_args)
    not_checked = {pattern.name: NO_CONSTANTS for pattern in PATTERNS if pattern.needs_constants and constants is None}
    checked = [pattern for pattern in PATTERNS if pattern.name not in not_checked]
    found: dict[tuple[str, str | None], dict[str, Any]] = {}
    for pattern in checked:
        for i in pattern.find(graph):
            reason = next((h.reason for h in HARMLESS if h.pattern == pattern.name and h.holds(graph, i)), None)
            entry = {"pattern": pattern.name, "effect": pattern.effect, "source": pattern.source}
            entry = found.setdefault((pattern.name, reason), {**entry, "places": [], "harmless": reason})
            entry["places"].append(place(i))
    names = [pattern.name for pattern in checked]
    return {"checked": names, "not_checked": not_checked, "found": list(found.values())}


def place(instruction) -> str:
    """Its name, operation, dtype and shape, and what it was in torch, where the tracer wrote that down."""
    shape = f"{dtype_name(instruction.shape)}{list(instruction.shape.dimensions)}"
    of_torch = f" ({instruction.metadata.op_type})" if instruction.metadata.op_type else ""
    return f"{instruction.name} = {instruction.opcode} {shape}{of_torch}"
