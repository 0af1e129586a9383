"""Train a small SmolLM3 that copies: what came once comes again in the same order.

    python tools/train_copying.py copying --minutes 25

It is for measuring prompt lookup where candidates are right (docs/performance.md): random tokens repeated are all it
learns, and all it is asked. Its MLPs are widened with zeros, which changes no answer, until its weights are enough for
the CPU runtime to compile its graphs ahead of time. It is made on demand and not kept.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

VOCABULARY, LENGTH, ROWS = 128, 48, 16
TRAINED, WIDENED = 128, 11008  # intermediate sizes; of the second the float32 weights are 69 MB
CYCLES = 2  # of the learning rate, from its highest to its lowest


def build_config(intermediate_size: int) -> SmolLM3Config:
    return SmolLM3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        no_rope_layers=[1, 0],  # one finds the token before, the other what followed on it
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=3,
        use_cache=False,
    )


def batch() -> dict[str, torch.Tensor]:
    """Rows of random tokens that repeat; only the repetition is learned."""
    ids, labels = [], []
    for _ in range(ROWS):
        passage = torch.randint(4, VOCABULARY, (int(torch.randint(4, LENGTH // 2, ())),))
        ids.append(passage.repeat(LENGTH // len(passage) + 1)[:LENGTH])
        labels.append(ids[-1].clone().index_fill(0, torch.arange(len(passage) + 1), -100))
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


def train(model: SmolLM3ForCausalLM, seconds: float) -> float:
    """Returns the last batch's loss."""
    model.train().set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    began, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        in_cycle = done * CYCLES % 1
        for group in optimizer.param_groups:
            group["lr"] = 2.5e-3 * min(1, 30 * in_cycle) * (0.02 + 0.98 * (1 + math.cos(math.pi * in_cycle)) / 2)
        loss = model(**batch(), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, done = step + 1, (time.monotonic() - began) / seconds
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    return loss.item()


def widened(model: SmolLM3ForCausalLM) -> SmolLM3ForCausalLM:
    """The same model with MLPs of WIDENED features, of which the further ones are 0."""
    wide = SmolLM3ForCausalLM(build_config(WIDENED))
    for (_, target), (_, source) in zip(wide.named_parameters(), model.named_parameters(), strict=True):
        target.data.zero_()
        target.data[tuple(slice(size) for size in source.shape)] = source.data
    return wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = SmolLM3ForCausalLM(build_config(TRAINED))
    print(f"loss {train(model, 60 * args.minutes):.4f}")
    widened(model).save_pretrained(args.output)


if __name__ == "__main__":
    main()
