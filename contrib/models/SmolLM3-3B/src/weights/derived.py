# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made of another one: its first layers, or the same with positions that YaRN stretches.

Each has a config.json of its own; weights, tokenizer and what else there is are links.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from ..model.config import LARGEST_NUMBER, CheckpointConfig, read_config
from ..model.json_files import read_json
from .checkpoint import checkpoint_files
from .files import INDEX_FILE, PREFIX

TOKENIZER_CONFIG = "tokenizer_config.json"


def cut_checkpoint(folder: Path, num_layers: int, output: Path) -> Path:
    """Returns `output`, a checkpoint of the first `num_layers` layers of the one in `folder`, with its norm and head.

    A wrong layer shows from there on. The same one may stand there already. Raises SmolLM3Error for a number of layers
    that the checkpoint has not, and where something else is at `output`.
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
    files = {name: file for name, file in checkpoint_files(folder).items() if _layer(name) < num_layers}
    return _write(folder, output, files, {"config.json": fields})


def stretch_checkpoint(folder: Path, factor: float, output: Path) -> Path:
    """Returns `output`, the checkpoint in `folder` with `factor` times its positions, by YaRN.

    Its config.json has that as transformers and vLLM read it, and its tokenizer the new length as its limit. The same
    one may stand there already. Raises SmolLM3Error as `stretched_fields` does, and where something else is at
    `output`.
    """
    written = {"config.json": stretched_fields(folder, factor)}
    if (folder / TOKENIZER_CONFIG).is_file():
        of_tokenizer = read_json(folder / TOKENIZER_CONFIG)
        if not isinstance(of_tokenizer, dict):
            raise SmolLM3Error(f"{folder / TOKENIZER_CONFIG}: a JSON object is expected; download it again")
        length = int(factor * read_config(folder).max_position_embeddings)
        written[TOKENIZER_CONFIG] = {**of_tokenizer, "model_max_length": length}
    return _write(folder, output, checkpoint_files(folder), written)


def stretched_fields(folder: Path, factor: float) -> dict[str, Any]:
    """Returns the fields of `folder`/config.json with YaRN of this factor, in the spelling that they have.

    Raises SmolLM3Error for a factor that is not above 1, and for a checkpoint whose positions are scaled already.
    """
    config = read_config(folder)
    if not 1 < factor <= LARGEST_NUMBER:
        raise SmolLM3Error(f"factor is {factor}, allowed is a number above 1, up to {LARGEST_NUMBER:g}")
    if config.rope_scaling is not None:
        raise SmolLM3Error(
            f"{folder / 'config.json'}: rope_scaling is {config.rope_scaling!r} already, and cannot be scaled by YaRN "
            "once more; take the checkpoint without it"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    fields = read_json(folder / "config.json")
    fields.pop("rope_scaling", None)
    # some versions of transformers take the ratio of the two lengths for the factor
    fields["max_position_embeddings"] = int(factor * config.max_position_embeddings)
    if fields.get("rope_parameters") is not None:  # transformers 5's spelling
        return {**fields, "rope_parameters": {**scaling, "rope_theta": config.rope_theta}}
    return {**fields, "rope_scaling": scaling}


def factor_for(config: CheckpointConfig, context: int) -> float:
    """Returns the factor by which YaRN has positions for `context` tokens.

    Raises SmolLM3Error for as many as the model has without it, or fewer.
    """
    positions = config.max_position_embeddings
    if context <= positions:
        raise SmolLM3Error(f"context is {context}, and the model has {positions} positions without YaRN; leave it out")
    factor = context / positions
    return factor if int(factor * positions) >= context else math.nextafter(factor, math.inf)


def _write(folder: Path, output: Path, files: Mapping[str, Path], written: Mapping[str, dict[str, Any]]) -> Path:
    """Writes a checkpoint of the tensors in `files`, with the JSON objects in `written` and links to all else."""
    inside = {name: file.relative_to(folder) for name, file in files.items()}
    index = {"metadata": {"made_from": str(folder.absolute())}, "weight_map": {n: str(f) for n, f in inside.items()}}
    texts = {name: json.dumps(fields, indent=2) + "\n" for name, fields in written.items()}
    texts[INDEX_FILE] = json.dumps(index) + "\n"
    if output.exists():
        for name, content in texts.items():
            if not (output / name).is_file() or (output / name).read_text(encoding="utf-8") != content:
                raise SmolLM3Error(f"{output}: something else is there; remove it, or name another output")
        return output
    output.mkdir(parents=True)
    beside = {file.relative_to(folder) for file in folder.iterdir() if file.suffix != ".safetensors"}
    for file in {*inside.values(), *beside} - {Path(name) for name in texts}:
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        (output / file).symlink_to((folder / file).resolve())
    for name, content in texts.items():
        (output / name).write_text(content, encoding="utf-8")
    return output


def _layer(name: str) -> int:
    """Returns the index of the layer that a tensor belongs to, and -1 for the model's own."""
    parts = name.removeprefix(PREFIX).split(".")
    return int(parts[1]) if parts[0] == "layers" else -1
