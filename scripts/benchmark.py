"""Speed and memory of artifacts beside transformers: python scripts/benchmark.py ARTIFACT [ARTIFACT ...]

Each artifact runs at its own batch size and TP degree, and beside it transformers' `generate` with the same weights,
dtype, threads and prompts, eager with its dynamic cache and with a static one. Every model is a process of its own; the
processes take turns, so that what else the machine does meets all of them. The ratios are of the least times, to which
nothing else added: on a shared machine only they say something.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from html import escape
from pathlib import Path

import common
import svg

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import choose_place
from smollm3_neuron.machine.roofline import FLOPS, HBM_BANDWIDTH, Estimate
from smollm3_neuron.model.config import read_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

SHAPES = {
    "small": dict(
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, no_rope_layers=None, eos_token_id=0, bos_token_id=0, pad_token_id=0,
    ),
    "3b": {},
}  # fmt: skip
TRANSFORMERS = {"transformers": None, "transformers, static cache": "static"}  # generate's cache_implementation


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="*", metavar="ARTIFACT")
    parser.add_argument(
        "--shape", choices=SHAPES, help="make and compile a model of this shape with random weights instead"
    )
    parser.add_argument("--dtype", default=Settings.torch_dtype, help="of --shape (default: %(default)s)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="of --shape (default: 1)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], help="of --shape (default: 1)")
    parser.add_argument(
        "--prompt-lengths", type=int, nargs="+", default=[128], metavar="N", help="tokens (default: 128)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one that is not (default: %(default)s)")
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
    parser.add_argument(
        "--threads", type=int, default=threads, help="of the host, for each model (default: %(default)s)"
    )
    parser.add_argument("--without-transformers", action="store_true", help="the artifacts alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured, in seconds and bytes")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.html", help="a page with the table and plots over the prompt length"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what one process runs, as JSON
    common.add_device(parser)
    return parser.parse_args()


# ---- the worker: loads one model, then answers each line (a batch of prompts) with the times of its tokens ----


def anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def work(job: dict) -> None:
    import torch

    torch.set_num_threads(job["threads"])
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    run = artifact_runner if job["engine"] == "artifact" else transformers_runner
    import transformers.models.smollm3.modeling_smollm3  # imports are not loading

    transformers.utils.logging.disable_progress_bar()

    before, began = anonymous_memory(), time.perf_counter()
    answer = run(job)
    load = time.perf_counter() - began
    print(json.dumps({"load": load}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began, stamps = time.perf_counter(), []
        with torch.no_grad():
            answer(order["prompts"], order["new_tokens"], lambda: stamps.append(time.perf_counter()))
        found = {"first": stamps[0] - began, "gaps": [b - a for a, b in zip(stamps, stamps[1:])]}
        print(json.dumps({**found, "memory": anonymous_memory() - before}), flush=True)


def artifact_runner(job: dict):
    choose_place(job["place"])
    from smollm3_neuron.generate.generation import generate

    model = open_artifact(Path(job["artifact"]), job["place"]).load()

    def answer(prompts, new_tokens, stamp):
        generate(model, prompts, new_tokens, on_token=lambda row, token: stamp() if row == 0 else None)

    return answer


def transformers_runner(job: dict):
    import torch
    from transformers.generation.streamers import BaseStreamer

    from smollm3_neuron.check.altered_reference import load_altered_reference

    model = load_altered_reference(job["checkpoint"], getattr(torch, job["dtype"]), job["adapter"])

    class Stamps(BaseStreamer):
        def __init__(self, stamp):
            self.stamp, self.is_prompt = stamp, True

        def put(self, value):
            if not self.is_prompt:
                self.stamp()
            self.is_prompt = False

        def end(self):
            pass

    def answer(prompts, new_tokens, stamp):
        input_ids = torch.tensor(prompts)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=job["cache"],
            streamer=Stamps(stamp),
        )

    return answer


class Worker:
    def __init__(self, name: str, job: dict):
        self.name = name
        command = [sys.executable, __file__, "--worker", json.dumps(job)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.load = self._answer()["load"]

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> dict:
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):  # a library may print, too
                return json.loads(line)
        raise SmolLM3Error(f"{self.name}: its process ended with code {self.process.wait()}; what it said is above")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# ---- what is measured ----


@dataclass
class Row:
    """One engine at one batch size and prompt length; times in seconds, memory in bytes."""

    artifact: str
    engine: str
    tp_degree: int
    batch_size: int
    prompt_length: int
    first_token: float  # median
    least: tuple[float, float]  # to the first token, and between two
    percentiles: dict[str, float]  # of the time per token after the first
    tokens_per_second: float  # of the whole batch, at the median
    memory: int
    load: float
    compile: float | None = None
    mfu_prefill: float | None = None
    mfu: float | None = None
    mbu: float | None = None
    first_token_ratio: float | None = None  # transformers' time over this one's: above 1 is faster
    decode_ratio: float | None = None


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def ceilings(place: str, dtype: str, threads: int) -> tuple[float, float]:
    """Bytes and operations per second at best: of one NeuronCore as published; of this CPU as measured now, all threads."""
    if place == "neuron":
        return HBM_BANDWIDTH, FLOPS
    import torch

    torch.set_num_threads(threads)
    memory, size = torch.ones(1 << 26), 1024
    square = torch.ones(size, size, dtype=getattr(torch, dtype))

    def best(work) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    return memory.nbytes / best(memory.sum), 2 * size**3 / best(lambda: square @ square)


def measure(artifact, place: str, args: argparse.Namespace, best: tuple[float, float]) -> list[Row]:
    """One artifact and transformers beside it."""
    settings, checkpoint = artifact.settings, artifact.manifest["model"]["folder"]
    config = read_config(checkpoint)
    for length in args.prompt_lengths:
        if not 1 <= length <= settings.max_context_length or length + args.new_tokens > settings.seq_len:
            raise SmolLM3Error(
                f"{artifact.path}: --prompt-lengths {length} and --new-tokens {args.new_tokens} do not fit into its context of "
                f"{settings.max_context_length} and sequence of {settings.seq_len}"
            )
    job = {"place": place, "threads": args.threads, "dtype": settings.torch_dtype}
    job |= {"checkpoint": checkpoint, "adapter": artifact.adapter}
    workers = [Worker("artifact", {**job, "engine": "artifact", "artifact": str(artifact.path)})]
    if not args.without_transformers:
        workers += [Worker(name, {**job, "engine": name, "cache": cache}) for name, cache in TRANSFORMERS.items()]
    rows = []
    for length in args.prompt_lengths:
        prompts = [
            [(7 + 31 * i + 17 * row) % (config.vocab_size - 1) + 1 for i in range(length)]
            for row in range(settings.batch_size)
        ]
        found = {worker: [] for worker in workers}
        for turn in range(args.rounds + 1):
            for worker in workers:
                measured = worker(prompts, args.new_tokens)
                if turn:
                    found[worker].append(measured)
        of_length = [row_of(artifact, worker, length, found[worker]) for worker in workers]
        sizes = settings.tp_degree, settings.seq_len, settings.batch_size, settings.torch_dtype, length
        estimate = Estimate(config, *sizes)
        share(of_length[0], estimate, best, place)
        for row in of_length[1:]:
            if row.engine == "transformers":
                for mine in of_length:
                    mine.first_token_ratio, mine.decode_ratio = (a / b for a, b in zip(row.least, mine.least))
        rows += of_length
    for worker in workers:
        worker.close()
    return rows


def row_of(artifact, worker: Worker, length: int, found: list[dict]) -> Row:
    gaps = [gap for one in found for gap in one["gaps"]]
    percentiles = {f"p{share}": percentile(gaps, share / 100) for share in (50, 90, 99)}
    is_artifact, settings = worker.name == "artifact", artifact.settings
    firsts = [one["first"] for one in found]
    return Row(
        artifact.path.name,
        worker.name,
        settings.tp_degree if is_artifact else 1,
        settings.batch_size,
        length,
        statistics.median(firsts),
        (min(firsts), min(gaps)),
        percentiles,
        settings.batch_size / percentiles["p50"],
        max(one["memory"] for one in found),
        worker.load,
        artifact.manifest["seconds"]["compile"] if is_artifact else None,
    )


def share(row: Row, estimate: Estimate, best: tuple[float, float], place: str) -> None:
    """Shares of the ceilings that are used; the CPU's are all ranks' together. Every step reads the caches whole."""
    ranks = 1 if place == "neuron" else estimate.tp_degree
    bandwidth, flops = best
    row.mfu_prefill = ranks * estimate.prefill_flops / row.first_token / flops
    row.mfu = ranks * estimate.decode_flops / row.percentiles["p50"] / flops
    row.mbu = ranks * estimate.decode_bytes / row.percentiles["p50"] / bandwidth


def make_artifacts(args: argparse.Namespace, place: str, scratch: Path) -> list:
    """A random checkpoint of --shape, compiled for each TP degree and batch size."""
    folder = scratch / args.shape
    folder.mkdir()
    common.make_checkpoint(folder, {**SMOLLM3_3B, **SHAPES[args.shape]})
    made = []
    for tp_degree in args.tp:
        for batch_size in args.batch_size:
            print(f"compiling {args.shape} for TP {tp_degree}, batch {batch_size} ...", flush=True)
            settings = Settings(
                tp_degree, batch_size, max(args.prompt_lengths) + args.new_tokens, max(args.prompt_lengths), args.dtype
            )
            output = scratch / f"{args.shape}-tp{tp_degree}-batch{batch_size}"
            made.append(compile_artifact(folder, output, settings, place, name=args.shape))
    return made


HEAD = (
    "artifact", "engine", "TP", "batch", "prompt", "first token ms", "token ms p50/p90/p99", "tokens/s", "memory MB", "load s",
    "compile s", "MFU prefill", "MFU", "MBU", "first token", "decode",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    def shown(value, form):
        return "" if value is None else format(value, form)

    return [
        row.artifact,
        row.engine,
        str(row.tp_degree),
        str(row.batch_size),
        str(row.prompt_length),
        f"{row.first_token * 1e3:.1f}",
        "/".join(f"{value * 1e3:.2f}" for value in row.percentiles.values()),
        f"{row.tokens_per_second:.1f}",
        f"{row.memory / 1e6:.0f}",
        f"{row.load:.2f}",
        shown(row.compile, ".1f"),
        shown(row.mfu_prefill, ".1%"),
        shown(row.mfu, ".1%"),
        shown(row.mbu, ".1%"),
        shown(row.first_token_ratio, ".2f"),
        shown(row.decode_ratio, ".2f"),
    ]


def table(rows: list[Row]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)])


def page(rows: list[Row], notes: list[str]) -> str:
    def over_lengths(title: str, value, y_label: str) -> str:
        series: dict[str, list] = {}
        for row in rows:
            series.setdefault(f"{row.artifact}: {row.engine}", []).append((row.prompt_length, value(row)))
        highest, lengths = max(value(row) for row in rows), sorted({row.prompt_length for row in rows})
        ticks = [(highest * part / 4, f"{highest * part / 4:.3g}") for part in range(5)]
        x_ticks = [(length, str(length)) for length in lengths]
        return svg.lines(title, series, ticks=ticks, x_ticks=x_ticks, x_label="prompt length", y_label=y_label)

    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(row))}</tr>" for row in rows)
    plots = over_lengths("Tokens per second", lambda row: row.tokens_per_second, "tokens/s")
    plots += over_lengths("Time to first token", lambda row: row.first_token * 1e3, "ms")
    facts = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return svg.page("benchmark.py", f"{facts}{plots}<table>{svg.header(HEAD)}{body}</table>")


def main() -> None:
    args = parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    common.check_outputs(args.json, args.plot)
    if bool(args.artifacts) == bool(args.shape):
        raise SmolLM3Error("pass artifacts, or --shape, and not both")
    for name, least in (("new_tokens", 2), ("rounds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise SmolLM3Error(f"{name} is {getattr(args, name)}, allowed is a whole number of at least {least}")
    place = choose_place(args.device)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="smollm3-benchmark-") as scratch:
        if args.shape:
            artifacts = make_artifacts(args, place, Path(scratch))
        else:
            artifacts = [open_artifact(path, place) for path in args.artifacts]
        rows, reached = [], {}
        for artifact in artifacts:
            dtype = artifact.settings.torch_dtype
            reached[dtype] = reached.get(dtype) or ceilings(place, dtype, args.threads)
            rows += measure(artifact, place, args, reached[dtype])
    source = "a NeuronCore's, as published" if place == "neuron" else "this CPU's, measured in this run"
    notes = [
        f"{place}, {args.threads} threads, {args.new_tokens} new tokens, {args.rounds} rounds; the last two columns are "
        "transformers' least time over the row's own, above 1 is faster; memory is what no file backs, over what it was before "
        "loading",
        *(
            f"{artifact.path.name}: its exported graphs run as they are: {artifact.exported_because}"
            for artifact in artifacts
            if artifact.exported_because
        ),
        *(
            f"ceilings of MFU and MBU for {dtype}: {flops / 1e12:.3f} TFLOPS and {bandwidth / 1e9:.1f} GB/s, {source}"
            for dtype, (bandwidth, flops) in reached.items()
        ),
    ]
    print("\n".join([table(rows), "", *notes]))
    if args.json:
        args.json.write_text(json.dumps({"notes": notes, "rows": [vars(row) for row in rows]}, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(page(rows, notes))


if __name__ == "__main__":
    common.run(main)
