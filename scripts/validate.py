"""Compares an artifact's greedy tokens with transformers': python scripts/validate.py ARTIFACT"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import common
from smollm3_neuron import device
from smollm3_neuron.artifact import open_artifact
from smollm3_neuron.errors import SmolLM3Error


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--model", type=Path, help="checkpoint folder of the reference (default: the artifact's own)")
    parser.add_argument("--tp", type=int, help="refuse an artifact made for another tensor-parallel degree")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="with EOS barred (default: %(default)s)")
    common.add_device(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    place = device.choose_place(args.device)
    artifact = open_artifact(args.artifact, place, tp_degree=args.tp)
    folder = args.model or Path(artifact.manifest["model"]["folder"])
    if not (folder / "config.json").is_file():
        raise SmolLM3Error(f"{folder}: the checkpoint is not there any more; pass it with --model FOLDER")
    import torch
    from smollm3_neuron.generation import generate
    from smollm3_neuron.reference import PUBLISHED_PROMPTS, load_reference, reference_generate, token_match

    if place == "cpu":
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    tokenizer, model = artifact.tokenizer(), artifact.load()
    adapter = artifact.manifest["model"].get("adapter")
    reference = load_reference(folder, getattr(torch, artifact.settings.torch_dtype), adapter and adapter["folder"])
    texts = list(PUBLISHED_PROMPTS)
    if (folder / "prompts.json").is_file():  # a checkpoint of this repository: its own prompts, the held-out ones marked
        of_folder = json.loads((folder / "prompts.json").read_text())
        texts = [*of_folder["published"], *(entry["prompt"] for entry in of_folder["held_out"])]
    prompts = tokenizer(texts)["input_ids"]
    eos = artifact.eos_token_ids()
    ours = generate(model, prompts, args.max_new_tokens, barred_token_ids=eos, pad_token_id=tokenizer.pad_token_id or 0)
    print(f"{'token match':>11}  {'smallest margin':>15}  prompt -> answer")
    matches, margins = [], []
    for text, prompt, result in zip(texts, prompts, ours):
        expected = reference_generate(reference, prompt, len(result.tokens), eos)
        matches.append(token_match(result.tokens, expected.tokens))
        margins.append(min(result.margins))
        answer = tokenizer.decode(result.tokens).split("\n")[0]
        print(f"{matches[-1]:>10.1%}  {margins[-1]:>15.3f}   {text!r} -> {answer!r}")
    print(
        f"\n{sum(match == 1 for match in matches)} of {len(matches)} prompts equal to transformers' ({place}, tp_degree "
        f"{artifact.settings.tp_degree}, {artifact.settings.torch_dtype}, {args.max_new_tokens} new tokens each, EOS barred); "
        f"smallest margin between the two best logits {min(margins):.3f}"
    )
    sys.exit(0 if all(match == 1 for match in matches) else 1)


if __name__ == "__main__":
    common.run(main)
