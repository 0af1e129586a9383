"""Names the first layer and value that differ from transformers'.

    python scripts/inspect_layers.py artifacts/tiny-tp2

Per layer: RoPE or NoPE as the config has it and as the layer behaves, whether input + attention + MLP is the output to
the bit, and the value that is furthest from transformers'. With --bisect, also on a device: the first wrong layer, by
compiling and judging models of the first layers. Exit code 0: all is right; 1: something is not; 2: it cannot be
inspected.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import bisection
import common

from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.chat import encode
from smollm3_neuron.machine.preflight import choose_place
from smollm3_neuron.machine.runtime import emulated_devices
from smollm3_neuron.model.config import read_config

CONTRIB = Path(__file__).resolve().parents[1] / "contrib"
KINDS = {True: "RoPE", False: "NoPE"}


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "ARTIFACT")
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the folder that compile.py made")
    inputs = parser.add_argument_group("what is compared")
    inputs.add_argument("--model", type=Path, help="checkpoint folder of the reference (default: the artifact's own)")
    inputs.add_argument("--prompt", default="The square root of 144 is", help="default: %(default)r")
    inputs.add_argument(
        "--bisect",
        action="store_true",
        help="compile models of the artifact's first layers and judge them, halving: 5 to 6 compiles of 36 layers",
    )
    place = parser.add_argument_group("where it runs and what is written")
    common.add_device(place)
    common.add_verify(place)
    place.add_argument(
        "--nxd-source",
        metavar="NXD_SRC:NXDI_SRC",
        help="the model code on the library's sources in their CPU mode, TP 1, with the artifact's checkpoint and "
        "settings",
    )
    place.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    place.add_argument(
        "--values",
        type=Path,
        metavar="FILE.safetensors",
        help="the values themselves, the model's as layers.N.NAME and transformers' as reference.layers.N.NAME",
    )
    place.add_argument("--layers", type=int, nargs="+", metavar="N", help="with --values, which layers (default: all)")
    return parser.parse_args()


def layers_to_write(args: argparse.Namespace, count: int) -> list[int]:
    if args.layers and not args.values:
        raise SmolLM3Error("--layers says which layers go into the file of --values: pass it, too")
    wrong = [layer for layer in args.layers or () if not 0 <= layer < count]
    if wrong:
        raise SmolLM3Error(f"--layers has {wrong[0]}, allowed are 0 to {count - 1}")
    return args.layers or list(range(count))


def write_values(path: Path, inspection, tokens: list[int], layers: list[int]) -> None:
    from safetensors.torch import save_file

    from smollm3_neuron.check.inspection import named_values

    own = named_values(inspection.values, tokens, layers)
    theirs = named_values(inspection.reference, tokens, layers)
    save_file({**own, **{f"reference.{name}": tensor for name, tensor in theirs.items()}}, path)


def on_cpu_runtime(artifact: Artifact):
    """The application and its ranks, uncompiled over the artifact's own shards."""
    from nxd_cpu_compiler.eager_ranks import EagerRanks
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    app = NeuronSmolLM3ForCausalLM(str(artifact.path))
    return app, EagerRanks(app, artifact.path / "weights")


def on_sources(artifact: Artifact, nxd_source: str):
    """The application in the library's CPU mode, and None: its one rank is the application's own model."""
    sys.path.append(str(CONTRIB))
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
    folder = Path(artifact.manifest["model"]["folder"])
    # CPU mode leaves the layers of 8-bit weights as they are
    settings = replace(artifact.settings, tp_degree=1, quantized=False, modules_to_not_convert=None)
    # nor does it verify tokens; and logits are looked at, which a graph that chooses itself does not return
    settings = replace(settings, enable_fused_speculation=False, speculation_length=0, on_device_sampling_config=None)
    config = build_config(folder, settings)
    config.neuron_config.on_cpu = True
    app = model_cls(str(folder), config)
    cpu_mode.to_cpu(app)
    return app, None


def check_inspectable(place: str) -> None:
    """SmolLM3Error where the artifact's graphs cannot be looked into."""
    ways = {
        "neuron": "run it in an environment without the SDK, on an artifact of the same checkpoint for the CPU",
        "emulated": "give --nxd-source, by which the model code runs on the library's sources with this artifact's "
        "checkpoint and settings",
    }
    if place in ways:
        raise SmolLM3Error(
            "inspect_layers.py cannot look into a device: NxD Inference 0.7 and 0.8 capture no tensors of a text "
            f"model; use --bisect, or {ways[place]}"
        )


def open_for_inspection(args: argparse.Namespace) -> Artifact:
    if args.nxd_source:
        place = "emulated" if emulated_devices() else "cpu"
    else:
        place = choose_place(args.device)
        check_inspectable(place)
    artifact = open_artifact(args.artifact, place, verify=args.verify)
    common.note_foreign_code(artifact)
    if args.nxd_source and artifact.adapter:
        raise SmolLM3Error(f"--nxd-source, but {artifact.adapter} is merged into the artifact: leave --nxd-source out")
    return artifact


def prompt_tokens(artifact: Artifact, prompt: str) -> list[int]:
    (tokens,) = encode(artifact.tokenizer(), [prompt])
    if not 3 <= len(tokens) <= artifact.settings.max_context_length:
        raise SmolLM3Error(
            f"--prompt has {len(tokens)} tokens, allowed are 3 to {artifact.settings.max_context_length}"
        )
    return tokens


def value_name(key: tuple[int | None, str]) -> str:
    layer, name = key
    return name if layer is None else f"layer {layer}, {name}"


def difference_text(difference) -> str:
    return f"{difference.error:.1e} of {difference.tolerance:.1e}{' WRONG' if difference.is_wrong else ''}"


def print_layers(inspection) -> None:
    print("\n".join(inspection.tree))
    print("\nlayer  config  projections  spacing  identity  furthest value, of what is allowed")
    for layer, is_rope in enumerate(inspection.rope_of_config):
        differences = {name: value for (index, name), value in inspection.differences.items() if index == layer}
        name, furthest = max(differences.items(), key=lambda item: item[1].error / item[1].tolerance)
        probes = f"{KINDS[inspection.rope_of_projections[layer]]:<11}  {KINDS[inspection.rope_of_spacing[layer]]:<7}"
        identity = "broken" if layer in inspection.broken_identity else "exact"
        print(f"{layer:>5}  {KINDS[is_rope]:<6}  {probes}  {identity:<8}  {name} {difference_text(furthest)}")
    for (layer, name), difference in inspection.differences.items():
        if layer is None:
            print(f"{name}: {difference_text(difference)}")


def print_verdict(inspection) -> None:
    differences, first = inspection.differences, inspection.first
    if inspection.disagreeing:
        print(f"layers {inspection.disagreeing} behave otherwise than the config says")
    if inspection.broken_identity:
        print(f"layers {inspection.broken_identity}: input + attention + MLP is not the output")
    if first:
        print(f"first difference: {value_name(first)}: off by {difference_text(differences[first])}")
    if inspection.is_right:
        print(f"{len(differences)} values of {len(inspection.rope_of_config)} layers agree with transformers'")


def as_dict(inspection) -> dict:
    first = inspection.first
    probes = zip(inspection.rope_of_config, inspection.rope_of_projections, inspection.rope_of_spacing)
    return {
        "first": first and {"layer": first[0], "name": first[1]},
        "layers": [
            {
                "rope_of_config": of_config,
                "rope_of_projections": of_projections,
                "rope_of_spacing": of_spacing,
                "spacing_size": inspection.spacing_sizes[layer],
                "spacing_keeps_position_0": inspection.spacing_keeps_first[layer],
                "identity": layer not in inspection.broken_identity,
            }
            for layer, (of_config, of_projections, of_spacing) in enumerate(probes)
        ],
        "values": [
            {"layer": layer, "name": name, **asdict(difference)}
            for (layer, name), difference in inspection.differences.items()
        ],
        "tree": inspection.tree,
    }


def bisect(args: argparse.Namespace) -> None:
    if args.nxd_source:
        raise SmolLM3Error("--bisect compiles, and --nxd-source compiles nothing: leave one out")
    artifact = open_artifact(args.artifact, choose_place(args.device), verify=args.verify)
    common.quiet()
    found = bisection.find_wrong_layer(artifact, args.model, args.device)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bisection.report(artifact, found))


def main() -> None:
    args = parse_args()
    common.check_outputs(args.json, args.values)
    if args.bisect:
        bisect(args)
    artifact = open_for_inspection(args)
    folder = common.reference_folder(args.model, artifact)
    common.quiet()
    tokens = prompt_tokens(artifact, args.prompt)
    layers = layers_to_write(args, read_config(folder).num_hidden_layers)
    app, ranks = on_sources(artifact, args.nxd_source) if args.nxd_source else on_cpu_runtime(artifact)
    from smollm3_neuron.check.inspection import inspect

    inspection = inspect(app, folder, tokens, ranks, artifact.adapter)
    print_layers(inspection)
    if args.values:
        write_values(args.values, inspection, tokens, layers)
    if args.json:
        args.json.write_text(json.dumps(as_dict(inspection), indent=1) + "\n")
    print_verdict(inspection)
    sys.exit(not inspection.is_right)


if __name__ == "__main__":
    common.run(main, failed=2)
