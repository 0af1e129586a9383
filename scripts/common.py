"""What the commands share: help that begins with an example, arguments of one meaning, errors as one line."""

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

try:
    from smollm3_neuron.errors import NotANumber, SmolLM3Error
    from smollm3_neuron.machine.device_errors import advice_on_error
    from smollm3_neuron.machine.roofline import GB, Estimate, GiB, parameters
    from smollm3_neuron.model.config import read_config
    from smollm3_neuron.model.json_files import parse_json
except ModuleNotFoundError:
    sys.exit(
        "smollm3_neuron is not installed: run `pip install -e .` in the checkout (on a Neuron machine with --no-deps)"
    )


class Parser(argparse.ArgumentParser):
    """Arguments of a command, whose help begins with the example that the command's docstring gives.

    `doc` is that docstring; its one indented line is the example. `positional` names the arguments without a flag.
    """

    def __init__(self, doc: str, positional: str = ""):
        lines = doc.splitlines()
        (self.example,) = (line.strip() for line in lines if line.startswith("    "))
        description = "\n".join(line for line in lines if not line.startswith("    ")).replace("\n\n\n", "\n\n")
        super().__init__(
            usage=f"%(prog)s [options] {positional}".rstrip(),
            description=description.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def format_help(self) -> str:
        return f"example: {self.example}\n\n{super().format_help()}"


def add_device(parser: argparse._ActionsContainer, more: str = "") -> None:
    places = f"neuron, cpu, {more}or auto: the device where the Neuron SDK is installed (default: auto)"
    parser.add_argument("--device", default="auto", help=places)


def add_verify(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--verify", action="store_true", help="read the weights' digests too before loading")


def json_object(flag: str, text: str, example: str) -> dict | None:
    """The value of a flag that takes a JSON object, or null."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = text
    if not isinstance(value, dict | None):
        raise SmolLM3Error(f"{flag} is {text!r}, allowed is a JSON object like {example}, or null")
    return value


def quiet() -> None:
    """Keeps the libraries' warnings from a user: on the CPU they speak of devices and of what this project chose."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def gigabytes(count: int) -> str:
    return f"{count / GB:.3f} GB ({count / GiB:.3f} GiB)"


def model_sizes(estimate: Estimate, stored: int | None = None) -> list[str]:
    """What the model is on all cores together; `stored` are the bytes of the checkpoint's files, if there are any."""
    count, tensors = parameters(estimate.config)
    whole = replace(estimate, tp_degree=1)
    checkpoint = f"{gigabytes(stored)} of files" if stored else f"{gigabytes(2 * count)} in bfloat16"
    lines = [
        f"{count:,} parameters in {tensors} tensors, {checkpoint}",
        f"KV cache: {whole.kv_cache_per_token:,} bytes per token; activations are left out",
    ]
    if estimate.dtype == "float32":
        lines.append("float32: NxD Inference gives the compiler --auto-cast=none, so that products stay in float32")
    return lines


def make_checkpoint(folder: Path, config: dict) -> int:
    """Writes random bfloat16 weights for this config.json, in two safetensors files with an index.

    They are drawn as transformers does, with a standard deviation of 0.02, norms around 1. Returns how many they are.
    """
    import torch
    from safetensors.torch import save_file

    from smollm3_neuron.model.config import resolve_config
    from smollm3_neuron.weights.files import INDEX_FILE
    from smollm3_neuron.weights.projections import expected_shapes

    shapes = list(expected_shapes(resolve_config(config)).items())
    weight_map = {}
    for number, part in enumerate((shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        tensors = {}
        for name, shape in part:
            name = name if name.startswith("lm_head") else f"model.{name}"
            mean = 1 if name.endswith("norm.weight") else 0
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(mean, std=0.02)
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(math.prod(shape) for _, shape in shapes)


def reference_folder(model: Path | None, artifact) -> Path:
    """The checkpoint that an artifact is compared with: --model, or the one that it was compiled from."""
    folder = model or Path(artifact.manifest["model"]["folder"])
    if not (folder / "config.json").is_file():
        raise SmolLM3Error(f"{folder}: the checkpoint is not there any more; pass it with --model FOLDER")
    vocab_size = read_config(folder).vocab_size
    if vocab_size != artifact.vocab_size:
        raise SmolLM3Error(
            f"{folder}: vocab_size is {vocab_size}, the artifact's {artifact.vocab_size}: their logits cannot be "
            "compared; pass the checkpoint that it was compiled from"
        )
    return folder


def note_foreign_code(artifact) -> None:
    """A line where an artifact's exported graphs run because its machine code is somebody else's."""
    if artifact.has_foreign_code:
        print(f"note: the exported graphs run as they are: {artifact.exported_because}", file=sys.stderr)


def check_outputs(*paths: Path | None) -> None:
    """SmolLM3Error, before the work, for a file that could not be written after it."""
    for path in filter(None, paths):
        folder = path.absolute().parent
        if not folder.is_dir():
            raise SmolLM3Error(f"{path}: no such folder; name a file in one that exists")
        if path.is_dir():
            raise SmolLM3Error(f"{path}: a folder; name a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise SmolLM3Error(f"{path}: cannot be written (Permission denied); name another file")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
        except OSError as error:
            raise SmolLM3Error(f"{path}: cannot write there ({error.strerror}); name another file") from None


def run(main, failed: int = 1) -> None:
    """Runs a command; a mistake of the user is one line and exit code 2, an error of a device one line or advice.

    `failed` is the exit code of any other failure: not 1 where that is a verdict.
    """
    began = time.time()
    try:
        main()
    except SmolLM3Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except NotANumber as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(failed)
    except Exception as error:
        advice = advice_on_error(error, began)
        if advice is not None:
            traceback.print_exception(error)
        elif isinstance(error, RuntimeError) and "torch_neuronx" in sys.modules:
            # TorchScript puts its own traceback before what the runtime said
            advice = f"the Neuron device failed: {str(error).strip().splitlines()[-1]}"
        elif isinstance(error, OSError) and error.filename and error.strerror:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        else:
            traceback.print_exception(error)
            sys.exit(failed)
        print(f"error: {advice}", file=sys.stderr)
        sys.exit(failed)
