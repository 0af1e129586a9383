# SPDX-License-Identifier: Apache-2.0
"""What the emulated runtime does with a graph: `device.cpp` calls an `Executable` for each SPMDModel.

A graph is an HloModuleProto in the place of the NEFF, see neff.py. XLA compiles it for the CPU, one replica per rank
with real collectives; jax's client runs it in this process. Weights and states are tensors in the cores' memory: XLA
reads them where they are, and what a graph returns for a state is written back to it.
"""

import collections
import queue
import sys
import threading
from collections.abc import Callable

import ml_dtypes
import numpy
import torch

from neuron_hlo import protos
from neuron_hlo.stand_ins import torch_dtype

from . import NAME, faults, neff
from .device import extension
from .errors import DeviceError
from .xla import Program

TYPES = protos.MetaTensor.Type
NUMPY_VIEWS = {  # dtypes that numpy has not: the bits as torch gives them, and what they stand for
    torch.bfloat16: (torch.uint16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_random = torch.Generator()  # a device's is its own: torch.manual_seed does not reach it
_random.seed()
counts = collections.Counter()  # "forward", "forward_async", "forward_ranked": calls since the process began


def as_numpy(tensor: torch.Tensor) -> numpy.ndarray:
    """The tensor's own memory, on whichever device, as numpy sees it."""
    tensor = extension.host_view(tensor.detach())
    if tensor.dtype in NUMPY_VIEWS:
        bits, dtype = NUMPY_VIEWS[tensor.dtype]
        return tensor.view(bits).numpy().view(dtype)
    return tensor.numpy()


class Queue:
    """Executions one after the other, in a thread of their own."""

    def __init__(self):
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name="emulated-neuron-device", daemon=True).start()

    def submit(self, job: Callable[[], None], outputs: list[torch.Tensor]) -> None:
        """Queues `job`, which writes `outputs`: a copy of one of them off the device waits, and raises its error."""
        self.jobs.put((job, extension.Execution(outputs)))

    def _run(self) -> None:
        while True:
            job, execution = self.jobs.get()
            error = ""
            try:
                job()
            except DeviceError as failure:
                error = str(failure)
            except BaseException as failure:
                error = f"{type(failure).__name__}: {failure}"
            if error:  # as a device's runtime does, whatever becomes of the exception: vLLM may drop it
                print(f"{NAME}: {error}", file=sys.stderr, flush=True)
            del job  # before the waiter goes on: it holds the tensors
            execution.finish(error)


_queue: Queue | None = None


def device_queue() -> Queue:
    global _queue
    if _queue is None:
        _queue = Queue()
    return _queue


class Executable:
    """One graph for one bucket of one submodel, on all ranks.

    `metaneff` names the parameters: inputs of a call, weights and states by their names in the rank files, constants.
    """

    def __init__(self, graph: bytes, metaneff: bytes, local_ranks: int, world_size: int):
        self.graph, self.ranks, self.world_size = graph, local_ranks, world_size
        self.meta = protos.MetaNeff.FromString(metaneff)
        self.aliases = dict(self.meta.output_aliases_to)  # output -> the parameter of the state that it is written to
        parameters = list(enumerate(self.meta.input_tensors))
        of_calls = [(int(meta.user_input_key), n) for n, meta in parameters if meta.type == TYPES.USER_INPUT]
        self.inputs = [n for _, n in sorted(of_calls)]
        self.outputs = [n for n in range(len(self.meta.output_tensors)) if n not in self.aliases]
        self.initialized = False

    # ---- load

    def initialize(self, states, weights, start_rank: int) -> None:
        """Takes this graph's weights and states from those of each rank, and compiles it.

        Raises DeviceError for a tensor that is missing, or has another shape, dtype or place; it says its name.
        """
        if start_rank or self.world_size != self.ranks:
            raise DeviceError(
                f"ranks from {start_rank} on, {self.ranks} of {self.world_size}: an emulated Neuron device is "
                "one machine; set start_rank_id to 0 and local_ranks_size to tp_degree"
            )
        self.program = Program(neff.unwrap(self.graph), self.ranks)
        self.states, self.fixed = {}, {}
        for number, meta in enumerate(self.meta.input_tensors):
            if meta.type == TYPES.CONSTANT:
                self.fixed[number] = self.program.put([self._constant(meta)] * self.ranks)
            elif meta.type in (TYPES.INPUT_WEIGHT, TYPES.INPUT_STATE):
                tensors = self._of_ranks(meta, states if meta.type == TYPES.INPUT_STATE else weights)
                self.fixed[number] = self.program.share([as_numpy(tensor) for tensor in tensors])
                if meta.type == TYPES.INPUT_STATE:
                    self.states[number] = tensors
        try:
            self.reserved = [
                torch.empty(self._io_bytes(), dtype=torch.uint8, device=f"privateuseone:{rank}")
                for rank in range(self.ranks)
            ]
        except RuntimeError as error:
            raise DeviceError(str(error)) from None
        self.initialized = True

    def _of_ranks(self, meta, source) -> list[torch.Tensor]:
        name = meta.checkpoint_key.decode()
        tensors = []
        for rank in range(self.ranks):
            if rank >= len(source) or name not in source[rank]:
                raise DeviceError(f"{name} is not among the weights of rank {rank}, and the graph reads it")
            tensor = source[rank][name]
            if str(tensor.device) != f"privateuseone:{rank}":
                raise DeviceError(
                    f"{name} of rank {rank} is on {tensor.device}, not in the memory of NeuronCore {rank}"
                )
            self._check(tensor, meta, f"{name} of rank {rank}")
            tensors.append(tensor)
        return tensors

    def _constant(self, meta) -> numpy.ndarray:
        flat = torch.frombuffer(bytearray(meta.value), dtype=torch_dtype(meta.data_type))
        return as_numpy(flat.reshape(list(meta.shape)).clone())

    def _io_bytes(self) -> int:
        metas = [self.meta.input_tensors[n] for n in self.inputs] + [self.meta.output_tensors[n] for n in self.outputs]
        return sum(torch.empty(list(m.shape), dtype=torch_dtype(m.data_type), device="meta").nbytes for m in metas)

    @staticmethod
    def _check(tensor: torch.Tensor, meta, name: str) -> None:
        if list(tensor.shape) != list(meta.shape):
            raise DeviceError(f"{name} has shape {list(tensor.shape)}, the graph was compiled for {list(meta.shape)}")
        if tensor.dtype != torch_dtype(meta.data_type):
            raise DeviceError(f"{name} is {tensor.dtype}, the graph was compiled for {torch_dtype(meta.data_type)}")

    # ---- run

    def mock(self, inputs) -> list[torch.Tensor]:
        """Zeros of the outputs' shapes: what NxD traces with before a graph is loaded."""
        return [self._empty(output, "cpu").zero_() for output in self.outputs]

    def forward(self, inputs) -> list[torch.Tensor]:
        """The same inputs to all ranks; rank 0's outputs, on the CPU."""
        outputs = self._start("forward", [list(inputs)] * self.ranks, one_for_all=True)[0]
        try:
            return [output.cpu() for output in outputs]
        except RuntimeError as error:
            raise DeviceError(str(error)) from None

    def forward_async(self, inputs) -> list[list[torch.Tensor]]:
        """Inputs per rank; outputs per rank, in the ranks' memory, before they are computed."""
        return self._start("forward_async", [list(of_rank) for of_rank in inputs], one_for_all=True)

    def forward_ranked(self, inputs) -> list[list[torch.Tensor]]:
        """As `forward_async`, for outputs that may differ between ranks."""
        return self._start("forward_ranked", [list(of_rank) for of_rank in inputs], one_for_all=False)

    def _start(self, kind: str, inputs: list[list[torch.Tensor]], one_for_all: bool) -> list[list[torch.Tensor]]:
        counts[kind] += 1
        number = counts.total()
        self._check_inputs(inputs)
        # a tensor of the host may change after the call: it is taken over now, one of the device when it is its turn
        given = [
            [tensor.clone() if tensor.device.type == "cpu" else tensor for tensor in of_rank] for of_rank in inputs
        ]
        outputs = [[self._empty(n, f"privateuseone:{rank}") for n in self.outputs] for rank in range(self.ranks)]

        def execute():
            faults.before(number)
            self._execute(given, outputs, one_for_all)
            faults.after(number, self.states)

        device_queue().submit(execute, [output for of_rank in outputs for output in of_rank])
        return outputs

    def _check_inputs(self, inputs: list[list[torch.Tensor]]) -> None:
        if len(inputs) != self.ranks:
            raise DeviceError(f"inputs of {len(inputs)} ranks, the graph was compiled for {self.ranks}")
        for rank, of_rank in enumerate(inputs):
            if len(of_rank) != len(self.inputs):
                raise DeviceError(f"{len(of_rank)} inputs, the graph was compiled for {len(self.inputs)}")
            for number, tensor in zip(self.inputs, of_rank, strict=True):
                meta = self.meta.input_tensors[number]
                self._check(tensor, meta, meta.name.decode())
                if tensor.device.type != "cpu" and str(tensor.device) != f"privateuseone:{rank}":
                    raise DeviceError(f"{meta.name.decode()} of rank {rank} is on {tensor.device}")

    def _execute(self, inputs, outputs, one_for_all: bool) -> None:
        for of_rank in inputs:
            for tensor in of_rank:
                if error := extension.error_of(tensor):  # an output of an execution that failed
                    raise DeviceError(error)
        arguments = dict(self.fixed)
        for number, meta in enumerate(self.meta.input_tensors):
            if meta.type == TYPES.UNIFORM:  # the same on all ranks, or they would choose different tokens
                drawn = torch.rand(list(meta.shape), generator=_random).to(torch_dtype(meta.data_type))
                arguments[number] = self.program.put([as_numpy(drawn)] * self.ranks)
        for at, number in enumerate(self.inputs):
            arguments[number] = self.program.put([as_numpy(of_rank[at]) for of_rank in inputs])
        results = self.program.run([arguments[number] for number in range(len(arguments))])
        for at, output in enumerate(self.outputs):
            arrays = results[output]
            if one_for_all and any(array.tobytes() != arrays[0].tobytes() for array in arrays[1:]):
                raise DeviceError(f"output {output} differs between ranks, and rank 0's would be taken for all")
            for of_rank, array in zip(outputs, arrays, strict=True):
                numpy.copyto(as_numpy(of_rank[at]), array)
        for output, number in self.aliases.items():
            for tensor, array in zip(self.states[number], results[output], strict=True):
                numpy.copyto(as_numpy(tensor), array)

    def _empty(self, output: int, device: str) -> torch.Tensor:
        meta = self.meta.output_tensors[output]
        return torch.empty(list(meta.shape), dtype=torch_dtype(meta.data_type), device=device)
