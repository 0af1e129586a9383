"""Runs jobs on an emulated Neuron device, with the library's own compile, load and forward.

`.venv-emulator/bin/python emulated.py JOBS.json`, with NXD_SOURCE set. JOBS.json: {"paths": [...], "out": FOLDER,
"processes": how many jobs at once, "jobs": [JOB, ...]}

A job is one of model_jobs.py (`generate`, `serve`, `share`) or of device_jobs.py, and may have: "model"
("module:Class"), "twin" (a function of twins.py, called before the model is built and again before it is loaded),
"artifact" (a folder that was compiled before), "environment". It is compiled in one process and run in another, which
has nothing but the artifact. OUT/NAME/result.json: what the job returns, with "counts" of executions, "compiled"
graphs, "seconds" of compile, load and run; or {"error": ...}.
"""

import importlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

MODEL = "smollm3_neuron.modeling_smollm3_3b:NeuronSmolLM3ForCausalLM"


class FromArtifact:
    """Called like a model's class by model_jobs.py; it reads nothing but the artifact, unless that has no weights."""

    def __init__(self, model_cls, folder: Path):
        self.get_config_cls, self.model_cls, self.folder = model_cls.get_config_cls, model_cls, folder
        self._model_cls = model_cls._model_cls

    def __call__(self, checkpoint, config):
        if not config.neuron_config.save_sharded_checkpoint:
            return self.model_cls(checkpoint, config)
        return self.model_cls(str(self.folder))


def prepared(job, artifact: Path):
    """The model's class, after the job's twin."""
    import twins

    # NxD of SDK 2.27 asks for a launcher's variable at TP 4
    os.environ["LOCAL_WORLD_SIZE"] = str(job["neuron"]["tp_degree"])
    module, name = job.get("model", MODEL).split(":")
    model_cls = getattr(importlib.import_module(module), name)
    if "twin" in job:
        getattr(twins, job["twin"])(artifact)
    return model_cls


def compile_job(job, out: Path, artifact: Path) -> dict:
    from nxd_sources import model_jobs

    os.environ["BASE_COMPILE_WORK_DIR"] = f"{out}/work/"
    model_cls = prepared(job, artifact)
    model = model_jobs.build(model_cls, job)
    if job["neuron"].get("quantized"):
        (out / "quantized").mkdir()
        model_cls.save_quantized_state_dict(job["checkpoint"], model.config)
    began = time.perf_counter()
    model.compile(str(artifact))
    return {"compile": time.perf_counter() - began}


def run_job(job, out: Path, artifact: Path) -> dict:
    import device_jobs

    from neuron_emulator import runtime, xla
    from nxd_sources import model_jobs

    xla.OPTIMIZATION_LEVEL = 0  # a job takes few steps: compiling is what would last
    model_cls = prepared(job, artifact)
    seconds = {}

    def load(model):
        began = time.perf_counter()
        model.load(str(artifact))
        seconds["load"] = time.perf_counter() - began
        runtime.counts.clear()  # without warm-up's

    began = time.perf_counter()
    kind = getattr(device_jobs, job["kind"], None) or getattr(model_jobs, job["kind"])
    result = kind(FromArtifact(model_cls, artifact), job, 0, out, load)
    seconds["run"] = time.perf_counter() - began - seconds["load"]
    return {**result, "counts": dict(runtime.counts), "compiled": len(xla.compiled), "seconds": seconds}


def in_child(function, job, out: Path, artifact: Path) -> dict:
    """What `function` returns in a process of its own, or {"error": traceback}."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        log = os.open(out / f"{function.__name__}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job.get("environment", {}))
        try:
            result = function(job, out, artifact)
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        sender.send(result)
        os._exit(0)  # the library's exit hooks expect a device
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return result or {"error": f"{function.__name__} of {job['name']} died with exit code {code}"}


def do(job, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    artifact = Path(job.get("artifact") or out / "artifact")
    if job["neuron"].get("quantized"):
        job["neuron"]["quantized_checkpoints_path"] = str(out / "quantized")
    compiled = {} if "artifact" in job else in_child(compile_job, job, out, artifact)
    result = compiled if "error" in compiled else in_child(run_job, job, out, artifact)
    if "seconds" in result:
        result["seconds"] = {name: round(value, 2) for name, value in {**compiled, **result["seconds"]}.items()}
    (out / "result.json").write_text(json.dumps(result))


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text())
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path += jobs["paths"]
    importlib.import_module(MODEL.split(":")[0])
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs["jobs"]), []
    while waiting or running:
        while waiting and len(running) < jobs["processes"]:
            job = waiting.pop(0)
            running.append(context.Process(target=do, args=(job, Path(jobs["out"]) / job["name"])))
            running[-1].start()
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]


if __name__ == "__main__":
    main(sys.argv[1])
