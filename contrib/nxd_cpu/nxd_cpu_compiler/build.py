# SPDX-License-Identifier: Apache-2.0
"""Compile the parts of graphs, once each, and write how a step runs them."""

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference._graph import Graph
from neuronx_distributed_inference._products import widen_products
from safetensors.torch import save_file
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from . import cache
from .cut import Part, cut
from .processes import side_by_side
from .run import CONSTANTS, FOLDER, PLAN, cpu_features, product_dtypes

_aten = torch.ops.aten
FEW_ROWS, MANY_ROWS = 8, 32
LEAST_BYTES = 64 << 20  # of weights: below it a step takes a few ms as it is


def obstacle(tp_degree: int, weight_bytes: int) -> str | None:
    """Why graphs are not to be compiled ahead of time; None: they can be. OSError where torch cannot make its cache."""
    if tp_degree > 1:
        return f"at tp_degree {tp_degree} ranks are threads, which machine code would run in turns; tp_degree 1 is fast"
    if weight_bytes < LEAST_BYTES:
        return f"{weight_bytes / 1e6:.1f} MB of weights are too few to gain by it"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return "no C++ compiler was found (g++, or what CXX names)"
    return None


def compile_ahead(
    graphs: Sequence[Graph], folder: str, on_part: Callable[[int, int], None] = lambda count, total: None
) -> None:
    """Write `compiled/` into an artifact's folder, for `load`. `on_part` is called with (parts just done, of all).

    Parts that this user has compiled before are taken from cache.py. RuntimeError of one line, and nothing is written,
    if torch or the C++ compiler fails.
    """
    import torch._inductor.compile_fx  # here: every process of the compile would import it again

    kinds: dict[str, Part] = {}  # by file
    toolchain = cache.toolchain()
    constants: dict[str, Tensor] = {}
    plans = [plan(graph, kinds, constants, toolchain) for graph in graphs]
    on_part(0, len(kinds))
    libraries: dict[str, bytes] = {}
    for file in kinds:
        if library := cache.read(file):
            libraries[file] = library
            on_part(1, len(kinds))
    with tempfile.TemporaryDirectory(prefix="nxd_cpu_compiler-", ignore_cleanup_errors=True) as scratch:

        def keep(file: str) -> None:
            libraries[file] = Path(scratch, file).read_bytes()
            cache.write(file, libraries[file])
            on_part(1, len(kinds))

        missing = {file: part for file, part in kinds.items() if file not in libraries}
        threads = torch.get_num_threads()
        side_by_side(
            {file: partial(_compile, part, Path(scratch, file), threads) for file, part in missing.items()}, keep
        )
    target = Path(folder, FOLDER)
    target.mkdir()
    for file, library in libraries.items():
        Path(target, file).write_bytes(library)
    if constants:
        save_file(constants, Path(target, CONSTANTS))
    products = product_dtypes(sorted(_dtypes_multiplied(kinds.values())))
    Path(target, PLAN).write_text(json.dumps(dict(cpu=sorted(cpu_features()), products=products, graphs=plans)))


def _dtypes_multiplied(parts: Iterable[Part]) -> set[str]:
    """The dtypes that products are of."""
    linears = [node for part in parts for node in part.graph_module.graph.nodes if node.target is _aten.linear.default]
    return {_name(node.args[0].meta["val"].dtype) for node in linears}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(error: Exception) -> str:
    """The compiler's first error, or the first line of torch's own."""
    from torch._inductor.exc import CppCompileError

    inner = getattr(error, "inner_exception", error)
    if not isinstance(inner, CppCompileError):
        return f"torch could not compile them: {str(error).splitlines()[0]}"
    lines = inner.output.splitlines() or ["it said nothing"]
    return f"the C++ compiler {inner.cmd[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}"


def plan(graph: Graph, kinds: dict[str, Part], constants: dict[str, Tensor], toolchain: str = "") -> dict[str, Any]:
    """How a step runs: values have places in a list, in which those of the arguments come first.

    Adds to `kinds`, and to `constants` the graph's own tensors by what they hold: two graphs may have the same."""
    program = graph.program
    placeholders = program.graph.find_nodes(op="placeholder")
    own = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs):
        if spec.kind != InputKind.USER_INPUT:
            tensor = program.constants[spec.target].detach().contiguous()
            own[node.name] = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()[:16]
            constants[own[node.name]] = tensor
    states = {node.name: name for node, name in zip(placeholders[-len(graph.state_names) :], graph.state_names)}
    parts, output = cut(program.graph, states)
    arguments: list[dict | None] = []
    for node in placeholders:
        value, argument = node.meta["val"], None
        if node.name in own:
            argument = dict(constant=own[node.name])
        elif node.name in states and node.users:
            argument = dict(name=states[node.name], shape=list(value.shape), dtype=_name(value.dtype))
        arguments.append(argument)
    last = {name: step for step, part in enumerate(parts) for name in part.inputs}
    places = {node.name: place for place, node in enumerate(placeholders)}
    steps, free, size = [], [], len(placeholders)
    for step, part in enumerate(parts):
        inputs = [places[name] for name in part.inputs]
        for name in part.outputs:
            if not free:
                free.append(size)
                size += 1
            places[name] = free.pop()
        # by what it computes: under a path that a process has loaded before, it gets the library it has, not a new one
        file = f"{hashlib.sha256((toolchain + part.key).encode()).hexdigest()[:16]}.so"
        kinds.setdefault(file, part)
        steps.append(dict(file=file, inputs=inputs, outputs=[places[name] for name in part.outputs]))
        free += [places[name] for name in part.inputs if last[name] == step and places[name] >= len(placeholders)]
    places = dict(size=size, output=places[output], steps=steps)
    return dict(tag=graph.tag, bucket=graph.bucket, arguments=arguments, **places)


def _compile(part: Part, output: Path, threads: int) -> None:
    """Compile a part to a library, to be run with about so many threads. RuntimeError of one line if that fails."""
    from torch._inductor.exc import CppCompileError, InductorError

    write_products(part.graph_module)
    examples = [node.meta["val"] for node in part.graph_module.graph.find_nodes(op="placeholder")]
    with FakeTensorMode():
        inputs = tuple(torch.empty_strided(e.shape, e.stride(), dtype=e.dtype) for e in examples)
    options = {
        "aot_inductor.output_path": str(output),
        "aot_inductor.package": False,
        "cpp.dynamic_threads": True,  # as many as torch has when it runs
        "cpp.threads": threads,
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch._inductor.aot_compile(part.graph_module, inputs, options=options)
        except (CppCompileError, InductorError) as error:
            raise RuntimeError(_one_line(error)) from error


def write_products(module: fx.GraphModule) -> None:
    """Linears (rows, K) @ (N, K) in the form that is fastest on a CPU; between few rows and many they stay as they are.

    Few rows as multiply and sum in float32: that becomes one loop, which reads the weight once, at the memory's
    bandwidth, two to three times as fast as a matrix product. Many rows as weight @ rows, the rows in columns: 3 to 10%
    faster; or as `widen_products` has them, where the CPU has no instructions for their dtype.
    """
    widen_products(module)
    graph, call = module.graph, module.graph.call_function
    given: dict[fx.Node, list[fx.Node]] = {}  # x, as the products take it: whole, or few rows one by one
    for node in graph.find_nodes(op="call_function", target=_aten.linear.default):
        x, weight, *bias = node.args
        result, width = node.meta["val"], x.meta["val"].shape[-1]
        rows = x.meta["val"].numel() // width
        if FEW_ROWS < rows < MANY_ROWS:
            continue
        with graph.inserting_before(node):
            if x not in given:
                flat = call(_aten.reshape.default, (x, [rows, width]))
                turned = flat if rows <= FEW_ROWS else call(_aten.t.default, (flat,))
                stored = call(_aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
                given[x] = [stored]
                if rows <= FEW_ROWS:  # stored before the loop, which would compute them for every row of the weight
                    given[x] = [
                        call(_aten.as_strided.default, (stored, [width], [1], row * width)) for row in range(rows)
                    ]
            if rows <= FEW_ROWS:  # a sum for each, which one loop over the weight adds up side by side
                wide = call(_aten.to.dtype, (weight, torch.float32))
                products = [
                    call(_aten.mul.Tensor, (call(_aten.to.dtype, (row, torch.float32)), wide)) for row in given[x]
                ]
                total = call(
                    _aten.stack.default, ([call(_aten.sum.dim_IntList, (product, [-1])) for product in products],)
                )
            else:
                total = call(_aten.t.default, (call(_aten.mm.default, (weight, given[x][0])),))
            for added in bias:
                total = call(_aten.add.Tensor, (total, added))
            total = call(_aten.to.dtype, (call(_aten.reshape.default, (total, list(result.shape))), result.dtype))
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    module.recompile()
