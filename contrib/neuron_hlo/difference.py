# SPDX-License-Identifier: Apache-2.0
"""What graphs differ in, operation by operation: `python -m neuron_hlo.difference ONE.hlo OTHER.hlo ...`, file by file.

An operation is its opcode, custom call or collective's groups, dimensions, dtypes and shapes, those of its operands
included; where it stands in the graph, and the values of constants and weights, do not count. Prints as JSON
{"ONE.hlo": {"added": {OPERATION: how often more than in OTHER}, "missing": {OPERATION: how often less}}}.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from . import protos
from .hlo import COLLECTIVES, dtype_name


def shape_of(instruction) -> str:
    shapes = instruction.shape.tuple_shapes or [instruction.shape]
    return " ".join(f"{dtype_name(shape)}{list(shape.dimensions)}" for shape in shapes)


def operations(module) -> Counter[str]:
    counted = Counter()
    for computation in module.computations:
        by_id = {instruction.id: instruction for instruction in computation.instructions}
        for i in computation.instructions:
            operands = ", ".join(shape_of(by_id[number]) for number in i.operand_ids)
            details = [i.opcode, i.custom_call_target, i.comparison_direction, *map(str, i.dimensions)]
            if i.opcode in COLLECTIVES:
                groups = i.replica_groups or i.collective_device_list.replica_groups
                details.append(str([list(group.replica_ids) for group in groups]))
            counted[f"{' '.join(filter(None, details))} {shape_of(i)} ({operands})"] += 1
    return counted


def difference(one, other) -> dict[str, dict[str, int]]:
    """Of two HloModuleProtos, as the module's docstring has it."""
    of_one, of_other = operations(one), operations(other)
    return {"added": dict(of_one - of_other), "missing": dict(of_other - of_one)}


def main(paths: list[str]) -> None:
    modules = [protos.HloModuleProto.FromString(Path(path).read_bytes()) for path in paths]
    print(
        json.dumps({path: difference(*pair) for path, *pair in zip(paths[::2], modules[::2], modules[1::2])}, indent=1)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
