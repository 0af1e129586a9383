"""What fits where, before anything is rented.

    python scripts/plan.py --instance trn1.2xlarge

Bytes per NeuronCore, host memory, legal TP degrees, the largest batch and context, and two estimates of speed: a
roofline, which is an upper bound from the machines' published figures, and what to expect, from what others measured.
Nothing of it was measured by this project; "-" stands where no figure was published.
"""

import argparse
import json
from dataclasses import asdict, replace
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
    parameters,
)
from smollm3_neuron.model.config import DRAFT_TYPES, CheckpointConfig, read_config, resolve_config
from smollm3_neuron.model.draft import check_draft
from smollm3_neuron.model.dtypes import MODEL_DTYPES
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

ACCEPTED = (0, 0.25, 0.5, 0.75, 1)  # shares of candidates
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
    shape.add_argument("--speculation-length", type=int, metavar="K", default=0, help="as compile.py's")
    shape.add_argument("--draft", metavar="FOLDER", help="as compile.py's; its config.json is read alone")
    shape.add_argument("--quantized", action="store_true", help="8-bit weights, as compile.py's")
    outputs = parser.add_argument_group("what is written")
    outputs.add_argument("--json", action="store_true", help="the same as JSON, in bytes and seconds")
    outputs.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw which context fits with which batch, and speed"
    )
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
        "kv_bytes_per_token": estimate.kv_cache_per_token,
        "weights": estimate.weights,
        "untied_head": estimate.untied_head,
        "kv_cache": estimate.kv_cache,
        "logits": estimate.logits,
        "held_by_draft": estimate.held_by_draft,
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
        **(speculation(expected) if estimate.speculation_length else {}),
    }


def speculation(expected: Expectation) -> dict:
    """What a step that verifies several tokens takes, and tokens per second by the share of accepted candidates."""
    by_share = {f"{share:g}": expected.speculated_tokens_per_second(share) for share in ACCEPTED}
    return {"verify_seconds_expected": expected.verify_seconds, "tokens_per_second_expected_by_accepted": by_share}


OF_DRAFT = "the draft's weights and KV cache"
LINES = (
    ("KV heads", lambda plan: f"{plan['strategy']}: {plan['key_value_heads_per_core']} per core"),
    ("query heads per core", lambda plan: str(plan["attention_heads_per_core"])),
    ("KV memory, times the checkpoint's heads", lambda plan: f"{plan['kv_memory_factor']:.2f}"),
    ("weights", lambda plan: common.gigabytes(plan["weights"])),
    ("  of these the untied head", lambda plan: common.gigabytes(plan["untied_head"])),
    ("KV cache", lambda plan: common.gigabytes(plan["kv_cache"])),
    ("  of one token", lambda plan: f"{plan['kv_bytes_per_token']:,} bytes"),
    ("logits", lambda plan: common.gigabytes(plan["logits"])),
    (OF_DRAFT, lambda plan: common.gigabytes(plan["held_by_draft"])),
    ("total", lambda plan: common.gigabytes(plan["total"])),
    ("fits", lambda plan: "yes" if plan["fits"] else "DOES NOT FIT"),
    ("scores of a prompt that long, at most", lambda plan: common.gigabytes(plan["scores_at_most"])),
    ("largest batch at this seq_len", lambda plan: str(plan["largest_batch"])),
    ("largest seq_len at this batch", lambda plan: str(plan["largest_seq_len"])),
    ("read per decode step", lambda plan: common.gigabytes(plan["decode_bytes"])),
    ("first token, at least", lambda plan: f"{plan['prefill_seconds_at_least'] * 1000:.1f} ms"),
    ("tokens per second, at most", lambda plan: f"{plan['tokens_per_second_at_most']:.0f}"),
    ("first token, expected", lambda plan: known(plan["prefill_seconds_expected"], 1000, ".1f", " ms")),
    ("one step, expected", lambda plan: known(plan["decode_seconds_expected"], 1000, ".1f", " ms")),
    ("tokens per second, expected", lambda plan: known(plan["tokens_per_second_expected"], 1, ".0f")),
    ("one step that verifies, expected", lambda plan: known(plan.get("verify_seconds_expected"), 1000, ".1f", " ms")),
    *(
        (
            f"  tokens per second, {share:.0%} accepted",
            lambda plan, share=share: known(
                plan.get("tokens_per_second_expected_by_accepted", {}).get(f"{share:g}"), 1, ".0f"
            ),
        )
        for share in ACCEPTED
    ),
    ("host memory to shard, at most", lambda plan: common.gigabytes(plan["host_memory_to_shard"])),
    ("host memory to load", lambda plan: common.gigabytes(plan["host_memory_to_load"])),
)


SPECULATION = [label for label, _ in LINES if "verifies" in label or "accepted" in label]

EXPECTED_FROM = f"""
The expected figures are reckoned from what others measured on trn1 and inf2: see docs/device_facts.md.
For comparison: {PUBLISHED_PORT.value} {PUBLISHED_PORT.what},
{PUBLISHED_PORT.source}."""


def known(value: float | None, unit: float, form: str, name: str = "") -> str:
    return "-" if value is None else f"{value * unit:{form}}{name}"


def stored_bytes(model: str | None) -> int | None:
    """The bytes of a checkpoint's files of weights."""
    return model and sum(file.stat().st_size for file in local_model(model)[0].glob("*.safetensors"))


def curve(estimate: Estimate, instance: str) -> list[tuple[int, float, float | None]]:
    """(context, tokens per second at most, and expected), of contexts that fit, each twice the last."""
    longest, contexts = estimate.largest_seq_len(estimate.batch_size), []
    while (context := 128 << len(contexts)) <= longest:
        contexts.append(context)
    points = [replace(estimate, seq_len=context, context_length=None) for context in contexts]
    return [(one.seq_len, one.tokens_per_second, Expectation(one, instance).tokens_per_second) for one in points]


def plot(estimates: list[Estimate], instance: str, path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SmolLM3Error("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (axes, speed) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
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
    for estimate in estimates:
        contexts, most, expected = zip(*points) if (points := curve(estimate, instance)) else ((), (), ())
        (line,) = speed.plot(contexts, most, "--", label=f"TP {estimate.tp_degree}, at most")
        if None not in expected:
            speed.plot(contexts, expected, color=line.get_color(), label=f"TP {estimate.tp_degree}, expected")
    batch = estimates[0].batch_size
    speed.set(xlabel="context", ylabel="tokens per second", title=f"Speed against context, batch size {batch}")
    speed.set_xscale("log", base=2)
    for one in (axes, speed):
        one.grid(alpha=0.3)
        one.legend()
    try:
        figure.savefig(path, format=path.suffix[1:] or "png")  # left to itself it would write another file
    except (OSError, ValueError) as error:
        raise SmolLM3Error(f"{path}: cannot be written ({error}); pass a FILE.png") from None


def config_of(model: str | None) -> CheckpointConfig:
    return resolve_config(SMOLLM3_3B) if model is None else read_config(local_model(model)[0])


def draft_of(args: argparse.Namespace) -> CheckpointConfig | None:
    return None if args.draft is None else read_config(args.draft, DRAFT_TYPES)


def estimates_for(args: argparse.Namespace) -> list[Estimate]:
    """One estimate per TP degree; SmolLM3Error for an instance, degree, dtype or shape that is not allowed."""
    if args.instance not in INSTANCES:
        raise SmolLM3Error(f"instance is {args.instance!r}, known are {', '.join(INSTANCES)}")
    config, draft = config_of(args.model), draft_of(args)
    if args.tp is not None:
        check_tp_degree(args.instance, args.tp)
    if args.dtype not in MODEL_DTYPES:
        raise SmolLM3Error(f"dtype is {args.dtype!r}, allowed is one of {', '.join(MODEL_DTYPES)}")
    estimates = []
    for tp_degree in (args.tp,) if args.tp is not None else INSTANCES[args.instance].tp_degrees:
        mask = args.apply_seq_ids_mask
        settings = Settings(
            tp_degree, args.batch_size, args.seq_len, None, args.dtype, padded_intermediate_size=args.pad_intermediate,
            is_continuous_batching=mask, apply_seq_ids_mask=mask, quantized=args.quantized,
            speculation_length=args.speculation_length, enable_fused_speculation=draft is not None,
            on_device_sampling_config={"do_sample": False} if draft else None,
        ).checked(config)  # fmt: skip
        sizes = settings.seq_len, settings.batch_size, settings.torch_dtype
        quantized = settings if args.quantized else None
        if draft:
            check_draft(draft, config)
            settings.of_draft().checked(draft)
        switches = dict(apply_seq_ids_mask=mask, speculation_length=args.speculation_length, draft=draft)
        estimates.append(Estimate(config.padded(settings), tp_degree, *sizes, quantized=quantized, **switches))
    return estimates


def print_plans(args: argparse.Namespace, plans: list[dict]) -> None:
    instance = INSTANCES[args.instance]
    print(
        f"{args.instance}: {instance.neuron_cores} NeuronCores of {HBM_PER_CORE / GB:.0f} GB, "
        f"{instance.host_memory} GiB of host memory; TP degrees {', '.join(map(str, instance.tp_degrees))}\n"
        f"seq_len {args.seq_len}, batch_size {args.batch_size}, {args.dtype}"
        f"{', 8-bit weights' if args.quantized else ''}; per core, {RESERVED_PER_CORE / GB:.0f} GB kept free"
    )
    print("\n".join(common.model_sizes(config_of(args.model), args.dtype, stored_bytes(args.model))) + "\n")
    print(f"{'':<42}" + "".join(f"{'TP ' + str(plan['tp_degree']):>26}" for plan in plans))
    for label, cell in LINES:
        if (args.speculation_length == 0 and label in SPECULATION) or (args.draft is None and label == OF_DRAFT):
            continue
        print(f"{label:<42}" + "".join(f"{cell(plan):>26}" for plan in plans))
    print(EXPECTED_FROM)


def main() -> None:
    args = parse_args()
    common.check_outputs(args.plot)
    estimates = estimates_for(args)
    plans = [as_dict(estimate, args.instance) for estimate in estimates]
    if args.plot:
        plot(estimates, args.instance, args.plot)
    if args.json:
        settings = {"seq_len": args.seq_len, "batch_size": args.batch_size, "torch_dtype": args.dtype}
        settings["padded_intermediate_size"] = args.pad_intermediate
        settings["quantized"] = args.quantized
        settings["speculation_length"] = args.speculation_length
        settings["draft"] = args.draft
        config = config_of(args.model)
        count, tensors = parameters(config)
        whole = Estimate(config, tp_degree=1, seq_len=1, dtype=args.dtype)
        model = {
            "parameters": count,
            "tensors": tensors,
            "checkpoint_bytes": stored_bytes(args.model) or 2 * count,
            "kv_bytes_per_token": whole.kv_cache_per_token,
        }
        content = {
            "model": model,
            "instance": args.instance,
            **asdict(INSTANCES[args.instance]),
            "settings": settings,
            "plans": plans,
        }
        print(json.dumps({**content, "expected_from": [asdict(figure) for figure in FIGURES]}, indent=2))
    else:
        print_plans(args, plans)


if __name__ == "__main__":
    common.run(main)
