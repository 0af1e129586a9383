"""The steps of scripts/accept.sh that are no command of their own: environment, vllm, line."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import common

from smollm3_neuron.artifact.folder import open_artifact, versions
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import available_memory, choose_place, instance_type
from smollm3_neuron.vllm.serving import FOLDER, override

PROMPT, ANSWER = "The square root of 144 is", "12"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("environment", "vllm", "line"):
        step = steps.add_parser(name)
        if name != "environment":
            step.add_argument("folder", type=Path, help="the artifact" if name == "vllm" else "the folder of results")
        if name != "line":
            step.add_argument("--json", type=Path, required=True)
            common.add_device(step)
    return parser.parse_args()


def environment(args: argparse.Namespace) -> dict:
    """What a reader of the results needs to know of the machine."""
    found = {
        "place": choose_place(args.device),
        "instance": instance_type(),
        "cpus": os.cpu_count(),
        "available_memory": available_memory(),
        "free_disk": shutil.disk_usage(".").free,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions(),
        "neuron_environment": {name: value for name, value in os.environ.items() if name.startswith("NEURON_")},
    }
    for tool in ("neuron-ls", "neuronx-cc --version", "modinfo -F version neuron"):
        if shutil.which(tool.split()[0]):
            found[tool] = subprocess.run(tool.split(), capture_output=True, text=True, timeout=60).stdout.strip()
    return found


def vllm(args: argparse.Namespace) -> dict:
    """One prompt through vLLM with vllm-neuron, on the artifact itself; never run on a device by this project."""
    place = choose_place(args.device)
    missing = [name for name in ("vllm", "vllm_neuron") if importlib.util.find_spec(name) is None]
    if place == "cpu" or missing:
        why = "vllm-neuron needs a device" if place == "cpu" else f"{', '.join(missing)} not installed"
        return {"ran": False, "why": why}
    artifact = open_artifact(args.folder, place)
    settings = artifact.settings
    os.environ[FOLDER] = str(artifact.path.resolve())
    from vllm import LLM, SamplingParams

    engine = LLM(
        artifact.manifest["model"]["folder"],
        tensor_parallel_size=settings.tp_degree,
        max_num_seqs=settings.batch_size,
        max_model_len=settings.seq_len,
        dtype=settings.torch_dtype,
        max_num_batched_tokens=settings.seq_len,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        additional_config={"override_neuron_config": override(settings)},
    )
    text = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    if ANSWER not in text:
        raise SmolLM3Error(f"vLLM answers {PROMPT!r} with {text!r}, {ANSWER} is not in it")
    return {"ran": True, "answer": text}


def line(folder: Path) -> str:
    """The row for docs/evidence.md."""
    read = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("environment", "validate", "benchmark", "vllm")
    }
    here, judged = read["environment"], read["validate"]
    asked = [case for case in judged["cases"] if case["kind"] == "prompt"]
    rows = {row["engine"]: row for row in read["benchmark"]["rows"]}
    speed = f"{rows['artifact']['tokens_per_second']:.1f}, {rows['artifact']['decode_ratio']:.2f}x"
    library = here["versions"]["neuronx-distributed-inference"]
    cells = (
        here["instance"] if here["place"] == "neuron" else f"a CPU, {here['cpus']} cores",
        library if here["place"] == "neuron" else "none: nxd_cpu",
        here["versions"]["neuronx-cc"] or "none",
        judged["model"],
        judged["settings"]["tp_degree"],
        judged["settings"]["torch_dtype"],
        judged["verdict"],
        f"{sum(case['token_match'] == 1 for case in asked)} of {len(asked)}",
        speed,
        "passed" if read["vllm"]["ran"] else f"not run: {read['vllm']['why']}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    args = parse_args()
    if args.step == "line":
        print(line(args.folder))
        return
    found = {"environment": environment, "vllm": vllm}[args.step](args)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    common.run(main)
    sys.stdout.flush()
