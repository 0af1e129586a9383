"""What fits where, before anything is rented: python scripts/plan.py --instance trn1.2xlarge

Bytes per NeuronCore, host memory, legal TP degrees, the largest batch and context, and a roofline: upper bounds from
the machines' published figures, nothing of it measured on a device.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import common

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
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
from smollm3_neuron.model.published import SMOLLM3_3B

SHARDING_MEMORY = 1 * GB  # of the streaming sharder, at most; tools/bench_sharding.py measures it


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the shape of SmolLM3-3B)")
    parser.add_argument(
        "--instance", default="trn1.2xlarge", help=f"one of {', '.join(INSTANCES)} (default: %(default)s)"
    )
    parser.add_argument("--tp", type=int, help="one TP degree (default: each that the instance takes)")
    parser.add_argument("--seq-len", type=int, default=Settings.seq_len, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size, help="default: %(default)s")
    parser.add_argument("--dtype", default=Settings.torch_dtype, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="the same as JSON, in bytes and seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw which context fits with which batch")
    return parser.parse_args()


def row(estimate: Estimate) -> dict:
    plan = estimate.plan
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
        "fits": estimate.room >= 0,
        "largest_batch": estimate.largest_batch(estimate.seq_len),
        "largest_seq_len": estimate.largest_seq_len(estimate.batch_size),
        "decode_bytes": estimate.decode_bytes,
        "decode_flops": estimate.decode_flops,
        "prefill_bytes": estimate.prefill_bytes,
        "prefill_flops": estimate.prefill_flops,
        "prefill_seconds_at_least": estimate.prefill_seconds,
        "tokens_per_second_at_most": estimate.tokens_per_second,
        "host_memory_to_shard": SHARDING_MEMORY,
        "host_memory_to_load": estimate.host_memory_to_load,
    }


LINES = (
    ("KV heads", lambda r: f"{r['strategy']}: {r['key_value_heads_per_core']} per core"),
    ("query heads per core", lambda r: str(r["attention_heads_per_core"])),
    ("KV memory, times the checkpoint's heads", lambda r: f"{r['kv_memory_factor']:.2f}"),
    ("weights", lambda r: gigabytes(r["weights"])),
    ("  of these the untied head", lambda r: gigabytes(r["untied_head"])),
    ("KV cache", lambda r: gigabytes(r["kv_cache"])),
    ("logits", lambda r: gigabytes(r["logits"])),
    ("total", lambda r: gigabytes(r["total"]) + ("" if r["fits"] else "  DOES NOT FIT")),
    ("largest batch at this seq_len", lambda r: str(r["largest_batch"])),
    ("largest seq_len at this batch", lambda r: str(r["largest_seq_len"])),
    ("read per decode step", lambda r: gigabytes(r["decode_bytes"])),
    ("first token, at least", lambda r: f"{r['prefill_seconds_at_least'] * 1000:.1f} ms"),
    ("tokens per second, at most", lambda r: f"{r['tokens_per_second_at_most']:.0f}"),
    ("host memory to shard, at most", lambda r: gigabytes(r["host_memory_to_shard"])),
    ("host memory to load", lambda r: gigabytes(r["host_memory_to_load"])),
)


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
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise SmolLM3Error(f"{path}: cannot be written ({error}); pass a FILE.png") from None


def main() -> None:
    args = parse_args()
    if args.instance not in INSTANCES:
        raise SmolLM3Error(f"instance is {args.instance!r}, known are {', '.join(INSTANCES)}")
    config = read_config(args.model) if args.model else resolve_config(SMOLLM3_3B)
    instance = INSTANCES[args.instance]
    if args.tp is not None:
        check_tp_degree(args.instance, args.tp)
    if args.dtype not in MODEL_DTYPES:
        raise SmolLM3Error(f"dtype is {args.dtype!r}, allowed is one of {', '.join(MODEL_DTYPES)}")
    estimates = []
    for tp_degree in (args.tp,) if args.tp is not None else instance.tp_degrees:
        settings = Settings(tp_degree, args.batch_size, args.seq_len, None, args.dtype).checked(config)
        estimates.append(Estimate(config, tp_degree, settings.seq_len, settings.batch_size, settings.torch_dtype))
    rows = [row(estimate) for estimate in estimates]
    if args.plot:
        plot(estimates, args.plot)
    if args.json:
        print(
            json.dumps(
                {"instance": args.instance, **asdict(instance), "settings": vars_of(args), "plans": rows}, indent=2
            )
        )
        return
    print(
        f"{args.instance}: {instance.neuron_cores} NeuronCores of {HBM_PER_CORE / GB:.0f} GB, {instance.host_memory} GiB of host "
        f"memory; TP degrees {', '.join(map(str, instance.tp_degrees))}\n"
        f"seq_len {args.seq_len}, batch_size {args.batch_size}, {args.dtype}; per core, {RESERVED_PER_CORE / GB:.0f} GB kept free\n"
    )
    print(f"{'':<42}" + "".join(f"{'TP ' + str(r['tp_degree']):>24}" for r in rows))
    for label, value in LINES:
        print(f"{label:<42}" + "".join(f"{value(r):>24}" for r in rows))


def vars_of(args: argparse.Namespace) -> dict:
    return {"seq_len": args.seq_len, "batch_size": args.batch_size, "torch_dtype": args.dtype}


if __name__ == "__main__":
    common.run(main)
