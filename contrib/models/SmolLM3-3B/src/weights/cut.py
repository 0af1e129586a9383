# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a model's first layers, with its final norm and head: a wrong layer shows from there on."""

import json
from pathlib import Path

from ..errors import SmolLM3Error
from ..model.config import read_config
from ..model.json_files import read_json
from .checkpoint import checkpoint_files
from .files import INDEX_FILE, PREFIX


def cut_checkpoint(folder: Path, num_layers: int, output: Path) -> Path:
    """Returns `output`, a checkpoint of the first `num_layers` layers of the one in `folder`.

    It has a config.json and an index of its own; weights, tokenizer and what else there is are links. The same one may
    stand there already. Raises SmolLM3Error for a number of layers that the checkpoint has not, and where something
    else is at `output`.
    """
    config = read_config(folder)
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise SmolLM3Error(
            f"num_layers is {num_layers}, allowed is a whole number from 1 to {config.num_hidden_layers}, the layers "
            f"of {folder}"
        )
    fields = read_json(folder / "config.json")
    fields |= {
        "num_hidden_layers": num_layers,
        "no_rope_layers": config.no_rope_layers[:num_layers],
        "layer_types": config.layer_types[:num_layers],
    }
    files = {name: file.relative_to(folder) for name, file in checkpoint_files(folder).items()}
    weight_map = {name: str(file) for name, file in files.items() if _layer(name) < num_layers}
    written = {
        "config.json": json.dumps(fields, indent=2) + "\n",
        INDEX_FILE: json.dumps({"metadata": {"cut_from": str(folder.absolute())}, "weight_map": weight_map}) + "\n",
    }
    if output.exists():
        for name, content in written.items():
            if not (output / name).is_file() or (output / name).read_text(encoding="utf-8") != content:
                raise SmolLM3Error(f"{output}: something else is there; remove it, or name another output")
        return output
    output.mkdir(parents=True)
    beside = {file.relative_to(folder) for file in folder.iterdir() if file.suffix != ".safetensors"}
    for file in {*files.values(), *beside} - {Path(name) for name in written}:
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        (output / file).symlink_to((folder / file).resolve())
    for name, content in written.items():
        (output / name).write_text(content, encoding="utf-8")
    return output


def _layer(name: str) -> int:
    """Returns the index of the layer that a tensor belongs to, and -1 for the model's own."""
    parts = name.removeprefix(PREFIX).split(".")
    return int(parts[1]) if parts[0] == "layers" else -1
