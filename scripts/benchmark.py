"""Speed and memory of artifacts beside transformers.

    python scripts/benchmark.py artifacts/tiny-tp2 --prompt-lengths 32 --new-tokens 16

Each artifact runs at its own batch size and TP degree, and beside it transformers' `generate` with the same weights,
dtype, threads and prompts, eager with its dynamic cache and with a static one. Every model is a process of its own; the
processes take turns, so that what else the machine does meets all of them. The ratios are of the least times, to which
nothing else added: on a shared machine only they say something.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import common
import svg
from engines import Engine, prompts_of

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.compiled_graphs import note_on_products
from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.speculation import check_prompt_lookup, last_place
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
OWN, LOOKUP, DRAFT = "artifact", "artifact, prompt lookup", "artifact, draft"
OURS = (OWN, LOOKUP, DRAFT)
# generate's cache_implementation, and whether torch.compile compiles the model's forward
TRANSFORMERS = {"transformers": (None, False), "transformers, static cache": ("static", False)}
COMPILED = {"transformers, torch.compile": ("static", True)}


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "[ARTIFACT ...]")
    parser.add_argument("artifacts", type=Path, nargs="*", metavar="ARTIFACT", help="folders that compile.py made")
    random = parser.add_argument_group("instead of artifacts, random weights")
    random.add_argument("--shape", choices=SHAPES, help="make and compile a model of this shape")
    random.add_argument("--dtype", default=Settings.torch_dtype, help="default: %(default)s")
    random.add_argument("--tp", type=int, nargs="+", default=[1], metavar="N", help="TP degrees (default: 1)")
    random.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N", help="default: 1")
    run = parser.add_argument_group("what is run")
    common.add_device(run)
    common.add_verify(run)
    run.add_argument("--prompt-lengths", type=int, nargs="+", default=[128], metavar="N", help="tokens (default: 128)")
    run.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    run.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="measured, after one that is not (default: %(default)s)"
    )
    run.add_argument(
        "--prompt-lookup",
        type=int,
        metavar="K",
        help="the artifacts once more with generate.py's flag, on prompts that repeat nothing and on such that copy",
    )
    run.add_argument(
        "--threads",
        type=int,
        default=threads_of_environment(),
        metavar="N",
        help="of the host, for each model (default: %(default)s)",
    )
    compared = run.add_mutually_exclusive_group()
    compared.add_argument("--without-transformers", action="store_true", help="the artifacts alone")
    compared.add_argument(
        "--compare",
        choices=["compile"],
        help="one more transformers, with a static cache and torch.compile",
    )
    outputs = parser.add_argument_group("what is written")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured, in seconds and bytes")
    outputs.add_argument(
        "--plot", type=Path, metavar="FILE.html", help="a page with the table and plots over the prompt length"
    )
    return parser.parse_args()


def threads_of_environment() -> int:
    """The first number of OMP_NUM_THREADS, which may be a list with one for each level; without one, the cores."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if re.fullmatch("0*[1-9][0-9]{0,3}", first) else os.cpu_count()


def check_args(args: argparse.Namespace) -> None:
    if bool(args.artifacts) == bool(args.shape):
        raise SmolLM3Error("pass artifacts, or --shape, and not both")
    for name, least in (("new_tokens", 2), ("rounds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise SmolLM3Error(f"{name} is {getattr(args, name)}, allowed is a whole number of at least {least}")
    if args.shape and args.prompt_lookup is not None:
        raise SmolLM3Error("--prompt-lookup is for artifacts, random weights copy nothing: leave --shape out")


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
    prompts: str = "free"  # or "copying"
    accepted: float | None = None  # the share of candidates that were right
    lookup_ratio: float | None = None  # the artifact's mean time per token without prompt lookup over this one's
    mean: float = 0.0  # between two tokens, of the fastest round
    first_token_ratio: float | None = None  # transformers' time over this one's: above 1 is faster
    decode_ratio: float | None = None


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def ceilings(place: str, dtype: str, threads: int) -> tuple[float, float]:
    """Bytes and operations per second at best.

    On a device: of one NeuronCore, as published. On the CPU: of all its threads, as measured now.
    """
    if place == "neuron":
        return HBM_BANDWIDTH, FLOPS
    import torch

    torch.set_num_threads(threads)
    memory, size = torch.ones(1 << 26), 1024
    square = torch.ones(size, size, dtype=getattr(torch, dtype))

    def least_seconds(work) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    return memory.nbytes / least_seconds(memory.sum), 2 * size**3 / least_seconds(lambda: square @ square)


def measure(artifact: Artifact, place: str, args: argparse.Namespace, ceiling: tuple[float, float]) -> list[Row]:
    """One artifact and transformers beside it; `ceiling` are the bytes and operations per second at best."""
    settings, checkpoint = artifact.settings, artifact.manifest["model"]["folder"]
    config = read_config(checkpoint)
    for length in args.prompt_lengths:
        if not 1 <= length <= settings.max_context_length or length + args.new_tokens > last_place(settings):
            raise SmolLM3Error(
                f"{artifact.path}: --prompt-lengths {length} and --new-tokens {args.new_tokens} do not fit into its "
                f"context of {settings.max_context_length} and sequence of {last_place(settings)}"
            )
    if args.prompt_lookup is not None:
        check_prompt_lookup(args.prompt_lookup, settings)
    engines = start_engines(artifact, place, args)
    rows = []
    kinds = ("free", "copying") if args.prompt_lookup is not None else ("free",)
    for length, kind in itertools.product(args.prompt_lengths, kinds):
        prompts = prompts_of(kind, length, settings.batch_size, config.vocab_size)
        compared = [engine for engine in engines if kind == "free" or engine.name in OURS]
        rounds = take_turns(compared, prompts, args.new_tokens, args.rounds)
        rows_of_length = [make_row(artifact, engine, length, rounds[engine], kind) for engine in compared]
        sizes = settings.tp_degree, settings.seq_len, settings.batch_size, settings.torch_dtype, length
        estimate = Estimate(config.padded(settings), *sizes)
        add_utilization(rows_of_length[0], estimate, ceiling, place)
        add_ratios(rows_of_length)
        rows += rows_of_length
    for engine in engines:
        engine.close()
    return rows


def start_engines(artifact: Artifact, place: str, args: argparse.Namespace) -> list[Engine]:
    job = {
        "place": place,
        "threads": args.threads,
        "dtype": artifact.settings.torch_dtype,
        "checkpoint": artifact.manifest["model"]["folder"],
        "adapter": artifact.adapter,
    }
    of_artifact = {**job, "artifact": str(artifact.path)}
    name = DRAFT if artifact.settings.enable_fused_speculation else OWN
    engines = [Engine(name, {**of_artifact, "prompt_lookup": None})]
    if args.prompt_lookup is not None:
        engines.append(Engine(LOOKUP, {**of_artifact, "prompt_lookup": args.prompt_lookup}))
    if not args.without_transformers:
        references = {**TRANSFORMERS, **(COMPILED if args.compare == "compile" else {})}
        engines += [Engine(name, {**job, "cache": how[0], "compile": how[1]}) for name, how in references.items()]
    return engines


def take_turns(engines: list[Engine], prompts: list, new_tokens: int, rounds: int) -> dict[Engine, list[dict]]:
    """What each engine measured in each round but the first, which only warms it up."""
    measured: dict[Engine, list[dict]] = {engine: [] for engine in engines}
    for turn in range(rounds + 1):
        for engine in engines:
            times = engine.measure(prompts, new_tokens)
            if turn:
                measured[engine].append(times)
    return measured


def make_row(artifact: Artifact, engine: Engine, length: int, rounds: list[dict], kind: str) -> Row:
    gaps = [gap for times in rounds for gap in times["gaps"]]
    firsts = [times["first"] for times in rounds]
    percentiles = {f"p{share}": percentile(gaps, share / 100) for share in (50, 90, 99)}
    is_artifact, settings = engine.name in OURS, artifact.settings
    offered = sum(times.get("offered", 0) for times in rounds)
    mean = min(statistics.fmean(times["gaps"]) for times in rounds)
    return Row(
        artifact=artifact.path.name,
        engine=engine.name,
        tp_degree=settings.tp_degree if is_artifact else 1,
        batch_size=settings.batch_size,
        prompt_length=length,
        first_token=statistics.median(firsts),
        least=(min(firsts), min(gaps)),
        percentiles=percentiles,
        # several tokens of a step come at once
        tokens_per_second=settings.batch_size / (mean if engine.name in (LOOKUP, DRAFT) else percentiles["p50"]),
        prompts=kind,
        accepted=sum(times["accepted"] for times in rounds) / offered if offered else None,
        mean=mean,
        memory=max(times["memory"] for times in rounds),
        load=engine.load,
        compile=artifact.manifest["seconds"]["compile"] if is_artifact else None,
    )


def add_utilization(row: Row, estimate: Estimate, ceiling: tuple[float, float], place: str) -> None:
    """Shares of the ceilings that are used; the CPU's are all ranks' together. Every step reads the caches whole.

    None with a draft, whose own steps are in each.
    """
    if row.engine == DRAFT:
        return
    ranks = 1 if place == "neuron" else estimate.tp_degree
    bandwidth, flops = ceiling
    row.mfu_prefill = ranks * estimate.prefill_flops / row.first_token / flops
    row.mfu = ranks * estimate.decode_flops / row.percentiles["p50"] / flops
    row.mbu = ranks * estimate.decode_bytes / row.percentiles["p50"] / bandwidth


def add_ratios(rows: list[Row]) -> None:
    """How many times as fast as transformers with its dynamic cache each row of one prompt length is."""
    for row in rows:
        if row.engine == LOOKUP:
            row.lookup_ratio = rows[0].mean / row.mean
    for baseline in (row for row in rows if row.engine == "transformers"):
        for row in (row for row in rows if row.engine not in (LOOKUP, DRAFT)):
            row.first_token_ratio, row.decode_ratio = (theirs / own for theirs, own in zip(baseline.least, row.least))


def make_artifacts(args: argparse.Namespace, place: str, scratch: Path) -> list[Artifact]:
    """A random checkpoint of --shape, compiled for each TP degree and batch size."""
    folder = scratch / args.shape
    folder.mkdir()
    common.make_checkpoint(folder, {**SMOLLM3_3B, **SHAPES[args.shape]})
    longest, artifacts = max(args.prompt_lengths), []
    for tp_degree in args.tp:
        for batch_size in args.batch_size:
            print(f"compiling {args.shape} for TP {tp_degree}, batch {batch_size} ...", flush=True)
            settings = Settings(tp_degree, batch_size, longest + args.new_tokens, longest, args.dtype)
            output = scratch / f"{args.shape}-tp{tp_degree}-batch{batch_size}"
            artifacts.append(compile_artifact(folder, output, settings, place, name=args.shape))
    return artifacts


def cells(row: Row) -> dict[str, str]:
    """Column -> text, of one row of the table."""

    def known(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return {
        "artifact": row.artifact,
        "engine": row.engine,
        "TP": str(row.tp_degree),
        "batch": str(row.batch_size),
        "prompt": f"{row.prompt_length} {row.prompts}" if row.prompts == "copying" else str(row.prompt_length),
        "first token ms": f"{row.first_token * 1e3:.1f}",
        "token ms p50/p90/p99": "/".join(f"{seconds * 1e3:.2f}" for seconds in row.percentiles.values()),
        "tokens/s": f"{row.tokens_per_second:.1f}",
        "memory MB": f"{row.memory / 1e6:.0f}",
        "load s": f"{row.load:.2f}",
        "compile s": known(row.compile, ".1f"),
        "MFU prefill": known(row.mfu_prefill, ".1%"),
        "MFU": known(row.mfu, ".1%"),
        "MBU": known(row.mbu, ".1%"),
        "first token": known(row.first_token_ratio, ".2f"),
        "decode": known(row.decode_ratio, ".2f"),
        "accepted": known(row.accepted, ".0%"),
        "lookup": known(row.lookup_ratio, ".2f"),
    }


def table(rows: list[Row]) -> str:
    filled = [cells(row) for row in rows]
    columns = [name for name in filled[0] if any(row[name] for row in filled)]
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in filled)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot_over_lengths(rows: list[Row], title: str, measure_of, y_label: str) -> str:
    series: dict[str, list] = {}
    for row in rows:
        series.setdefault(f"{row.artifact}: {row.engine}, {row.prompts}", []).append(
            (row.prompt_length, measure_of(row))
        )
    highest, lengths = max(map(measure_of, rows)), sorted({row.prompt_length for row in rows})
    ticks = [(highest * part / 4, f"{highest * part / 4:.3g}") for part in range(5)]
    x_ticks = [(length, str(length)) for length in lengths]
    return svg.lines(title, series, ticks=ticks, x_ticks=x_ticks, x_label="prompt length", y_label=y_label)


def page(rows: list[Row], notes: list[str]) -> str:
    plots = plot_over_lengths(rows, "Tokens per second", lambda row: row.tokens_per_second, "tokens/s")
    plots += plot_over_lengths(rows, "Time to first token", lambda row: row.first_token * 1e3, "ms")
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(row).values())}</tr>" for row in rows)
    return svg.page("benchmark.py", f"{paragraphs}{plots}<table>{svg.header(list(cells(rows[0])))}{body}</table>")


def make_notes(args: argparse.Namespace, place: str, artifacts: list[Artifact], reached: dict) -> list[str]:
    """What the table's reader must know; `reached` maps a dtype to the ceilings of MBU and MFU."""
    source = "a NeuronCore's, as published" if place == "neuron" else "this CPU's, measured in this run"
    notes = [
        f"{place}, {args.threads} threads, {args.new_tokens} new tokens, {args.rounds} rounds; first token and decode "
        "are transformers' least time over the row's own, above 1 is faster; memory is what no file backs, over what "
        "it was before loading; accepted is the share of candidates that were right, lookup the artifact's mean time "
        "per token without prompt lookup over that with it, each of its fastest round"
    ]
    if place == "cpu":
        for dtype in reached:
            note = note_on_products(dtype)
            notes += [note] if note else []
    if place == "emulated":
        notes.append("the times are an emulation's on this CPU, of no device")
    for artifact in artifacts:
        if artifact.exported_because:
            notes.append(f"{artifact.path.name}: its exported graphs run as they are: {artifact.exported_because}")
    for dtype, (bandwidth, flops) in reached.items():
        notes.append(
            f"ceilings of MFU and MBU for {dtype}: {flops / 1e12:.3f} TFLOPS and {bandwidth / 1e9:.1f} GB/s, {source}"
        )
    return notes


def main() -> None:
    args = parse_args()
    common.check_outputs(args.json, args.plot)
    check_args(args)
    place = choose_place(args.device)
    common.quiet()
    with tempfile.TemporaryDirectory(prefix="smollm3-benchmark-") as scratch:
        if args.shape:
            artifacts = make_artifacts(args, place, Path(scratch))
        else:
            artifacts = [open_artifact(path, place, verify=args.verify) for path in args.artifacts]
        rows, reached = [], {}
        for artifact in artifacts:
            dtype = artifact.settings.torch_dtype
            if dtype not in reached:
                reached[dtype] = ceilings(place, dtype, args.threads)
            rows += measure(artifact, place, args, reached[dtype])
    notes = make_notes(args, place, artifacts, reached)
    print("\n".join([table(rows), "", *notes]))
    if args.json:
        args.json.write_text(json.dumps({"notes": notes, "rows": [vars(row) for row in rows]}, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(page(rows, notes))


if __name__ == "__main__":
    common.run(main)
