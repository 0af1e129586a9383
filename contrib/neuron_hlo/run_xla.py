# SPDX-License-Identifier: Apache-2.0
"""Runs lowered graphs on XLA-CPU as one replica per rank, with real collectives: `python run_xla.py RUNS.json`.

Needs jax and jaxlib, nothing else of this repository: it reads what lower.py wrote.

    {"processes": how many at once, "runs": [RUN, ...]}
    RUN: {"folder": OUT/NAME of lower.py, "shards": FOLDER of the rank files,
          "prompts": [[token, ...], ...] one per row of the batch, "new_tokens", "result": JSON file to write,
          and optionally "drafts": per prompt the tokens that steps of "speculation_length" verify,
          "forced": per prompt the tokens to feed instead of the model's own,
          "logits": .npy file to write, float32 [prompts, steps, vocabulary]}

The result: {"tokens": per prompt, "seconds"} or {"error"}. Ranks whose first outputs differ are an error.
"""

import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import ml_dtypes
import numpy

DTYPES = {
    "F32": numpy.float32,
    "F16": numpy.float16,
    "BF16": ml_dtypes.bfloat16,
    "S32": numpy.int32,
    "I32": numpy.int32,
    "S64": numpy.int64,
    "PRED": numpy.bool_,
    "I8": numpy.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
CONTEXT_ENCODING, TOKEN_GENERATION = "context_encoding_model", "token_generation_model"
SPECULATION = "speculation_model"


def shard_files(folder: Path) -> list[Path]:
    """In the order of their ranks."""
    return sorted(folder.glob("tp*_sharded_checkpoint.safetensors"), key=lambda f: int(f.name[2:].partition("_")[0]))


def read_shard(path: Path) -> dict[str, numpy.ndarray]:
    data = numpy.memmap(path, numpy.uint8, "r")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = numpy.frombuffer(data[first:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def constant(arrays, number: str, torch_dtype: str) -> numpy.ndarray:
    """numpy has no bfloat16: lower.py wrote its bits."""
    array = arrays[f"constant{number}"]
    return array.view(ml_dtypes.bfloat16) if torch_dtype == "torch.bfloat16" else array


class Graph:
    """One compiled graph with the arrays of its parameters by number; states and inputs are set at each step."""

    def __init__(self, folder: Path, name: str, facts: dict, shards: list[dict[str, numpy.ndarray]], devices: list):
        from jax._src.lib import xla_client

        self.submodel = facts["submodel"]
        self.devices = devices
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = len(devices), 1
        options.device_assignment = xla_client.DeviceAssignment.create(numpy.arange(len(devices)).reshape(-1, 1))
        computation = xla_client.XlaComputation((folder / f"{name}.hlo").read_bytes())
        module = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
        self.executable = devices[0].client.compile_and_load(module, xla_client.DeviceList(tuple(devices)), options)
        arrays = numpy.load(folder / f"{name}.npz")
        self.example_inputs = [arrays[f"input{at}"] for at in range(len(facts["inputs"]))]
        self.inputs = {number: at for at, number in enumerate(facts["inputs"]) if number >= 0}
        self.states = {
            number: (state, shape, DTYPES[dtype]) for state, (number, dtype, shape) in facts["states"].items()
        }
        self.aliased = {int(output): state for output, state in facts["aliased"].items()}
        self.fixed = {
            number: self.put([shard[weight] for shard in shards]) for weight, (number, _, _) in facts["weights"].items()
        } | {int(n): self.put([constant(arrays, n, of)] * len(devices)) for n, (of, _) in facts["constants"].items()}

    def put(self, arrays: list[numpy.ndarray]) -> list:
        """Each on its rank's device."""
        import jax

        return [jax.device_put(array, device) for array, device in zip(arrays, self.devices, strict=True)]

    @property
    def width(self) -> int:
        """Tokens per row in context encoding; cache positions in token generation."""
        return self.example_inputs[1].shape[1]

    @property
    def batch_size(self) -> int:
        return self.example_inputs[0].shape[0]

    def __call__(self, states: dict, inputs: list[numpy.ndarray]) -> numpy.ndarray:
        """The first output; `states` is updated."""
        given = [*inputs, *self.example_inputs[len(inputs) :]]
        arguments = []
        for number in range(len(self.inputs) + len(self.states) + len(self.fixed)):
            if number in self.fixed:
                arguments.append(self.fixed[number])
            elif number in self.inputs:
                example = self.example_inputs[self.inputs[number]]
                array = given[self.inputs[number]].astype(example.dtype).reshape(example.shape)
                arguments.append(self.put([array] * len(self.devices)))
            else:
                state, shape, dtype = self.states[number]
                if state not in states:
                    states[state] = self.put([numpy.zeros(shape, dtype)] * len(self.devices))
                arguments.append(states[state])
        outputs = self.executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        for output, state in self.aliased.items():
            states[state] = outputs[output]
        first = [numpy.asarray(array) for array in outputs[0]]
        if any(not numpy.array_equal(array, first[0]) for array in first):
            raise RuntimeError("the ranks' outputs differ")
        return first[0]


class Model:
    def __init__(self, folder: Path, shards: Path):
        import jax

        facts = json.loads((folder / "facts.json").read_text())["graphs"]
        tensors = [read_shard(file) for file in shard_files(shards)]
        devices = jax.devices()[: len(tensors)]
        self.graphs = [Graph(folder, name, of, tensors, devices) for name, of in facts.items()]
        self.states = {}

    def bucket(self, submodel: str, length: int) -> Graph:
        """The narrowest graph that takes so many positions."""
        return min((g for g in self.graphs if g.submodel == submodel and g.width >= length), key=lambda g: g.width)

    def prefill(self, prompts: list[list[int]]) -> numpy.ndarray:
        """As NxDI calls it: right padding, 1 as the padding's position."""
        outputs = []
        rows = self.graphs[0].batch_size
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            graph = self.bucket(CONTEXT_ENCODING, max(map(len, batch)))
            ids, mask = numpy.zeros((rows, graph.width)), numpy.zeros((rows, graph.width))
            positions = numpy.ones((rows, graph.width))
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
                positions[row, : len(prompt)] = range(len(prompt))
            outputs.append(graph(self.states, [ids, mask, positions, numpy.arange(first, first + rows)]))
        return numpy.concatenate([output.reshape(rows, -1) for output in outputs])

    def decode(self, tokens: list[int], lengths: list[int]) -> numpy.ndarray:
        """One token per row; the mask covers what came before."""
        graph = self.bucket(TOKEN_GENERATION, max(lengths) + 1)
        mask = numpy.arange(graph.width) < numpy.array(lengths)[:, None]
        inputs = [numpy.array(tokens)[:, None], mask, numpy.array(lengths)[:, None], numpy.arange(len(tokens))]
        return graph(self.states, inputs).reshape(len(tokens), -1)

    def verify(self, tokens: list[list[int]], lengths: list[int]) -> numpy.ndarray:
        """Several tokens per row, the first at `lengths`; the mask covers what came before the first."""
        graph = self.bucket(SPECULATION, max(lengths) + len(tokens[0]))
        firsts = numpy.array(lengths)[:, None]
        mask = numpy.arange(graph.width) < firsts
        positions = firsts + numpy.arange(len(tokens[0]))
        return graph(self.states, [numpy.array(tokens), mask, positions, numpy.arange(len(tokens))])


def choices(output: numpy.ndarray, rows: int) -> numpy.ndarray:
    """[rows, tokens] of logits, or of tokens that were sampled on the device."""
    return output.reshape(rows, -1) if output.dtype.kind in "iu" else output.argmax(-1).reshape(rows, -1)


def speculate(model: Model, job: dict) -> list[list[int]]:
    """Greedy tokens by steps that verify what `drafts` has for each answer, up to the first that is wrong."""
    prompts, drafts, width = job["prompts"], job["drafts"], job["speculation_length"]
    answers = choices(model.prefill(prompts), len(prompts)).tolist()
    while min(map(len, answers)) < job["new_tokens"]:
        candidates = [draft[len(row) :][: width - 1] for draft, row in zip(drafts, answers)]
        if any(candidates):
            fed = [(row[-1:] + guess + [0] * width)[:width] for row, guess in zip(answers, candidates)]
            output = model.verify(fed, [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, answers)])
        else:
            output = model.decode(
                [row[-1] for row in answers], [len(prompt) + len(row) - 1 for prompt, row in zip(prompts, answers)]
            )
        for row, chosen, guess in zip(answers, choices(output, len(prompts)).tolist(), candidates):
            right = next((at for at, (a, b) in enumerate(zip(guess, chosen)) if a != b), len(guess))
            row += chosen[: right + 1]
    return [row[: job["new_tokens"]] for row in answers]


def run(job: dict) -> dict:
    began = time.perf_counter()
    model = Model(Path(job["folder"]), Path(job["shards"]))
    if "drafts" in job:
        return {"tokens": speculate(model, job), "seconds": round(time.perf_counter() - began, 2)}
    prompts, forced = job["prompts"], job.get("forced")
    tokens, logits = [], []
    for step in range(job["new_tokens"]):
        if step == 0:
            output = model.prefill(prompts)
        else:
            fed = [row[step - 1] for row in forced] if forced else tokens[-1]
            output = model.decode(fed, [len(prompt) + step - 1 for prompt in prompts])
        if output.dtype.kind in "iu":  # sampled on the device
            tokens.append(output[:, -1].tolist())
        else:
            logits.append(output.astype(numpy.float32))
            tokens.append(logits[-1].argmax(-1).tolist())
    if job.get("logits"):
        numpy.save(job["logits"], numpy.stack(logits, 1))
    return {"tokens": [list(row) for row in zip(*tokens)], "seconds": round(time.perf_counter() - began, 2)}


def run_all(jobs: list[dict]) -> None:
    for job in jobs:
        try:
            result = run(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        Path(job["result"]).write_text(json.dumps(result))


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text())
    ranks = max(len(shard_files(Path(job["shards"]))) for job in jobs["runs"])
    # unoptimized: compiling takes longer than running
    flags = f"--xla_force_host_platform_device_count={ranks} --xla_backend_optimization_level=0"
    os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
    count = jobs.get("processes", 1)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_all, args=(jobs["runs"][at::count],)) for at in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main(sys.argv[1])
