"""What the commands share: arguments with the same meaning, random checkpoints, errors as one line."""

import argparse
import json
import sys
from pathlib import Path

try:
    from smollm3_neuron.errors import SmolLM3Error
except ModuleNotFoundError:
    sys.exit(
        "smollm3_neuron is not installed: run `pip install -e .` in the checkout (on a Neuron machine with --no-deps)"
    )


def add_device(parser: argparse.ArgumentParser, more: str = "") -> None:
    places = f"neuron, cpu, {more}or auto: the device where the Neuron SDK is installed (default: auto)"
    parser.add_argument("--device", default="auto", help=places)


def make_checkpoint(folder: Path, config: dict) -> None:
    """Random bfloat16 weights for this config.json, in two safetensors files with an index."""
    import torch
    from safetensors.torch import save_file

    from smollm3_neuron.model.config import resolve_config
    from smollm3_neuron.weights.checkpoint import expected_shapes
    from smollm3_neuron.weights.files import INDEX_FILE

    shapes = list(expected_shapes(resolve_config(config)).items())
    weight_map = {}
    for number, part in enumerate((shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        tensors = {
            name if name.startswith("lm_head") else f"model.{name}": torch.empty(shape, dtype=torch.bfloat16).normal_(
                std=0.02
            )
            for name, shape in part
        }
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def check_outputs(*paths: Path | None) -> None:
    """Before the work: SmolLM3Error for a file that could not be written after it."""
    for path in paths:
        if path and not path.absolute().parent.is_dir():
            raise SmolLM3Error(f"{path}: no such folder; name a file in one that exists")


def run(main) -> None:
    """Runs a command; a mistake of the user's is one line and exit code 2."""
    try:
        main()
    except SmolLM3Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
