"""What fits where, before anything is rented.

    python scripts/plan.py --instance trn1.2xlarge

Bytes per NeuronCore, host memory, legal TP degrees, the largest batch and context, and two estimates of speed: a
roofline, which is an upper bound from the machines' published figures, and what to expect, from what others measured.
Nothing of it was measured by this project; "-" stands where no figure was published.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import common

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.expectations import FIGURES, PUBLISHED_PORT, Expectation
from smollm3_neuron.machine.locate import local_model
from smollm3_neuron.machine.roofline import (
    GB,
    HBM_PER_CORE,
    INSTANCES,
    RESERVED_PER_CORE,
    Estimate,
    check_tp_degree,
)
from smollm3_neuron.model.config import read_config, resolve_config
from smollm3_neuron.model.dtypes import MODEL_DTYPES
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

SHARDING_MEMORY = 1 * GB  # of the streaming sharder, at most; tools/bench_sharding.py measures it


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__)
    inputs = parser.add_argument_group("the model and the machine")
    inputs.add_argument("--model", help="checkpoint folder or 'tiny' (default: the shape of SmolLM3-3B)")
    inputs.add_argument(
        "--instance", default="trn1.2xlarge", help=f"one of {', '.join(INSTANCES)} (default: %(default)s)"
    )
    shape = parser.add_argument_group("degree, lengths and dtype")
    shape.add_argument("--tp", type=int, metavar="N", help="one TP degree (default: each that the instance takes)")
    shape.add_argument("--seq-len", type=int, metavar="N", default=Settings.seq_len, help="default: %(default)s")
    shape.add_argument("--batch-size", type=int, metavar="N", default=Settings.batch_size, help="default: %(default)s")
    shape.add_argument("--dtype", default=Settings.torch_dtype, help="default: %(default)s")
    shape.add_argument("--apply-seq-ids-mask", action="store_true", help="as compile.py's")
    shape.add_argument("--pad-intermediate", type=int, metavar="N", help="as compile.py's")
    outputs = parser.add_argument_group("what is written")
    outputs.add_argument("--json", action="store_true", help="the same as JSON, in bytes and seconds")
    outputs.add_argument("--plot", type=Path, metavar="FILE.png", help="draw which context fits with which batch")
    return parser.parse_args()


def as_dict(estimate: Estimate, instance: str) -> dict:
    plan = estimate.plan
    expected = Expectation(estimate, instance)
    return {
        "tp_degree": estimate.tp_degree,
        "strategy": plan.strategy,
        "attention_heads_per_core": plan.attention_heads_per_rank,
        "key_value_heads_per_core": plan.key_value_heads_per_rank,
        "kv_memory_factor": plan.key_value_heads_per_rank * plan.tp_degree / plan.num_key_value_heads,
        "weights": estimate.weights,
        "untied_head": estimate.untied_head,
        "kv_cache": estimate.kv_cache,
        "logits": estimate.logits,
        "total": estimate.total,
        "scores_at_most": estimate.scores(estimate.context_length or estimate.seq_len),
        "fits": estimate.room >= 0,
        "largest_batch": estimate.largest_batch(estimate.seq_len),
        "largest_seq_len": estimate.largest_seq_len(estimate.batch_size),
        "decode_bytes": estimate.decode_bytes,
        "decode_flops": estimate.decode_flops,
        "prefill_bytes": estimate.prefill_bytes,
        "prefill_flops": estimate.prefill_flops,
        "prefill_seconds_at_least": estimate.prefill_seconds,
        "tokens_per_second_at_most": estimate.tokens_per_second,
        "prefill_seconds_expected": expected.prefill_seconds,
        "decode_seconds_expected": expected.decode_seconds,
        "tokens_per_second_expected": expected.tokens_per_second,
        "host_memory_to_shard": SHARDING_MEMORY,
        "host_memory_to_load": estimate.host_memory_to_load,
    }


LINES = (
    ("KV heads", lambda plan: f"{plan['strategy']}: {plan['key_value_heads_per_core']} per core"),
    ("query heads per core", lambda plan: str(plan["attention_heads_per_core"])),
    ("KV memory, times the checkpoint's heads", lambda plan: f"{plan['kv_memory_factor']:.2f}"),
    ("weights", lambda plan: gigabytes(plan["weights"])),
    ("  of these the untied head", lambda plan: gigabytes(plan["untied_head"])),
    ("KV cache", lambda plan: gigabytes(plan["kv_cache"])),
    ("logits", lambda plan: gigabytes(plan["logits"])),
    ("total", lambda plan: gigabytes(plan["total"]) + ("" if plan["fits"] else "  DOES NOT FIT")),
    ("scores of a prompt that long, at most", lambda plan: gigabytes(plan["scores_at_most"])),
    ("largest batch at this seq_len", lambda plan: str(plan["largest_batch"])),
    ("largest seq_len at this batch", lambda plan: str(plan["largest_seq_len"])),
    ("read per decode step", lambda plan: gigabytes(plan["decode_bytes"])),
    ("first token, at least", lambda plan: f"{plan['prefill_seconds_at_least'] * 1000:.1f} ms"),
    ("tokens per second, at most", lambda plan: f"{plan['tokens_per_second_at_most']:.0f}"),
    ("first token, expected", lambda plan: known(plan["prefill_seconds_expected"], 1000, ".1f", " ms")),
    ("one step, expected", lambda plan: known(plan["decode_seconds_expected"], 1000, ".1f", " ms")),
    ("tokens per second, expected", lambda plan: known(plan["tokens_per_second_expected"], 1, ".0f")),
    ("host memory to shard, at most", lambda plan: gigabytes(plan["host_memory_to_shard"])),
    ("host memory to load", lambda plan: gigabytes(plan["host_memory_to_load"])),
)


EXPECTED_FROM = f"""
The expected figures are reckoned from what others measured on trn1 and inf2: see docs/device_facts.md.
For comparison: {PUBLISHED_PORT.value} {PUBLISHED_PORT.what},
{PUBLISHED_PORT.source}."""


def known(value: float | None, unit: float, form: str, name: str = "") -> str:
    return "-" if value is None else f"{value * unit:{form}}{name}"


def gigabytes(count: int) -> str:
    return f"{count / GB:.3f} GB"


def plot(estimates: list[Estimate], path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SmolLM3Error("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    batches = [2 ** (step / 4) for step in range(33)]
    for estimate in estimates:
        contexts = [estimate.largest_seq_len(max(1, int(batch))) for batch in batches]
        axes.step(batches, contexts, where="post", label=f"TP {estimate.tp_degree} ({estimate.plan.strategy})")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch size",
        ylabel="seq_len that fits",
        title=f"What fits in {(HBM_PER_CORE - RESERVED_PER_CORE) / GB:.0f} GB per NeuronCore, {estimates[0].dtype}",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format=path.suffix[1:] or "png")  # left to itself it would write another file
    except (OSError, ValueError) as error:
        raise SmolLM3Error(f"{path}: cannot be written ({error}); pass a FILE.png") from None


def estimates_for(args: argparse.Namespace) -> list[Estimate]:
    """One estimate per TP degree; SmolLM3Error for an instance, degree, dtype or shape that is not allowed."""
    if args.instance not in INSTANCES:
        raise SmolLM3Error(f"instance is {args.instance!r}, known are {', '.join(INSTANCES)}")
    config = resolve_config(SMOLLM3_3B) if args.model is None else read_config(local_model(args.model)[0])
    if args.tp is not None:
        check_tp_degree(args.instance, args.tp)
    if args.dtype not in MODEL_DTYPES:
        raise SmolLM3Error(f"dtype is {args.dtype!r}, allowed is one of {', '.join(MODEL_DTYPES)}")
    estimates = []
    for tp_degree in (args.tp,) if args.tp is not None else INSTANCES[args.instance].tp_degrees:
        mask = args.apply_seq_ids_mask
        settings = Settings(
            tp_degree, args.batch_size, args.seq_len, None, args.dtype, padded_intermediate_size=args.pad_intermediate,
            is_continuous_batching=mask, apply_seq_ids_mask=mask,
        ).checked(config)  # fmt: skip
        sizes = settings.seq_len, settings.batch_size, settings.torch_dtype
        estimates.append(Estimate(config.padded(settings), tp_degree, *sizes, apply_seq_ids_mask=mask))
    return estimates


def print_plans(args: argparse.Namespace, plans: list[dict]) -> None:
    instance = INSTANCES[args.instance]
    print(
        f"{args.instance}: {instance.neuron_cores} NeuronCores of {HBM_PER_CORE / GB:.0f} GB, "
        f"{instance.host_memory} GiB of host memory; TP degrees {', '.join(map(str, instance.tp_degrees))}\n"
        f"seq_len {args.seq_len}, batch_size {args.batch_size}, {args.dtype}; "
        f"per core, {RESERVED_PER_CORE / GB:.0f} GB kept free\n"
    )
    print(f"{'':<42}" + "".join(f"{'TP ' + str(plan['tp_degree']):>24}" for plan in plans))
    for label, cell in LINES:
        print(f"{label:<42}" + "".join(f"{cell(plan):>24}" for plan in plans))
    print(EXPECTED_FROM)


def main() -> None:
    args = parse_args()
    common.check_outputs(args.plot)
    estimates = estimates_for(args)
    plans = [as_dict(estimate, args.instance) for estimate in estimates]
    if args.plot:
        plot(estimates, args.plot)
    if args.json:
        settings = {"seq_len": args.seq_len, "batch_size": args.batch_size, "torch_dtype": args.dtype}
        settings["padded_intermediate_size"] = args.pad_intermediate
        content = {"instance": args.instance, **asdict(INSTANCES[args.instance]), "settings": settings, "plans": plans}
        print(json.dumps({**content, "expected_from": [asdict(figure) for figure in FIGURES]}, indent=2))
    else:
        print_plans(args, plans)


if __name__ == "__main__":
    common.run(main)
