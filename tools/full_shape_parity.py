"""Logits of SmolLM3-3B's full shape beside transformers', in float32: python tools/full_shape_parity.py

Makes the checkpoint itself (random weights, 6.15 GB, in a temporary folder that it removes), compiles it for the CPU
runtime (12.3 GB more) and compares the logits of every token of one prompt: as generating token by token gives them,
and the last one's as the pass over the whole prompt gives it. transformers' layers are read one after the other, so
that neither model is ever held whole.
"""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import common

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.streamed_reference import StreamedModel
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

TOKENS = 78  # as many as the prompt has whose figures a Flax port of the model publishes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=36, help="fewer make a smaller model (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made (default: the system's)")
    return parser.parse_args()


def some_prompt(vocab_size: int) -> list[int]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (TOKENS,), generator=draw).tolist()


def model_logits(checkpoint: Path, output: Path, prompt: list[int], tp_degree: int) -> tuple[torch.Tensor, ...]:
    """Those after each token of `prompt`, [tokens, vocab_size], and those after the last one, [1, vocab_size]: the
    first as the artifact's token generation gives them, the others as its context encoding does."""
    ensure_neuronx()
    settings = Settings(tp_degree=tp_degree, seq_len=128, torch_dtype="float32")
    model = compile_artifact(checkpoint, output, settings, "cpu").load()
    run = functools.partial(generate, model, keep_logits=True)
    one_by_one = run([prompt[:1]], len(prompt), forced=[[*prompt[1:], 0]])
    at_once = run([prompt], 1)
    return tuple(torch.stack(list(results[0].logits)).float() for results in (one_by_one, at_once))


def reference_logits(checkpoint: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' after each token of `prompt` in float32, [tokens, vocab_size]."""
    (logits,) = StreamedModel(checkpoint, torch.float32).logits([prompt], [len(prompt)])
    return logits


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """The largest and the mean absolute difference, and how many rows have the same best token."""
    error = (found - expected).abs()
    agree = (found.argmax(-1) == expected.argmax(-1)).sum().item()
    return f"at most {error.max():.1e}, in the mean {error.mean():.1e}, best token equal in {agree} of {len(found)}"


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="smollm3-parity-", dir=args.folder) as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        checkpoint.mkdir()
        config = {**SMOLLM3_3B, "num_hidden_layers": args.layers}
        torch.manual_seed(0)
        parameters = common.make_checkpoint(checkpoint, config)
        prompt = some_prompt(config["vocab_size"])
        print(f"{parameters:,} parameters, random; {len(prompt)} tokens; float32; the CPU runtime at TP {args.tp}")
        one_by_one, at_once = model_logits(checkpoint, Path(scratch) / "artifact", prompt, args.tp)
        expected = reference_logits(checkpoint, prompt)
        print(f"transformers' logits: at most {expected.abs().max():.2f}, standard deviation {expected.std():.2f}")
        print(f"token by token: {difference(one_by_one, expected)}")
        print(f"prompt at once, its last token: {difference(at_once, expected[-1:])}")


if __name__ == "__main__":
    common.run(main)
