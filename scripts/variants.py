"""What compile.py makes of a checkpoint before it is compiled: fewer layers, more positions, adapters beside it."""

import argparse
from dataclasses import replace
from pathlib import Path

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.adapter import serving_config
from smollm3_neuron.weights.derived import factor_for


def add_arguments(group) -> None:
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a PEFT LoRA adapter that is served unmerged, several times for several; generate.py takes --adapter "
        "NAME; on a device only",
    )
    group.add_argument(
        "--draft",
        type=Path,
        metavar="FOLDER",
        help="a small SmolLM3 or Llama of the same vocabulary that guesses what the model verifies, in one graph with "
        "it; needs --speculation-length, greedy, on a device only",
    )
    group.add_argument(
        "--num-layers",
        type=int,
        metavar="N",
        help="only the first N layers, with the final norm and the head; writes OUTPUT-checkpoint, too (default: all)",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="stretch the model's positions to N tokens by YaRN; writes OUTPUT-checkpoint, too, whose config.json and "
        "tokenizer say so",
    )
    group.add_argument("--rope-scaling", metavar="yarn", help="the same by a factor: yarn, with --factor")
    group.add_argument("--factor", type=float, metavar="F", help="of --rope-scaling, 2 for twice the positions")


def check_args(args: argparse.Namespace) -> None:
    if args.num_layers is not None and (args.merge_adapter or args.device == "hlo"):
        raise SmolLM3Error("--num-layers goes with neither --merge-adapter nor --device hlo: leave one out")
    if args.lora and (args.merge_adapter or args.for_vllm or args.weights_only or args.device == "hlo"):
        raise SmolLM3Error(
            "--lora goes with none of --merge-adapter, --for-vllm, --weights-only and --device hlo: leave one out"
        )
    if args.draft is not None and not args.speculation_length:
        raise SmolLM3Error("--draft guesses what a step verifies: give --speculation-length, how many tokens that are")
    if args.draft is not None and args.device == "hlo":
        raise SmolLM3Error("--draft does not go with --device hlo, which reads the config of one model: leave one out")
    if args.context is not None and (args.rope_scaling or args.factor is not None):
        raise SmolLM3Error("--context has its own factor: leave --rope-scaling and --factor out")
    if args.rope_scaling not in (None, "yarn"):
        raise SmolLM3Error(f"--rope-scaling is {args.rope_scaling!r}, allowed is 'yarn'")
    if (args.rope_scaling is None) != (args.factor is None):
        raise SmolLM3Error("--rope-scaling yarn and --factor F go together: give both, or --context N")
    if args.num_layers is not None and (args.context is not None or args.factor is not None):
        raise SmolLM3Error(
            "--num-layers and YaRN (--context, --rope-scaling) are two steps: give --num-layers the OUTPUT-checkpoint "
            "of the other as --model"
        )


def with_adapters(settings: Settings, args: argparse.Namespace, folder: Path) -> Settings:
    """The settings with the adapters of --lora."""
    folders = {}
    for given in args.lora:
        name, _, path = given.partition("=")
        if not name or not path or name in folders or name == "none":
            raise SmolLM3Error(f"--lora is {given!r}, allowed is NAME=FOLDER, each name once and none of them 'none'")
        folders[name] = Path(path)
    config = serving_config(folders, read_config(folder), settings.batch_size) if folders else None
    return replace(settings, lora_config=config)


def yarn_factor(args: argparse.Namespace, folder: Path) -> float | None:
    """By how much the positions are to be stretched, or None."""
    return args.factor if args.context is None else factor_for(read_config(folder), args.context)


def beside(output: Path) -> Path:
    """Where the checkpoint is written that an artifact is made of, if that is another than was given."""
    return output.absolute().with_name(f"{output.name}-checkpoint")
