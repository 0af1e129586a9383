# SPDX-License-Identifier: Apache-2.0
import json
import os

import torch
from safetensors.torch import load_file


def load_state_dict(state_dict_dir: str) -> dict[str, torch.Tensor]:
    """The safetensors checkpoint of a folder, one file or many. FileNotFoundError if there is none."""
    path = os.path.join(state_dict_dir, "model.safetensors")
    if os.path.isfile(path):
        return load_file(path)
    if not os.path.isfile(f"{path}.index.json"):
        raise FileNotFoundError(f"no model.safetensors, in one file or with an index, in {state_dict_dir}")
    with open(f"{path}.index.json", encoding="utf-8") as index:
        files = sorted(set(json.load(index)["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(os.path.join(state_dict_dir, file)).items()}
