# SPDX-License-Identifier: Apache-2.0
"""Runs NxD Inference's own `compile` up to the call of neuronx-cc and keeps the HLO.

`python -m neuron_hlo.lower JOBS.json`, where the file holds

    {"sources": [NXD_SRC, NXDI_SRC] or null, "paths": [...], "out": FOLDER,
     "processes": how many at once, "jobs": [JOB, ...]}
    JOB: {"name", "checkpoint": FOLDER, "neuron": NeuronConfig's keywords, "model": "module:Class" (has a default),
          "shards": ["library", "ours"] or []}

Without `shards` the checkpoint folder needs no more than its config.json. Every job has a process of its own, forked
after the imports. OUT/NAME/ holds for each graph SUBMODEL_BUCKET.hlo and .npz (example inputs, constants), and the
shard files; OUT/NAME/facts.json what hlo.py found, or {"error": ...}.
"""

import contextlib
import importlib
import json
import logging
import multiprocessing.connection
import os
import resource
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from nxd_sources import inert

from . import hlo, patterns, stand_ins

MODEL = "smollm3_neuron.modeling_smollm3_3b:NeuronSmolLM3ForCausalLM"


@dataclass
class Lowered:
    """One graph as it would go to the compiler."""

    submodel: str  # "context_encoding_model" or "token_generation_model"
    bucket: int
    module: Any  # HloModuleProto
    record: Any  # stand_ins.TraceRecord
    example_inputs: tuple[torch.Tensor, ...]
    compiler_args: str

    @property
    def name(self) -> str:
        return f"{self.submodel}_{self.bucket}"


def build(model_cls, checkpoint: str, neuron: dict[str, Any]):
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    options = {"torch_dtype": "bfloat16", **neuron}
    options["torch_dtype"] = getattr(torch, options["torch_dtype"])
    options.setdefault("max_context_length", options["seq_len"])
    if sampling := options.pop("on_device_sampling", None):
        options["on_device_sampling_config"] = OnDeviceSamplingConfig(**sampling)
    config_cls = model_cls.get_config_cls()
    neuron_config = config_cls.get_neuron_config_cls()(**options)
    return model_cls(checkpoint, config_cls(neuron_config, load_config=load_pretrained_config(checkpoint)))


def lower(model, folder: Path) -> list[Lowered]:
    """`model.compile` up to the compiler; the graphs of both submodels, one per bucket."""
    with contextlib.suppress(stand_ins.ReachedCompiler):
        model.compile(str(folder), dry_run=sdk_is_here())
    return [
        Lowered(key, bucket, artifact.hlo_module, getattr(artifact, "record", None), inputs, container.compiler_args)
        for key, container in model._builder.model_collection.items()
        for bucket, (artifact, inputs) in enumerate(
            zip(container.hlo_artifact_collection, container.example_inputs, strict=True)
        )
    ]


def sdk_is_here() -> bool:
    return not isinstance(sys.modules["torch_neuronx"], inert.Module)


def array(tensor: torch.Tensor) -> numpy.ndarray:
    tensor = tensor.detach().cpu()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write(graph: Lowered, out: Path) -> dict[str, Any]:
    (out / f"{graph.name}.hlo").write_bytes(graph.module.SerializeToString())
    arrays = {f"input{at}": array(tensor) for at, tensor in enumerate(graph.example_inputs)}
    if graph.record:
        arrays |= {f"constant{n}": array(tensor) for n, tensor in graph.record.constants.items()}
    numpy.savez(out / f"{graph.name}.npz", **arrays)
    found = {"submodel": graph.submodel, "bucket": graph.bucket, "compiler_args": graph.compiler_args}
    constants = graph.record and patterns.values_of(graph.record.constants)
    found["patterns"] = patterns.check(graph.module, constants, graph.compiler_args)
    return found | hlo.facts(graph.module, graph.record)


def run(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Lowers and shards one job; in a process of its own."""
    os.environ["BASE_COMPILE_WORK_DIR"] = f"{out}/work/"
    os.environ["LOCAL_WORLD_SIZE"] = str(
        job["neuron"]["tp_degree"]
    )  # NxD of SDK 2.27 asks a launcher's variable at TP 4
    module, name = job.get("model", MODEL).split(":")
    model_cls, neuron = getattr(importlib.import_module(module), name), job["neuron"]
    if neuron.get("quantized"):
        neuron = {**neuron, "quantized_checkpoints_path": str(out / "quantized")}
    model = build(model_cls, job["checkpoint"], neuron)
    began = time.perf_counter()
    graphs = lower(model, out / "compiled")
    found = {"seconds": round(time.perf_counter() - began, 2), "graphs": {g.name: write(g, out) for g in graphs}}
    if "library" in job.get("shards", ()):
        if neuron.get("quantized"):
            (out / "quantized").mkdir()
            model_cls.save_quantized_state_dict(job["checkpoint"], model.config)
        model._builder.shard_checkpoint(str(out / "library"))
    if "ours" in job.get("shards", ()):
        from smollm3_neuron.weights.shard_writer import write_shards

        write_shards(job["checkpoint"], model.config.checkpoint_config, model.config.neuron_config, out / "ours")
    found["schedule"] = getattr(model.config, "no_rope_layers", None)
    found["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def run_to_file(job: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log", "w")  # noqa: SIM115 - it is this process's output to its end
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        found = run(job, out)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    (out / "facts.json").write_text(json.dumps(found))
    log.flush()
    os._exit(0)  # the library's exit hooks expect a device


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text())
    out = Path(jobs["out"])
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if jobs["sources"]:
        stand_ins.install()
        sys.path[:0] = [str(Path(source).resolve()) for source in jobs["sources"]]
    sys.path += jobs.get("paths", [])
    importlib.import_module(MODEL.split(":")[0])
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs["jobs"]), []
    while waiting or running:
        while waiting and len(running) < jobs.get("processes", 1):
            job = waiting.pop(0)
            running.append(context.Process(target=run_to_file, args=(job, out / job["name"])))
            running[-1].start()
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]


if __name__ == "__main__":
    main(sys.argv[1])
