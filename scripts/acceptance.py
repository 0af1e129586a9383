"""The steps of scripts/accept.sh that are no command of their own.

    python scripts/acceptance.py environment --json environment.json

`environment` says what machine it is, `vllm ARTIFACT` asks the artifact through vLLM, `line FOLDER` makes a row for
docs/evidence.md of the folder of results.
"""

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

STEPS = ("environment", "vllm", "line")
PROMPT, ANSWER = "The square root of 144 is", "12"


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "STEP [FOLDER]")
    parser.add_argument("step", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="the artifact, or the folder of results")
    group = parser.add_argument_group("environment and vllm")
    group.add_argument("--json", type=Path, metavar="FILE", help="what the step writes")
    common.add_device(group)
    args = parser.parse_args()
    if (args.folder is None) != (args.step == "environment") or (args.json is None) != (args.step == "line"):
        parser.error("environment --json FILE, vllm ARTIFACT --json FILE, or line FOLDER")
    return args


def environment(args: argparse.Namespace) -> dict:
    """What a reader of the results needs to know of the machine."""
    facts = {
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
            facts[tool] = subprocess.run(tool.split(), capture_output=True, text=True, timeout=60).stdout.strip()
    return facts


def ask_vllm(args: argparse.Namespace) -> dict:
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


def compatibility_row(folder: Path) -> str:
    """The row for docs/evidence.md."""
    environment, validation, benchmark, vllm = (
        json.loads((folder / f"{step}.json").read_text()) for step in ("environment", "validate", "benchmark", "vllm")
    )
    on_device, versions = environment["place"] == "neuron", environment["versions"]
    prompts = [case for case in validation["cases"] if case["kind"] == "prompt"]
    (speed,) = (row for row in benchmark["rows"] if row["engine"] == "artifact")
    cells = (
        environment["instance"] if on_device else f"a CPU, {environment['cpus']} cores",
        versions["neuronx-distributed-inference"] if on_device else "none: nxd_cpu",
        versions["neuronx-cc"] or "none",
        validation["model"],
        validation["settings"]["tp_degree"],
        validation["settings"]["torch_dtype"],
        validation["verdict"],
        f"{sum(case['token_match'] == 1 for case in prompts)} of {len(prompts)}",
        f"{speed['tokens_per_second']:.1f}, {speed['decode_ratio']:.2f}x",
        "passed" if vllm["ran"] else f"not run: {vllm['why']}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    args = parse_args()
    if args.step == "line":
        print(compatibility_row(args.folder))
        return
    result = environment(args) if args.step == "environment" else ask_vllm(args)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
    sys.stdout.flush()
