"""Answers prompts with an artifact: python scripts/generate.py ARTIFACT "The square root of 144 is" """

import argparse
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
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--tp", type=int, help="refuse an artifact made for another tensor-parallel degree")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's turn, rendered by the chat template")
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, help="reasoning mode of the chat (default: on)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="read the weights' digests too before loading")
    common.add_device(parser)
    return parser.parse_args()


class Printer:
    """Prints the text of one prompt's tokens as they come; several prompts are printed one after the other at the end."""

    def __init__(self, tokenizer, prompts: list[str]):
        self.tokenizer, self.prompts = tokenizer, prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.printed = 0
        if len(prompts) == 1:
            print(prompts[0], end="", flush=True)

    def text(self, row: int) -> str:
        return self.tokenizer.decode(self.tokens[row], skip_special_tokens=True)

    def __call__(self, row: int, token: int) -> None:
        self.tokens[row].append(token)
        if len(self.prompts) == 1:
            text = self.text(0)
            if not text.endswith("\ufffd"):  # the bytes of one character may come in several tokens
                print(text[self.printed :], end="", flush=True)
                self.printed = len(text)

    def close(self) -> None:
        if len(self.prompts) == 1:
            print(self.text(0)[self.printed :])
        else:
            for row, prompt in enumerate(self.prompts):
                print(f"[{row}] {prompt}{self.text(row)}")


def main() -> None:
    args = parse_args()
    if args.think is not None and not args.chat:
        raise SmolLM3Error("--think and --no-think are modes of the chat: add --chat")
    place = device.choose_place(args.device)
    artifact = open_artifact(args.artifact, place, tp_degree=args.tp, verify=args.verify)
    from smollm3_neuron.generation import Sampling, generate

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if place == "cpu":
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    tokenizer = artifact.tokenizer()
    texts = args.prompts
    if args.chat:
        if tokenizer.chat_template is None:
            raise SmolLM3Error(f"{args.artifact}: its checkpoint has no chat template; leave --chat out")
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=args.think is not False,
            )
            for prompt in texts
        ]
    prompts = tokenizer(texts, add_special_tokens=not args.chat)["input_ids"]
    model = artifact.load()
    printer = Printer(tokenizer, [""] if args.chat and len(texts) == 1 else args.prompts)
    generate(
        model,
        prompts,
        args.max_new_tokens,
        eos_token_ids=artifact.eos_token_ids(),
        pad_token_id=tokenizer.pad_token_id or 0,
        sampling=sampling,
        on_token=printer,
    )
    printer.close()


if __name__ == "__main__":
    common.run(main)
    sys.stdout.flush()
