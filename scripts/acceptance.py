"""The steps of scripts/accept.sh that are no command of their own.

    python scripts/acceptance.py environment --json environment.json

`environment` says what machine it is, `vllm ARTIFACT` has a server answer, `float32 ARTIFACT` holds the absolute error
of its logits to a published one, `sizes ARTIFACT` names sizes to pad the MLPs to. Of the folder of results `fastest`
compares those, `collect` copies logs into it, `line` makes a row for docs/evidence.md, and `report` prints what may be
shared.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import common

from smollm3_neuron.artifact.folder import open_artifact, versions
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import available_memory, choose_place, instance_type
from smollm3_neuron.model.json_files import read_json
from smollm3_neuron.vllm.serving import serve_command

STEPS = ("environment", "vllm", "float32", "sizes", "fastest", "collect", "line", "report")
# float32 logits of a Flax port of SmolLM3-3B beside transformers', absolute, over a prompt of 78 tokens: as published
PUBLISHED_TOKENS, PUBLISHED_ERRORS = 78, {"maximum": 2.5e-4, "mean": 1.6e-5}
PROMPT, ANSWER = "The square root of 144 is", "12"


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "STEP [FOLDER]")
    parser.add_argument("step", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="the artifact, or the folder of results")
    group = parser.add_argument_group("environment, vllm and float32")
    group.add_argument("--json", type=Path, metavar="FILE", help="what the step writes")
    common.add_device(group)
    args = parser.parse_args()
    writes_json = args.step in ("environment", "vllm", "float32")
    if (args.folder is None) != (args.step == "environment") or (args.json is not None) != writes_json:
        parser.error("pass environment, vllm ARTIFACT or float32 ARTIFACT with --json FILE, or another step and FOLDER")
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


def float32_errors(args: argparse.Namespace) -> dict:
    """The absolute error of the logits at each position of a text; SmolLM3Error where it is above the published one."""
    artifact = open_artifact(args.folder, choose_place(args.device))
    settings = artifact.settings
    if settings.torch_dtype != "float32":
        raise SmolLM3Error(f"{args.folder}: its dtype is {settings.torch_dtype}, not float32: compile it in float32")
    import torch

    from smollm3_neuron.check.streamed_reference import StreamedModel
    from smollm3_neuron.check.validation import TEXT
    from smollm3_neuron.generate.generation import generate

    tokens = artifact.tokenizer()(TEXT)["input_ids"][: min(PUBLISHED_TOKENS, settings.seq_len)]
    # every position has its logits where the text is fed token by token; the last one's following token is any
    (forced,) = generate(artifact.load(), [tokens[:1]], len(tokens), forced=[[*tokens[1:], 0]], keep_logits=True)
    reference = StreamedModel(common.reference_folder(None, artifact), torch.float32, **artifact.alterations)
    (theirs,) = reference.logits([tokens], [len(tokens)])
    error = (torch.stack(forced.logits).double() - theirs.double()).abs()
    found = {"tokens": len(tokens), "maximum": error.max().item(), "mean": error.mean().item()}
    for name, published in PUBLISHED_ERRORS.items():
        if not found[name] <= published:
            raise SmolLM3Error(f"the {name} error of the logits is {found[name]:.2g}, {published:.2g} is allowed")
    return found


def ask_vllm(args: argparse.Namespace) -> dict:
    """Starts a server from the artifact and has it answer a prompt; never run on a device by this project."""
    place = choose_place(args.device)
    missing = [name for name in ("vllm", "vllm_neuron") if importlib.util.find_spec(name) is None]
    if place == "cpu" or missing:
        why = "vllm-neuron needs a device" if place == "cpu" else f"{', '.join(missing)} not installed"
        return {"ran": False, "why": why}
    artifact = open_artifact(args.folder, place)
    port = 8000 + os.getpid() % 1000
    command = f"exec env {serve_command(artifact)} --port {port}"
    return {"ran": True, **ask_server(command, port, artifact.manifest["model"]["folder"])}


def ask_server(command: str, port: int, model: str, timeout: float = 1800) -> dict:
    """Runs the server until it has answered a prompt; SmolLM3Error where it ends, never gets healthy or is wrong."""
    server = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    began = time.monotonic()
    try:
        while not _is_healthy(port):
            if server.poll() is not None:
                raise SmolLM3Error(f"the server ended with {server.returncode}: its output is above")
            if time.monotonic() - began > timeout:
                raise SmolLM3Error(f"the server was not healthy after {timeout:.0f} s: its output is above")
            time.sleep(1)
        seconds = time.monotonic() - began
        asked = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    if ANSWER not in text:
        raise SmolLM3Error(f"the server answers {PROMPT!r} with {text!r}, {ANSWER} is not in it")
    return {"answer": text, "seconds_to_health": round(seconds, 1)}


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def sizes(folder: Path) -> list[int]:
    """Intermediate sizes worth a try for a checkpoint: the next multiples of 1024 and 4096 that TP divides."""
    manifest = read_json(folder / "artifact.json", "compile again")
    own = read_json(folder / "neuron_config.json", "compile again", any_number=True)["intermediate_size"]
    found = {-(-own // step) * step for step in (1024, 4096)} - {own}
    return sorted(size for size in found if size % manifest["settings"]["tp_degree"] == 0)


def results(file: Path) -> dict:
    """What another step or command wrote, in which a margin may be infinite."""
    return read_json(file, "run scripts/accept.sh again", any_number=True)


def measured(folder: Path, name: str) -> dict | None:
    """The row of the process whose steps were fastest, of benchmarks NAME-1.json to NAME-3.json; None: not measured."""
    files = [folder / f"{name}-{number}.json" for number in (1, 2, 3)]
    pages = [results(file)["rows"] for file in files if file.is_file()]
    rows = [row for page in pages for row in page if row["engine"] == "artifact"]
    return min(rows, key=lambda row: row["percentiles"]["p50"]) if rows else None


def fastest(folder: Path) -> str:
    """Which of the artifacts with and without padding took least per token."""
    names = ["benchmark", *sorted({file.name[:-7] for file in folder.glob("padded-*-1.json")})]
    times = {name: measured(folder, name)["percentiles"]["p50"] for name in names}
    lines = [
        f"{name.replace('benchmark', 'unpadded'):<16}{1000 * time:8.2f} ms a token" for name, time in times.items()
    ]
    best = min(times, key=times.get)
    return "\n".join([*lines, f"fastest: {best.replace('benchmark', 'unpadded')}"])


def collect(folder: Path) -> list[str]:
    """Copies what the runtime and the compiler said, since `folder` was made, into its `logs`."""
    since, logs = (folder / "asked").stat().st_mtime, folder / "logs"
    logs.mkdir(exist_ok=True)
    found = [file for file in Path("/tmp").glob("neuron_mem_table_*") if file.stat().st_mtime >= since]
    copies = {file: logs / file.name for file in found if file.is_file()}
    compiler = folder / "compiler"
    for file in compiler.rglob("log-neuron-cc.txt"):
        copies[file] = logs / "-".join(file.relative_to(compiler).parts)
    for file, copy in copies.items():
        shutil.copyfile(file, copy)
    return sorted(copy.name for copy in copies.values())


def report(folder: Path) -> dict:
    """What may be shared: figures and versions, no name of a host, a user or a folder."""
    environment, validated, served = (results(folder / f"{name}.json") for name in ("environment", "validate", "vllm"))
    names = ["benchmark", *sorted({file.name[:-7] for file in folder.glob("padded-*-1.json")})]
    rows = {name: measured(folder, name) for name in names}
    float32 = folder / "float32.json"
    kept = ("place", "instance", "cpus", "available_memory", "kernel", "python", "versions")
    kept += ("neuronx-cc --version", "modinfo -F version neuron")
    return {
        "environment": {name: environment[name] for name in kept if name in environment},
        "settings": validated["settings"],
        "verdict": validated["verdict"],
        "float32": results(float32) if float32.is_file() else None,
        "prompts": [
            {"verdict": case["verdict"], "token_match": case["token_match"]}
            for case in validated["cases"]
            if case["kind"] == "prompt"
        ],
        "measured": {
            name: {
                key: row[key]
                for key in ("first_token", "percentiles", "tokens_per_second", "memory", "load", "compile")
            }
            for name, row in rows.items()
        },
        "vllm": {name: served[name] for name in ("ran", "why", "seconds_to_health") if name in served},
    }


def compatibility_row(folder: Path) -> str:
    """The row for docs/evidence.md."""
    environment, validation, vllm = (results(folder / f"{step}.json") for step in ("environment", "validate", "vllm"))
    place, versions = environment["place"], environment["versions"]
    cpu = f"a CPU, {environment['cpus']} cores"
    machine = {"neuron": environment["instance"], "emulated": f"an emulated Neuron device on {cpu}", "cpu": cpu}
    prompts = [case for case in validation["cases"] if case["kind"] == "prompt"]
    speed = measured(folder, "benchmark")
    first = results(folder / "benchmark-1.json")["rows"]
    (beside,) = (row for row in first if row["engine"] == "artifact")
    cells = (
        machine[place],
        "none: nxd_cpu" if place == "cpu" else versions["neuronx-distributed-inference"],
        versions["neuronx-cc"] or "none",
        validation["model"],
        validation["settings"]["tp_degree"],
        validation["settings"]["torch_dtype"],
        validation["verdict"],
        f"{sum(case['token_match'] == 1 for case in prompts)} of {len(prompts)}",
        f"{speed['tokens_per_second']:.1f}, {beside['decode_ratio']:.2f}x",
        "passed" if vllm["ran"] else f"not run: {vllm['why']}",
    )
    return f"| {' | '.join(map(str, cells))} |"


OF_FOLDER = {
    "sizes": sizes,
    "fastest": fastest,
    "collect": collect,
    "line": compatibility_row,
    "report": report,
}


def main() -> None:
    args = parse_args()
    if args.step in OF_FOLDER:
        result = OF_FOLDER[args.step](args.folder)
        if isinstance(result, list):
            result = "\n".join(map(str, result))
        print(result if isinstance(result, str) else json.dumps(result, indent=1))
        return
    result = {"environment": environment, "vllm": ask_vllm, "float32": float32_errors}[args.step](args)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
    sys.stdout.flush()
