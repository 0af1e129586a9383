# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the closed parts of the Neuron SDK that NxD's ModelBuilder needs up to the call of neuronx-cc.

    torch_neuronx.xla_impl.trace   generate_hlo: one forward on torch_xla's CPU backend, lowered to an HloModuleProto
    torch_neuronx.xla_impl.ops     see ops.py
    torch_neuronx.pyhlo, .proto    see protos.py
    libneuronxla                   neuron_xla_compile is where it ends: ReachedCompiler. neuron_xla_wlo_compile, called
                                   before for the weights' layout of token generation, answers "no other layout"
    all else                       inert, see inert.py

Parameters of a graph: the inputs, the state (KV caches, one per aliased output), the weights by their names in the
model, and what else the trace met. Their order is torch_xla's: on a device it is another. Shapes and dtypes are the
graph's own.

It does not show that neuronx-cc takes the graphs, what it makes of them, or anything of the runtime.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["NXD_CPU_MODE"] = "0"  # CPU mode takes the gloo branches, which do not trace

import torch
import torch_xla
import torch_xla.debug.metrics as metrics

from nxd_sources import inert

from . import ops, protos

CLOSED = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib", "torchvision")
PRIMITIVE_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int32: "S32",
    torch.int64: "S64",
    torch.uint8: "U8",
    torch.int8: "S8",
    torch.bool: "PRED",
    torch.float8_e4m3fn: "F8E4M3FN",
    torch.float8_e5m2: "F8E5M2",
}
NUMBERS = {dtype: getattr(protos.PrimitiveType, name) for dtype, name in PRIMITIVE_TYPES.items()}


class ReachedCompiler(RuntimeError):
    """neuronx-cc would be called here."""


@dataclass
class TraceRecord:
    """What the trace of one graph met. Parameter numbers are the entry computation's."""

    inputs: list[int]  # parameter number of each example input; -1: the graph does not read it
    states: dict[int, str]
    weights: dict[int, str]
    constants: dict[int, torch.Tensor]  # read by the graph, and neither an input nor in the model's state dict
    uniform: list[int]  # those constants that are random numbers, to be drawn anew for each execution
    buffers: dict[int, str]  # those that are buffers of the model: inverse frequencies, from the second bucket on
    unread: list[str]
    fallbacks: dict[str, int]  # aten operations that torch_xla gave back to the host
    executions: int  # of graphs while tracing: someone asked for a tensor's value


@dataclass
class HloArtifacts:
    """Under the names that ModelBuilder reads."""

    hlo_module: Any
    flattener: Any
    packer: Any
    metaneff: Any
    weights: Any
    constant_parameter_tensors: Any
    weight_name_to_idx: dict[str, int]
    record: TraceRecord


@dataclass
class NeffArtifacts:
    neff_filename: str


class Flattener:
    def __init__(self, exclude):
        self.layout, self.exclude = None, exclude

    def __call__(self, inputs):
        return [tensor for at, tensor in enumerate(inputs) if at not in self.exclude]


class Packer:
    def __call__(self, outputs):
        return outputs[0] if len(outputs) == 1 else outputs


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def generate_hlo(func, example_inputs, input_output_aliases=None, preserve_parameters=True, **options) -> HloArtifacts:
    device = torch_xla.device()
    names = {id(tensor): name for name, tensor in named_tensors(func).items()}
    # name of the state -> output that becomes its next value
    aliases = {names[id(tensor)]: output for tensor, output in (input_output_aliases or {}).items()}
    func.to(device)
    inputs = [tensor.to(device) for tensor in example_inputs]
    torch_xla.sync(wait=True)
    metrics.clear_all()
    ops.uniform.clear()
    with torch.no_grad(), torch.device(device):
        outputs = func(*inputs)
    fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
    executions = (metrics.metric_data("ExecuteTime") or (0,))[0]

    context = torch_xla._XLAC.lowering.LoweringContext("graph")
    context.build(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
    module = protos.HloModuleProto.FromString(context.hlo())
    numbers = {name: context.tensor_parameter_id(tensor) for name, tensor in named_tensors(func).items()}
    input_numbers = [context.tensor_parameter_id(tensor) for tensor in inputs]
    saved = func.state_dict()
    buffers = {n: name for name, n in numbers.items() if n >= 0 and name not in saved and name not in aliases}
    weights = {name: n for name, n in numbers.items() if n >= 0 and n not in buffers and name not in aliases}
    known = {*weights.values(), *input_numbers, *(numbers[name] for name in aliases)}
    constants = {n: tensor for n, tensor in context.device_parameter_id_tensor_mapping().items() if n not in known}
    record = TraceRecord(
        inputs=input_numbers,
        states={numbers[name]: name for name in aliases},
        # "->" stands for the dot in parameter names that NxD registers
        weights={n: name.replace("->", ".") for name, n in weights.items()},
        constants={n: tensor.detach().cpu() for n, tensor in constants.items()},
        uniform=[context.tensor_parameter_id(tensor) for tensor in ops.uniform],
        buffers=buffers,
        unread=[name for name, n in numbers.items() if n < 0],
        fallbacks=fallbacks,
        executions=executions,
    )
    if not preserve_parameters:
        func.to("meta")  # no other bucket is traced with this module: its memory goes
    for name, output in aliases.items():
        module.input_output_alias.entries.add(
            output_shape_index=[output], parameter_number=numbers[name], kind=protos.Kind.MUST_ALIAS
        )
    return HloArtifacts(
        hlo_module=module,
        flattener=Flattener([at for at, n in enumerate(input_numbers) if n < 0]),
        packer=Packer(),
        metaneff=metaneff(module, record),
        weights=None,
        constant_parameter_tensors=constants,
        weight_name_to_idx=weights,
        record=record,
    )


def metaneff(module, record: TraceRecord):
    """Names and shapes of the graph's parameters and outputs, as the runtime would be told them.

    `user_input_key` is the input's place among those that the flattener leaves; `value` a constant's bytes.
    UNIFORM are random numbers from 0 to 1, drawn for each execution.
    """
    types = protos.MetaTensor.Type
    shape = entry_computation(module).program_shape
    meta = protos.MetaNeff()
    read = [n for n in record.inputs if n >= 0]
    for n, parameter in enumerate(shape.parameters):
        tensor = meta.input_tensors.add(shape=parameter.dimensions, data_type=parameter.element_type)
        if n in record.inputs:
            tensor.type, tensor.user_input_key = types.USER_INPUT, str(read.index(n)).encode()
            tensor.name = f"input {record.inputs.index(n)}".encode()
        elif n in record.uniform:
            tensor.type = types.UNIFORM
        elif n in record.constants:
            tensor.type, tensor.name = types.CONSTANT, f"constant {n}".encode()
            tensor.value = record.constants[n].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        else:
            tensor.type = types.INPUT_STATE if n in record.states else types.INPUT_WEIGHT
            tensor.name = tensor.checkpoint_key = (record.states.get(n) or record.weights[n]).encode()
    for output in shape.result.tuple_shapes:
        meta.output_tensors.add(shape=output.dimensions, data_type=output.element_type, type=types.OUTPUT)
    for entry in module.input_output_alias.entries:
        meta.output_aliases_to[entry.output_shape_index[0]] = entry.parameter_number
    return meta


def entry_computation(module):
    return computation_by_id(module, module.entry_computation_id)


def computation_by_id(module, number):
    return next(computation for computation in module.computations if computation.id == number)


def root_instruction(computation):
    return next(instruction for instruction in computation.instructions if instruction.id == computation.root_id)


def torch_dtype(number):
    return next(dtype for dtype, n in NUMBERS.items() if n == number)


def setup_compiler_dirs(hlo_module, work_dir, constants, inline_weights):
    path = Path(work_dir, "model", "graph.hlo")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(hlo_module.SerializeToString())
    return str(path)


def get_compile_command(target, work_dir, compiler_args):
    return [
        "neuronx-cc",
        "compile",
        target,
        *(compiler_args.split() if isinstance(compiler_args, str) else compiler_args),
    ]


def save_compile_command(command, work_dir):
    Path(work_dir, "command.txt").write_text(" ".join(command))


def neuron_xla_compile(*args, **kwargs):
    raise ReachedCompiler("neuronx-cc would be called here")


def neuron_xla_wlo_compile(*args, **kwargs):
    return b"", None


class hlo_debug(contextlib.nullcontext):
    def __init__(self, **options):
        super().__init__()


class BucketModelConfig:
    pass


class _TorchClasses:
    def __getattr__(self, name):
        return type(name, (), {})


def platform_target(*args):
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")


def modules() -> dict[str, dict[str, Any]]:
    messages = {name: value for name, value in vars(protos).items() if not name.startswith("_")}
    operations = {name: value for name, value in vars(ops).items() if not name.startswith("_")}
    return {
        "torch_neuronx": {"__version__": "2.9.0", "BucketModelConfig": BucketModelConfig},
        "torch_neuronx.xla_impl.ops": operations,
        "torch_neuronx.xla_impl.base": {"xla_hlo_call": ops.xla_hlo_call, "xla_call": lambda function: function},
        "torch_neuronx.xla_impl.structure": {"Flattener": Flattener, "Packer": Packer},
        "torch_neuronx.xla_impl.trace": {
            "generate_hlo": generate_hlo,
            "HloArtifacts": HloArtifacts,
            "NeffArtifacts": NeffArtifacts,
            "get_torch_dtype": torch_dtype,
            "hlo_entry_computation": entry_computation,
            "get_hlo_computation_by_id": computation_by_id,
            "get_hlo_root_instruction": root_instruction,
            "XLA_DTYPE_TO_METANEFF_DTYPE": {number: number for number in NUMBERS.values()},
            "setup_compiler_dirs": setup_compiler_dirs,
            "get_compile_command": get_compile_command,
            "save_compile_command": save_compile_command,
        },
        "neuronxcc.nki": {"jit": ops.jit},
        "neuronxcc.nki._private_kernels.cumsum": {"cumsum": ops.cumsum},
        "nkilib.core.cumsum.cumsum": {"cumsum": ops.cumsum},
        "torch_neuronx.utils": {"get_platform_target": platform_target},
        "torch_neuronx.utils.utils": {"get_platform_target": platform_target, "SUPPORTED_TYPES": []},
        "torch_neuronx.proto.metaneff_pb2": messages,
        "torch_neuronx.pyhlo.hlo_pb2": messages,
        "torch_neuronx.pyhlo.xla_data_pb2": messages,
        "torch_neuronx.experimental.profiler.v2_x.custom_op_name": {"hlo_debug": hlo_debug},
        "libneuronxla": {"neuron_xla_compile": neuron_xla_compile, "neuron_xla_wlo_compile": neuron_xla_wlo_compile},
    }


def install() -> bool:
    """Makes the closed modules importable; False where the SDK's own torch_neuronx is there, and is taken."""
    missing = inert.install(CLOSED, modules())
    if "torch_neuronx" not in missing:
        return False
    torch.classes.neuron = _TorchClasses()
    return True
