# SPDX-License-Identifier: Apache-2.0
"""Compiles an HloModuleProto with XLA for the CPU and runs it, one replica per rank. jax's client, in this process."""

import hashlib
import os
import tempfile
from pathlib import Path

import numpy

from neuron_hlo import protos

from . import CORES
from .errors import DeviceError

# at 0 a token takes three times as long, at 2 compiling takes longer and nothing gets faster
OPTIMIZATION_LEVEL = 1
CACHE = Path(os.environ.get("NEURON_EMULATOR_CACHE") or Path.home() / ".cache/neuron_emulator")
compiled: list[str] = []  # digests of the graphs that XLA compiled in this process; the others came from the cache

_devices: list = []


def devices() -> list:
    """jax's CPU devices, one per NeuronCore."""
    if not _devices:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        # not by XLA_FLAGS: torch_xla would read them, too
        jax.config.update("jax_num_cpu_devices", CORES)
        jax.config.update("jax_enable_x64", True)
        _devices.extend(jax.devices("cpu"))
    return _devices


class Program:
    """A graph ready to run on the first `ranks` devices. What was compiled once is kept on disk, see CACHE."""

    def __init__(self, hlo: bytes, ranks: int):
        from jax._src.lib import xla_client

        if ranks > CORES:
            raise DeviceError(
                f"{ranks} ranks, but the emulated Neuron device has {CORES} NeuronCores: set NEURON_EMULATOR_CORES"
            )
        self.devices = devices()[:ranks]
        self._zero_copy = xla_client._xla.HostBufferSemantics.ZERO_COPY
        self.client = self.devices[0].client
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = ranks, 1
        options.device_assignment = xla_client.DeviceAssignment.create(numpy.arange(ranks).reshape(-1, 1))
        options.executable_build_options.debug_options.xla_backend_optimization_level = OPTIMIZATION_LEVEL
        on_devices = xla_client.DeviceList(tuple(self.devices))
        module = protos.HloModuleProto.FromString(hlo)
        module.ClearField("input_output_alias")  # the memory is torch's, which XLA may not write to: the caller copies
        hlo = module.SerializeToString(deterministic=True)
        file = CACHE / self._digest(hlo, ranks)
        if file.is_file():
            self.executable = self.client.deserialize_executable(file.read_bytes(), on_devices, options)
            return
        computation = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
        self.executable = self.client.compile_and_load(computation, on_devices, options)
        compiled.append(file.name)
        self._keep(file)

    def _digest(self, hlo: bytes, ranks: int) -> str:
        cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
        made_by = f"{self.client.platform_version} {ranks} {OPTIMIZATION_LEVEL} {cpu}".encode()
        return hashlib.sha256(made_by + b"\n" + hlo).hexdigest()

    def _keep(self, file: Path) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as written:
            written.write(self.client.serialize_executable(self.executable))
        os.replace(written.name, file)  # whole or not at all: others may read it

    def put(self, arrays: list[numpy.ndarray]) -> list:
        """One array per rank as XLA's buffers, which are the arrays' own memory where it is aligned to 64 bytes."""
        return [
            self.client.buffer_from_pyval(array, device, host_buffer_semantics=self._zero_copy)
            for array, device in zip(arrays, self.devices, strict=True)
        ]

    def share(self, arrays: list[numpy.ndarray]) -> list:
        """As `put`, for memory that is written to later: DeviceError where XLA took a copy."""
        buffers = self.put(arrays)
        for array, buffer in zip(arrays, buffers, strict=True):
            if array.size and buffer.unsafe_buffer_pointer() != array.ctypes.data:
                raise DeviceError(f"an array of shape {array.shape} was copied: it is not aligned to 64 bytes")
        return buffers

    def run(self, arguments: list[list]) -> list[list[numpy.ndarray]]:
        """Arguments as [parameter][rank], from `put` or `share`; results as [output][rank], when all ranks are done."""
        outputs = self.executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [[numpy.asarray(array) for array in of_ranks] for of_ranks in outputs]
