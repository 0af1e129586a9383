"""Compiles SmolLM3 to an artifact: the graphs and one file of weights per rank, in a folder that can be moved.

    python scripts/compile.py --model tiny --tp 2 --seq-len 128 --dtype float32

Without --model it is SmolLM3-3B from the hub. On a machine without the Neuron SDK the graphs are for the CPU.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import common
import variants
from tqdm import tqdm

from smollm3_neuron.artifact.build import Callbacks, compile_artifact
from smollm3_neuron.artifact.compiled_graphs import note_on_products
from smollm3_neuron.artifact.folder import Artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import DEFAULT_MODEL, locate_model
from smollm3_neuron.machine.preflight import check_device, choose_place
from smollm3_neuron.machine.roofline import Estimate
from smollm3_neuron.machine.scores import notes_on_attention
from smollm3_neuron.model.config import DRAFT_TYPES, read_config
from smollm3_neuron.model.draft import other_added_tokens
from smollm3_neuron.model.dtypes import QUANTIZATION_DTYPES
from smollm3_neuron.model.releases import installed_release
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B
from smollm3_neuron.vllm.serving import serve_command, settings_of_server
from smollm3_neuron.weights.checkpoint import DROPPED_HEAD, drops_head
from smollm3_neuron.weights.derived import cut_checkpoint, stretch_checkpoint, stretched_fields
from smollm3_neuron.weights.quantization import MODULE_NAMES, QUANTIZATION_TYPES


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__)
    add_checkpoint(parser.add_argument_group("what is compiled"))
    add_shape(parser.add_argument_group("degree, lengths and dtype"))
    add_graphs(parser.add_argument_group("how the graphs are built"))
    add_batching(parser.add_argument_group("requests and their cache"))
    add_quantization(parser.add_argument_group("8-bit weights"))
    add_output(parser.add_argument_group("where it runs and what is written"))
    return parser.parse_args()


def add_checkpoint(group) -> None:
    group.add_argument("--model", default=DEFAULT_MODEL, help="hub id, folder or 'tiny' (default: %(default)s)")
    group.add_argument("--revision", help="of the hub id (default: the pinned one for the default model)")
    group.add_argument(
        "--merge-adapter", type=Path, metavar="FOLDER", help="a PEFT LoRA adapter to merge into the weights"
    )
    variants.add_arguments(group)


def add_shape(group) -> None:
    group.add_argument(
        "--tp", type=int, metavar="N", default=Settings.tp_degree, help="tensor-parallel degree (default: %(default)s)"
    )
    group.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        default=Settings.seq_len,
        help="prompt and new tokens (default: %(default)s)",
    )
    group.add_argument("--max-context-length", type=int, metavar="N", help="longest prompt (default: --seq-len)")
    group.add_argument("--batch-size", type=int, metavar="N", default=Settings.batch_size, help="default: %(default)s")
    group.add_argument(
        "--dtype", default=Settings.torch_dtype, help="bfloat16, float16 or float32 (default: %(default)s)"
    )


def add_graphs(group) -> None:
    group.add_argument("--fused-qkv", action="store_true", help="one projection for queries, keys and values")
    group.add_argument("--vocab-parallel", action="store_true", help="the embeddings cut along the vocabulary")
    group.add_argument(
        "--sequence-parallel-enabled", action="store_true", help="contexts cut along their length between layers"
    )
    group.add_argument(
        "--async-mode", action="store_true", help="a step is given to the device before the last one is read"
    )
    group.add_argument(
        "--on-device-sampling-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help='{"dynamic": true}: sample on the device; null: on the host (default, but with --for-vllm)',
    )
    group.add_argument(
        "--enable-bucketing", action="store_true", help="graphs for several lengths, powers of two if none given"
    )
    group.add_argument("--context-encoding-buckets", type=int, nargs="+", metavar="N", help="lengths of prompts")
    group.add_argument("--token-generation-buckets", type=int, nargs="+", metavar="N", help="lengths of the cache")
    group.add_argument(
        "--attn-kernel",
        dest="attn_kernel_enabled",
        action="store_true",
        help="the library's attention kernel; on trn1 and inf2 contexts of 4096 tokens did not compile with it",
    )
    group.add_argument(
        "--rope-precision",
        default=Settings.rope_precision,
        help="float32, as transformers computes cos and sin, or float64: exact at long positions, from a table "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--pad-intermediate",
        dest="padded_intermediate_size",
        type=int,
        metavar="N",
        help="pad the MLPs with zeros from the checkpoint's intermediate size to N, which --tp must divide",
    )
    group.add_argument(
        "--speculation-length",
        type=int,
        metavar="K",
        default=Settings.speculation_length,
        help="a graph that verifies K tokens in one step: a further one, for generate.py --prompt-lookup, or with "
        "--draft the one that draft and model share (default: none)",
    )
    group.add_argument(
        "--windowed-context-encoding-size", type=int, metavar="N", help="encode contexts in windows of N tokens"
    )


def add_batching(group) -> None:
    group.add_argument(
        "--for-vllm",
        action="store_true",
        help="what vllm-neuron would compile for --max-num-seqs BATCH_SIZE --max-model-len SEQ_LEN; "
        "prints how to serve it",
    )
    group.add_argument(
        "--is-continuous-batching", action="store_true", help="requests come and go, each on its line of the cache"
    )
    group.add_argument(
        "--ctx-batch-size", type=int, metavar="N", help="prompts encoded at once (default: 1 with continuous batching)"
    )
    group.add_argument(
        "--apply-seq-ids-mask",
        action="store_true",
        help="a token step keeps the lines of requests that it leaves out, for 128 more positions of each line",
    )
    group.add_argument(
        "--is-prefix-caching", action="store_true", help="requests share what they begin with, in blocks of the cache"
    )
    group.add_argument(
        "--pa-block-size", type=int, metavar="N", help="tokens in a block (default: 32 with prefix caching)"
    )
    group.add_argument(
        "--pa-num-blocks", type=int, metavar="N", help="default: enough for full lines of the whole batch"
    )


def add_quantization(group) -> None:
    group.add_argument("--quantized", action="store_true", help="8-bit weights, quantized while they are sharded")
    group.add_argument(
        "--quantization-type",
        default=Settings.quantization_type,
        help=f"{' or '.join(QUANTIZATION_TYPES)} (default: %(default)s)",
    )
    group.add_argument(
        "--quantization-dtype",
        default=Settings.quantization_dtype,
        help=f"{' or '.join(QUANTIZATION_DTYPES)} (default: %(default)s)",
    )
    group.add_argument(
        "--modules-to-not-convert", nargs="+", metavar="NAME", help=f"leave as they are: {', '.join(MODULE_NAMES)}"
    )


def add_output(group) -> None:
    group.add_argument("--output", type=Path, help="artifact folder (default: artifacts/MODEL-tpN)")
    group.add_argument(
        "--weights-only", action="store_true", help="keep the artifact's graphs, shard the weights again"
    )
    common.add_device(group, "hlo (see --nxd-source), ")
    group.add_argument(
        "--nxd-source",
        metavar="NXD/src:NXDI/src",
        help="with --device hlo, which compiles nothing and writes the graphs that the compiler would get, with a "
        "report: the sources of the real library (default: NXD_SOURCE of the environment)",
    )


def settings_from(args: argparse.Namespace) -> Settings:
    """The artifact's settings: the arguments of the same names, and those that are named otherwise."""
    given = getattr(args, "on_device_sampling_config", "null")
    sampling = common.json_object("--on-device-sampling-config", given, '{"dynamic": true}')
    if args.draft and sampling is None:
        sampling = {"do_sample": False}  # its graphs choose the tokens, and are greedy
    renamed = {
        "enable_fused_speculation": args.draft is not None,
        "tp_degree": args.tp,
        "lora_config": None,
        "torch_dtype": args.dtype,
        "on_device_sampling_config": sampling,
    }
    same = {field.name: getattr(args, field.name) for field in fields(Settings) if field.name not in renamed}
    settings = Settings(**same, **renamed)
    if args.for_vllm:
        settings = settings_of_server(settings, sampling_given="on_device_sampling_config" in args)
    return settings


def check_args(args: argparse.Namespace) -> None:
    if args.device == "hlo" and (args.merge_adapter or args.weights_only):
        raise SmolLM3Error("--device hlo writes graphs and no weights: leave --merge-adapter and --weights-only out")
    variants.check_args(args)
    if args.nxd_source and args.device != "hlo":
        raise SmolLM3Error(
            f"--nxd-source is for --device hlo, which is {args.device!r}: leave one out or change the other"
        )


def kv_heads(folder: Path, tp_degree: int) -> str:
    """What the TP degree does to the KV heads, and what it costs."""
    plan = read_config(folder).plan(tp_degree)
    cached = plan.key_value_heads_per_rank * tp_degree
    cost = ""
    if cached > plan.num_key_value_heads:
        cost = f": the KV cache takes {cached / plan.num_key_value_heads:g} times the memory"
    return (
        f"{plan.num_key_value_heads} KV heads at tp_degree {tp_degree}: {plan.strategy}, "
        f"{plan.key_value_heads_per_rank} per rank{cost}"
    )


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def estimate_of(folder: Path, settings: Settings, draft: Path | None) -> Estimate:
    """What a core holds of the artifact, as plan.py says it."""
    config, quantized = read_config(folder).padded(settings), settings if settings.quantized else None
    sizes = settings.tp_degree, settings.seq_len, settings.batch_size, settings.torch_dtype
    speculation = {
        "speculation_length": settings.speculation_length,
        "draft": draft and read_config(draft, DRAFT_TYPES),
    }
    return Estimate(config, *sizes, quantized=quantized, **speculation)


def say_what_may_not_work(folder: Path, settings: Settings) -> None:
    """A line for each thing that a trn1 or inf2 may not do with these settings."""
    config = read_config(folder)
    for note in notes_on_attention(config, settings.checked(config)):
        print(f"warning: {note}")
    if settings.is_prefix_caching and (installed_release() or "").startswith("0.8."):
        print("warning: is_prefix_caching with SDK 2.28 ended in NCC_ITEN404 in a public report (aws-neuron-sdk #1304)")


def notes_on_draft(draft: Path | None, folder: Path) -> list[str]:
    """A line where its tokenizer has other added tokens than the model's."""
    others = other_added_tokens(draft, folder) if draft else []
    if not others:
        return []
    return [f"note: {len(others)} added tokens are others in the draft's tokenizer, the first {others[0]}"]


def lower(args: argparse.Namespace, settings: Settings) -> None:
    """`--device hlo`: the weights are not needed, and those of the default model are not downloaded."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "contrib"))
    from neuron_hlo import report

    with tempfile.TemporaryDirectory() as scratch:
        if args.model == DEFAULT_MODEL and not Path(args.model).exists():
            folder, name = Path(scratch), args.model
            (folder / "config.json").write_text(json.dumps(SMOLLM3_3B))
        else:
            folder, name, _ = locate_model(args.model, args.revision)
        if factor := variants.yarn_factor(args, folder):
            fields, folder = stretched_fields(folder, factor), Path(scratch)
            (folder / "config.json").write_text(json.dumps(fields))
        output = args.output or Path("artifacts") / f"{Path(name).name}-tp{args.tp}-hlo"
        say_what_may_not_work(folder, settings)
        print(report.text(report.lower_checkpoint(folder, output, settings, args.nxd_source)))
    print(f"\n{output}: the graphs, {report.REPORT} and report.txt")


class Progress:
    """A bar that comes with the first count and goes with the last one."""

    def __init__(self, **options):
        self.options, self.bar = options, None

    def __call__(self, count: int, total: int) -> None:
        if self.bar is None:
            self.bar = tqdm(total=total, leave=False, disable=None, **self.options)
        self.bar.update(count)
        if self.bar.n >= total:
            self.bar.close()


def compile_and_report(args: argparse.Namespace, settings: Settings) -> None:
    place = choose_place(args.device)
    folder, name, revision = locate_model(args.model, args.revision)
    output = args.output or Path("artifacts") / f"{Path(name).name}-tp{args.tp}"
    if args.num_layers is not None:
        output = args.output or output.with_name(f"{output.name}-layers{args.num_layers}")
        folder = cut_checkpoint(folder, args.num_layers, variants.beside(output))
    elif factor := variants.yarn_factor(args, folder):
        output = args.output or output.with_name(f"{output.name}-yarn{factor:g}")
        folder = stretch_checkpoint(folder, factor, variants.beside(output))
        print(f"YaRN, factor {factor:g}: {read_config(folder).longest_sequence} positions, {folder}")
    settings = variants.with_adapters(settings, args, folder)
    if place == "emulated":
        print("This is an emulated Neuron device: its graphs are HLO for XLA-CPU, and no NEFF.")
    if place != "cpu":
        for warning in check_device(args.tp, stored_bytes(folder), output):
            print(f"warning: {warning}")
        say_what_may_not_work(folder, settings)
    else:
        print("This is the CPU runtime: CPU graphs, not a device's.")
        common.quiet()
    print("\n".join([kv_heads(folder, args.tp), *notes_on_draft(args.draft, folder)]))
    began = time.perf_counter()

    def on_step(step: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {step} ...", flush=True)

    artifact = compile_artifact(
        folder,
        output,
        settings,
        place,
        name=name,
        revision=revision,
        weights_only=args.weights_only,
        merge_adapter=args.merge_adapter,
        draft=args.draft,
        callbacks=Callbacks(on_step, Progress(unit="B", unit_scale=True), Progress(unit="part")),
    )
    if drops_head(folder, read_config(folder)):
        print(f"warning: {DROPPED_HEAD}")
    print(f"\n{artifact.path}: {name}, tp_degree {args.tp}, in {time.perf_counter() - began:.1f} s")
    report_on(artifact, folder, args)


def report_on(artifact: Artifact, folder: Path, args: argparse.Namespace) -> None:
    """What is in the artifact of the checkpoint in `folder`, what a core holds of it, and what runs it."""
    if artifact.place == "cpu":
        because = artifact.exported_because
        print(
            f"  the exported graphs run as they are: {because}" if because else "  the graphs are compiled for this CPU"
        )
        if note := note_on_products(artifact.settings.torch_dtype):
            print(f"  {note}")
    for file, entry in artifact.manifest["files"].items():
        print(f"  {file:<44} {entry['size'] / 1e6:10.2f} MB")
    estimate = estimate_of(folder, artifact.settings, args.draft)
    print("\n".join(common.model_sizes(read_config(folder), artifact.settings.torch_dtype, stored_bytes(folder))))
    held = {"weights": estimate.weights, "KV cache": estimate.kv_cache, "logits": estimate.logits}
    held |= {"draft": estimate.held_by_draft} if args.draft else {}
    print(f"per core: {', '.join(f'{name} {common.gigabytes(size)}' for name, size in held.items())}")
    if args.for_vllm:
        print(f"\nServe it: {serve_command(artifact)}")
    if "tokenizer.json" in artifact.manifest["files"]:
        print(f'\nRun it: python scripts/generate.py {shlex.quote(str(artifact.path))} "The square root of 144 is"')
    else:
        print("\nIt has no tokenizer.json: to give it text, add the file to the checkpoint and compile again")


def main() -> None:
    args = parse_args()
    settings = settings_from(args)
    check_args(args)
    if args.device == "hlo":
        lower(args, settings)
    else:
        compile_and_report(args, settings)


if __name__ == "__main__":
    common.run(main)
