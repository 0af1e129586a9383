"""inspect_layers.py --bisect: artifacts of the first layers, compiled and judged until the first wrong layer is known.

Nothing can be looked at inside of a model on a device, but a model of its first N layers, with its final norm and head,
is a whole one, and so is transformers' of as many layers.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import common

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.folder import Artifact
from smollm3_neuron.check.bisection import first_wrong_layer
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.derived import cut_checkpoint

NEW_TOKENS = 4


def is_called_wrong(artifact: Path, model: Path, device: str) -> bool:
    """What validate.py says, in a process of its own: a device is given back when that ends."""
    command = [sys.executable, str(Path(__file__).with_name("validate.py")), str(artifact), "--model", str(model)]
    command += ["--device", device, "--max-new-tokens", str(NEW_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SmolLM3Error(f"{artifact}: could not be judged: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.returncode == 1


def find_wrong_layer(artifact: Artifact, model: Path | None, device: str) -> dict:
    """Which layer of the artifact is the first wrong one, and what was judged; `model`: the reference's checkpoint."""
    if artifact.adapter:
        raise SmolLM3Error(f"--bisect, but {artifact.adapter} is merged into the artifact: bisect one without it")
    folder, reference = Path(artifact.manifest["model"]["folder"]), common.reference_folder(model, artifact)
    layers = read_config(folder).num_hidden_layers
    if read_config(reference).num_hidden_layers != layers:
        raise SmolLM3Error(f"{reference}: another number of layers than {folder}, which has {layers}")
    judged = {}

    def say(count: int, is_wrong: bool) -> bool:
        judged[count] = is_wrong
        print(f"the first {count} layers: {'wrong' if is_wrong else 'right'}", flush=True)
        return is_wrong

    if not is_called_wrong(artifact.path, reference, device):
        print(f"all {layers} layers: right")
        return {"layer": None, "judged": {layers: False}}
    print(f"all {layers} layers: wrong")
    # beside the artifact: there is room for it, and a compile of a part takes less
    with tempfile.TemporaryDirectory(prefix=f".{artifact.path.name}-", dir=artifact.path.resolve().parent) as scratch:

        def is_wrong(count: int) -> bool:
            cut, part = (Path(scratch) / f"{name}-{count}" for name in ("checkpoint", "artifact"))
            compile_artifact(cut_checkpoint(folder, count, cut), part, artifact.settings, artifact.place)
            right = cut_checkpoint(reference, count, Path(scratch) / f"reference-{count}")
            return say(count, is_called_wrong(part, right, device))

        return {"layer": first_wrong_layer(layers, is_wrong), "judged": judged}


def report(artifact: Artifact, found: dict) -> bool:
    """Prints what was found; whether something is wrong."""
    if found["layer"] is not None:
        print(f"layer {found['layer']} is the first wrong one")
    elif any(found["judged"].values()) or len(found["judged"]) > 1:
        print(f"every part that was compiled is right: {artifact.path} has other weights or graphs; compile it again")
    else:
        print("nothing is wrong")
        return False
    return True
