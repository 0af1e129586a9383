# SPDX-License-Identifier: Apache-2.0
"""Runs a model file on the real NxD Inference sources in their CPU mode: `python -m nxd_sources.cpu_mode JOBS.json`.

    {"sources": [NXD_SRC, NXDI_SRC], "model": "module:ForCausalLM", "out": FOLDER,
     "timeout": seconds per job, "jobs": [JOB, ...]}                       JOB: see model_jobs.py

Every job gets ranks of its own, forked after the imports: process-wide state of the library (parallel groups, the
cache of transposed weights) cannot pass from one job to the next, and the imports are paid once. What goes wrong in a
rank comes back as the job's error, the other ranks are ended. OUT/results.json: {name: {...} or {"error": traceback}}.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from . import closed_sdk, model_jobs


def import_model(sources, model):
    """The class that `model` ("module:Class") names, on the library's `src` folders `sources`."""
    sources = [str(Path(source).resolve()) for source in sources]
    sys.path[:] = sources + [entry for entry in sys.path if Path(entry).name != "nxd_cpu"]
    closed_sdk.install()
    for name, source in zip(("neuronx_distributed", "neuronx_distributed_inference"), sources):
        file = importlib.import_module(name).__file__
        if not file.startswith(source):
            raise ImportError(f"{name} came from {file}, not from {source}")
    module, name = model.split(":")
    model_cls = getattr(importlib.import_module(module), name)
    if not hasattr(model_cls, "_get_captured_tensors_offset"):
        # 0.7 and 0.8 call this in CPU mode, and only their image models have it: a fault of these releases.
        model_cls._get_captured_tensors_offset = lambda self: 0
    return model_cls


def to_cpu(model):
    """The library's CPU mode, in which one module serves all buckets: each step is told its own, as tracing tells each
    graph its own.

    With LoRA the adapters' weights stand behind the KV caches in the outputs: on a device they go into aliased buffers,
    CPU mode writes those in place and would take them for more caches.
    """
    model.to_cpu()
    if model.neuron_config.lora_config is not None:
        for wrapper in model.models:
            wrapper.model.register_forward_hook(
                lambda module, arguments, outputs: outputs[: 1 + len(module.kv_mgr.past_key_values)]
            )
    longest = model.neuron_config.max_context_length
    for wrapper in model.models:
        wrapper.model.register_forward_pre_hook(lambda module, arguments: tell_bucket(module, longest, *arguments[:2]))


def tell_bucket(module, longest, input_ids, attention_mask):
    if not module.neuron_config.is_prefix_caching:
        module.n_positions = attention_mask.shape[-1]
        return
    module.n_active_tokens = input_ids.shape[-1]
    module.prefix_size = attention_mask.shape[-1] if attention_mask.dim() == 2 else 0
    module.n_positions = module.prefix_size
    if module.n_active_tokens > 1:
        module.n_positions = min(module.prefix_size + module.n_active_tokens, longest)


def run_rank(model_cls, job, rank, size, store, out, result):
    log = open(out / f"{job['name']}.rank{rank}.log", "w")  # noqa: SIM115 - it is this process's output to its end
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        os.environ["LOCAL_WORLD_SIZE"] = str(job["neuron"]["tp_degree"])  # NxD of SDK 2.27 asks for it at TP 4
        if size:
            # A store in a file needs no free port. The library takes over a group that exists.
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        else:
            os.environ["NXD_CPU_MODE"] = "0"  # sharding needs no device, and its mocked process groups know no gloo
        ready = {} if job["kind"] == "shard" else {"make_ready": to_cpu}
        value = getattr(model_jobs, job["kind"])(model_cls, job, rank, out, **ready)
    except BaseException:
        value = {"error": f"rank {rank} of {job['name']}:\n{traceback.format_exc()}"}
    log.flush()
    result.send(value)
    result.close()
    os._exit(0)  # the library's exit hooks expect a device


def receive(receiver, process, job):
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return {"error": f"a rank of {job['name']} died with exit code {process.exitcode}"}


def run_job(model_cls, job, out, timeout):
    size = job["neuron"]["tp_degree"] if job["kind"] != "shard" else 0
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(size or 1):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank, args=(model_cls, job, rank, size, f"{folder}/store", out, sender), daemon=True
            )
            process.start()
            sender.close()
            ranks[receiver] = process
        results, error = [], None
        waiting = dict(ranks)
        while waiting and not error:
            ready = connection.wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            received = [receive(receiver, waiting.pop(receiver), job) for receiver in ready]
            results += received
            error = "\n".join(value["error"] for value in received if "error" in value)
            if not ready:
                error = f"{job['name']}: not done after {timeout} s"
        for process in ranks.values():
            if error:
                process.kill()
            process.join()
    if error:
        return {"error": error}
    if any(value != results[0] for value in results):
        return {"error": f"the ranks of {job['name']} disagree"}
    return results[0]


def main(path):
    job_file = json.loads(Path(path).read_text())
    out = Path(job_file["out"])
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", BASE_COMPILE_WORK_DIR=f"{tempfile.mkdtemp(dir=out)}/")
    torch.set_num_threads(1)  # before the forks: a thread pool does not survive them
    model_cls = import_model(job_file["sources"], job_file["model"])
    results = {}
    for job in job_file["jobs"]:
        start = time.monotonic()
        results[job["name"]] = run_job(model_cls, job, out, job_file.get("timeout", 120))
        results[job["name"]]["seconds"] = round(time.monotonic() - start, 2)
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
