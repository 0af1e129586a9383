"""Names the first layer and value that differ from transformers': python scripts/inspect_layers.py ARTIFACT

Per layer: RoPE or NoPE as the config has it and as the layer behaves, whether input + attention + MLP is the output to
the bit, and the value that is furthest from transformers'. Exit code 0: all is right; 1: something is not; 2: it cannot
be inspected.
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import common

from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import choose_place

CONTRIB = Path(__file__).resolve().parents[1] / "contrib"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--model", type=Path, help="checkpoint folder of the reference (default: the artifact's own)")
    parser.add_argument("--prompt", default="The square root of 144 is", help="default: %(default)r")
    parser.add_argument(
        "--nxd-source",
        metavar="NXD_SRC:NXDI_SRC",
        help="the model code on the library's sources in their CPU mode, TP 1, with the artifact's checkpoint and settings",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was found")
    common.add_device(parser)
    return parser.parse_args()


def on_cpu_runtime(artifact: Artifact):
    """The application and its ranks, uncompiled over the artifact's own shards."""
    from nxd_cpu_compiler.eager_ranks import EagerRanks
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    app = NeuronSmolLM3ForCausalLM(str(artifact.path))
    return app, EagerRanks(app, artifact.path / "weights")


def on_sources(artifact: Artifact, nxd_source: str, folder: Path):
    """The application in the library's CPU mode."""
    sys.path.append(str(CONTRIB))
    from dataclasses import replace

    import torch

    from nxd_sources import cpu_mode
    from nxd_sources.release import SMOLLM3, Release

    try:
        release = Release.find(nxd_source)
    except ValueError as error:
        raise SmolLM3Error(f"--nxd-source: {error}") from None
    model_cls = cpu_mode.import_model([release.nxd, release.nxdi], SMOLLM3)
    store = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    config = build_config(folder, replace(artifact.settings, tp_degree=1))
    config.neuron_config.on_cpu = True
    app = model_cls(str(folder), config)
    cpu_mode.to_cpu(app)
    return app, None


def name_of(key: tuple[int | None, str]) -> str:
    layer, name = key
    return name if layer is None else f"layer {layer}, {name}"


def told(difference) -> str:
    return f"{difference.error:.1e} of {difference.tolerance:.1e}{' WRONG' if difference.is_wrong else ''}"


def main() -> None:
    args = parse_args()
    common.check_outputs(args.json)
    place = "cpu" if args.nxd_source else choose_place(args.device)
    if place == "neuron":
        raise SmolLM3Error(
            "inspect_layers.py cannot look into a device: NxD Inference 0.7 and 0.8 capture no tensors of a text model; run it "
            "in an environment without the SDK, on an artifact of the same checkpoint for the CPU"
        )
    artifact = open_artifact(args.artifact, place)
    if args.nxd_source and artifact.adapter:
        raise SmolLM3Error(f"--nxd-source, but {artifact.adapter} is merged into the artifact: leave --nxd-source out")
    own = Path(artifact.manifest["model"]["folder"])
    folder = args.model or own
    if not (folder / "config.json").is_file():
        raise SmolLM3Error(f"{folder}: the checkpoint is not there any more; pass it with --model FOLDER")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    prompt = artifact.tokenizer()(args.prompt)["input_ids"]
    if not 3 <= len(prompt) <= artifact.settings.max_context_length:
        raise SmolLM3Error(
            f"--prompt has {len(prompt)} tokens, allowed are 3 to {artifact.settings.max_context_length}"
        )
    app, ranks = on_sources(artifact, args.nxd_source, own) if args.nxd_source else on_cpu_runtime(artifact)
    from smollm3_neuron.check.inspection import inspect

    found = inspect(app, folder, prompt, ranks, artifact.adapter)
    print("\n".join(found.tree))
    print("\nlayer  config  projections  spacing  identity  furthest value, of what is allowed")
    kinds = {True: "RoPE", False: "NoPE"}
    for layer, flag in enumerate(found.rope_of_config):
        of_layer = {name: d for (index, name), d in found.differences.items() if index == layer}
        name, worst = max(of_layer.items(), key=lambda item: item[1].error / item[1].tolerance)
        probes = f"{kinds[found.rope_of_projections[layer]]:<11}  {kinds[found.rope_of_spacing[layer]]:<7}"
        identity = "broken" if layer in found.broken_identity else "exact"
        print(f"{layer:>5}  {kinds[flag]:<6}  {probes}  {identity:<8}  {name} {told(worst)}")
    for (layer, name), difference in found.differences.items():
        if layer is None:
            print(f"{name}: {told(difference)}")
    if args.json:
        args.json.write_text(json.dumps(as_dict(found), indent=1) + "\n")
    if found.disagreeing:
        print(f"layers {found.disagreeing} behave otherwise than the config says")
    if found.broken_identity:
        print(f"layers {found.broken_identity}: input + attention + MLP is not the output")
    if found.first:
        print(f"first difference: {name_of(found.first)}: off by {told(found.differences[found.first])}")
    if found.is_right:
        print(f"{len(found.differences)} values of {len(found.rope_of_config)} layers agree with transformers'")
    sys.exit(not found.is_right)


def as_dict(found) -> dict:
    first = found.first
    values = [{"layer": layer, "name": name, **asdict(value)} for (layer, name), value in found.differences.items()]
    probes = zip(found.rope_of_config, found.rope_of_projections, found.rope_of_spacing)
    layers = [
        {
            "rope_of_config": config,
            "rope_of_projections": projections,
            "rope_of_spacing": spacing,
            "identity": index not in found.broken_identity,
        }
        for index, (config, projections, spacing) in enumerate(probes)
    ]
    return {
        "first": first and {"layer": first[0], "name": first[1]},
        "layers": layers,
        "values": values,
        "tree": found.tree,
    }


if __name__ == "__main__":
    common.run(main)
