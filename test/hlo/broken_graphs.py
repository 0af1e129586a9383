"""Graphs that have one pattern each, and sound ones that look alike: python broken_graphs.py OUT.json, in .venv-hlo.

torch_xla lowers them; where it cannot be brought to write the pattern, `edit` changes what it wrote.
"""

import json
import os
import sys

os.environ.update(PJRT_DEVICE="CPU", XLA_HLO_DEBUG="1", XLA_IR_DEBUG="1")  # as ModelBuilder sets them

import torch
import torch_xla

from neuron_hlo import patterns, protos

LEAST = torch.finfo(torch.float32).min
F, I = torch.ones, torch.arange  # noqa: E741


def rotated(x, cos):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * cos


def masked(scores, *masks):
    for mask in masks:
        scores = scores + torch.zeros_like(scores).masked_fill(mask, torch.tensor(LEAST, device=scores.device))
    return scores.softmax(-1)


def cut(lengths, split):
    return lambda x: [part * 2 for part in split(x, lengths, dim=-1)]


MASK = F(4, 4, dtype=torch.bool)
# pattern -> function and its inputs
BROKEN = {
    "top-k of 2": (lambda x: torch.topk(x, 2)[0], F(3, 2)),
    "short top-k": (lambda x: torch.topk(x, 2)[0], F(3, 6)),
    "long sort": (lambda x: torch.topk(x, 3)[0], F(1, 128256)),
    "integer division": (lambda x: x // 6284, I(4)),
    "integer division: remainder": (lambda x: x % 6284, I(4)),
    "integer division: by a tensor": (lambda x, y: x // y, I(4), 1 + I(4)),
    "float64": (lambda x: torch.where(x >= 8.0, x, -x), F(4, dtype=torch.bfloat16)),
    "index_put of int64": (lambda x, at: x.index_put((at,), at * 3), I(8), I(2)),
    "unequal split": (cut((4, 2, 2), torch.split), F(2, 8)),
    "two least values": (lambda x, m: masked(x, m, m.T), F(4, 4), MASK),
    "round trip": (lambda x: x.bfloat16().float() * 2, F(4)),
    "partial rotation": (lambda x, cos: torch.cat([rotated(x[..., :4], cos), x[..., 4:]], -1), F(2, 8), F(2, 4)),
    "cumsum": (lambda x: x.cumsum(-1), F(2, 4)),
    "complex": (lambda x: torch.complex(x, x) * 2, F(4)),
    "float8_e4m3fn": (lambda x: x.to(torch.float8_e4m3fn).bfloat16(), F(4, dtype=torch.bfloat16)),
    "large constant": (lambda x: x + 5_000_000_000, I(4)),
    "integer top-k": (lambda x: torch.topk(x, 2)[0], I(16)),
    "integer scatter": (lambda x, at: x.scatter_add(0, at, x[:2]), I(8, dtype=torch.int32), I(2)),
    "narrow shift": (lambda x: torch.bitwise_right_shift(x, 2), I(4, dtype=torch.int16)),
    "integer product": (lambda x: x @ x, F(4, 4, dtype=torch.int64)),
    "integer power": (lambda x: x**3, I(4)),
    "index beyond": (lambda x: x[torch.arange(10, device=x.device)], F(3, 4)),
}
# what must not be reported
SOUND = {
    "top-k of many": (lambda x: torch.topk(x, 2)[0], F(3, 16)),
    "division by a power of two": (lambda x: x // 32, I(4)),
    "remainder of a power of two": (lambda x: x % 64, I(4)),
    "division of floats": (lambda x: x / 6284, F(4)),
    "comparison with a tensor": (lambda x: torch.where(x >= torch.zeros_like(x), x, -x), F(4, dtype=torch.bfloat16)),
    "index_put of float32": (lambda x, at: x.index_put((at,), x[:2] * 3), F(8), I(2)),
    "equal split": (cut((4, 4), torch.split), F(2, 8)),
    "one mask": (masked, F(4, 4), MASK),
    "mask that selects": (lambda x, m: torch.where(m, x, torch.full_like(x, LEAST)).softmax(-1), F(4, 4), MASK),
    "rounding that is used": (lambda x: (x.bfloat16() @ x.bfloat16()).float(), F(4, 4)),
    "full rotation": (rotated, F(2, 8), F(2, 8)),
    "small constant": (lambda x: x + 5_000, I(4)),
    "index within": (lambda x: x[torch.arange(3, device=x.device)], F(3, 4)),
    "scatter of float32": (lambda x, at: x.scatter_add(0, at, x[:2]), F(8), I(2)),
    "product of float32": (lambda x: x @ x, F(4, 4)),
}  # fmt: skip
# what is reported and known to be harmless
HARMLESS = {
    "unequal split": (cut((4, 6), torch.tensor_split), F(2, 8)),
    "round trip": (lambda x: x.cos() * x.cos().bfloat16().float(), F(4)),
    "round trip: scaled": (lambda x, w, scale: ((x @ w) * scale).bfloat16().float() * 2, F(4, 4), F(4, 4), F(1)),
    "large constant": (lambda x: x.max(dim=1).indices, F(2, 4, dtype=torch.int64)),
}


def lower(function, *inputs):
    """The module, and the values of the parameters that are no inputs."""
    inputs = [tensor.to(torch_xla.device()) for tensor in inputs]
    torch_xla.sync(wait=True)
    outputs = function(*inputs)
    context = torch_xla._XLAC.lowering.LoweringContext("graph")
    context.build(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
    given = {context.tensor_parameter_id(tensor) for tensor in inputs}
    constants = {n: t for n, t in context.device_parameter_id_tensor_mapping().items() if n not in given}
    module = protos.HloModuleProto.FromString(context.hlo())
    return module, patterns.values_of(constants)


def edited() -> dict:
    """Pattern -> a negation with one field changed to have it."""

    def negation(dtype=torch.float32):
        module, _ = lower(lambda x: -x, torch.ones(4, dtype=dtype))
        return module, next(i for c in module.computations for i in c.instructions if i.opcode == "negate")

    modules = {}
    for pattern, opcode in (("unknown operator", "triangular-solve"), ("dynamic shape", "set-dimension-size")):
        modules[pattern], instruction = negation()
        instruction.opcode = opcode
    modules["unknown call"], instruction = negation()
    instruction.opcode, instruction.custom_call_target = "custom-call", "Sharding"
    modules["random generator"], instruction = negation()
    instruction.opcode, instruction.rng_algorithm = "rng-bit-generator", 2
    modules["8-bit floats"], instruction = negation()
    instruction.shape.element_type = protos.PrimitiveType.F8E5M2FNUZ
    modules["dynamic shape: dimension"], instruction = negation()
    instruction.shape.is_dynamic_dimension[:] = [True]
    modules["integer reduction"], instruction = negation(torch.int32)
    instruction.opcode = "all-reduce"
    modules["integer scatter: 64 bits"], _ = lower(lambda x, at: x.scatter_add(0, at, at), I(8), I(2))
    return modules


def main(path: str) -> None:
    found = {
        "patterns": [p.name for p in patterns.PATTERNS],
        "reasons": [h.reason for h in patterns.HARMLESS],
        "broken": {},
        "sound": {},
        "harmless": {},
    }
    for kind, graphs in (("broken", BROKEN), ("sound", SOUND), ("harmless", HARMLESS)):
        for name, (function, *inputs) in graphs.items():
            found[kind][name] = patterns.check(*lower(function, *inputs))["found"]
    for name, module in edited().items():
        found["broken"][name] = patterns.check(module, {})["found"]
    flagged = lower(BROKEN["float8_e4m3fn"][0], BROKEN["float8_e4m3fn"][1])
    found["sound"]["float8_e4m3fn with its flag"] = patterns.check(*flagged, f"--O1 {patterns.FP8_FLAG}")["found"]
    found["without constants"] = patterns.check(lower(*BROKEN["integer division"])[0], None)
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
