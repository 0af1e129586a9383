"""Answers prompts with an artifact that compile.py made.

    python scripts/generate.py artifacts/tiny-tp2 "The square root of 144 is"

A prompt is continued as it stands; with --chat it is what a user says.
"""

import argparse
import sys
from pathlib import Path

import common

from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat
from smollm3_neuron.machine.preflight import choose_place

NEW_TOKENS = 128
CLEANED_UP = 16  # characters at the end of a text that cleaning up may still change


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "ARTIFACT PROMPT [PROMPT ...]")
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the folder")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="several are answered in one batch")
    parser.add_argument_group("adapters").add_argument(
        "--adapter",
        action="append",
        metavar="NAME",
        help="an adapter of compile.py's --lora, or none: one for all prompts, or one for each in their order",
    )
    add_chat(parser.add_argument_group("chat"))
    add_sampling(parser.add_argument_group("how many tokens, and which"))
    place = parser.add_argument_group("where it runs and what is checked")
    common.add_device(place)
    place.add_argument("--tp", type=int, metavar="N", help="refuse an artifact made for another tensor-parallel degree")
    common.add_verify(place)
    return parser.parse_intermixed_args()  # prompts may stand behind options


def add_chat(group) -> None:
    group.add_argument(
        "--chat", action="store_true", help="each prompt is a user's turn, rendered by the chat template"
    )
    group.add_argument(
        "--think", action=argparse.BooleanOptionalAction, help="reasoning mode of the chat (default: on)"
    )
    group.add_argument(
        "--messages",
        type=Path,
        metavar="FILE",
        help="with --chat, a conversation in place of prompts: JSON, its messages, or an object with messages and "
        + ", ".join(chat.VARIABLES),
    )
    group.add_argument("--today", metavar="DATE", help="the date that the chat template writes (default: today)")


def add_sampling(group) -> None:
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"default: {NEW_TOKENS}, or as many as the context takes"
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: greedy (default: in a chat the checkpoint's own sampling, else 0)",
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens, P of the probability"
    )
    group.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: from all (default: 50)"
    )
    group.add_argument(
        "--prompt-lookup",
        type=int,
        metavar="K",
        help="guess up to K tokens from what followed before in prompt and answer, and verify them in one step; the "
        "answer stays the same. Needs compile.py --speculation-length above K",
    )
    group.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")


class Printer:
    """Prints the text of one prompt's tokens as they come; several prompts are printed in turn at the end."""

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
            if text.endswith("\ufffd"):  # the bytes of one character may come in several tokens
                return
            # cleaning up takes spaces away before what comes, such as " n't": what it may reach waits
            settled = len(text) - (CLEANED_UP if self.tokenizer.clean_up_tokenization_spaces else 0)
            if settled > self.printed:
                print(text[self.printed : settled], end="", flush=True)
                self.printed = settled

    def close(self) -> None:
        if len(self.prompts) == 1:
            print(self.text(0)[self.printed :])
        else:
            for row, prompt in enumerate(self.prompts):
                print(f"[{row}] {prompt}{self.text(row)}")


def check_args(args: argparse.Namespace) -> None:
    if args.think is not None and not args.chat:
        raise SmolLM3Error("--think and --no-think are modes of the chat: add --chat")
    if (args.messages or args.today) and not args.chat:
        raise SmolLM3Error("--messages and --today are of the chat: add --chat")
    if bool(args.prompts) == bool(args.messages):
        raise SmolLM3Error("give prompts, or with --chat --messages FILE, and not both")


def chat_prompts(args: argparse.Namespace, tokenizer) -> list[str]:
    """What the chat template makes of the prompts or the conversation; the arguments win over what the file says."""
    conversations = [{"messages": [{"role": "user", "content": prompt}]} for prompt in args.prompts]
    if args.messages:
        conversations = [chat.read_conversation(args.messages)]
    given = {"enable_thinking": args.think, "today": args.today}
    given = {name: value for name, value in given.items() if value is not None}
    return [chat.render(tokenizer, **{**conversation, **given}) for conversation in conversations]


def sampling_parameters(args: argparse.Namespace, artifact: Artifact) -> dict:
    """The fields of the checkpoint's generation_config.json with the arguments in their places."""
    from smollm3_neuron.generate.sampling import asked_fields

    given = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    given = {name: value for name, value in given.items() if value is not None}
    on_device = artifact.settings.on_device_sampling_config
    fields = asked_fields(artifact.generation_config(), given, args.chat, on_device)
    if not fields.get("do_sample") and (args.top_k or args.top_p):
        raise SmolLM3Error(
            "--top-k and --top-p choose among samples, but the temperature is 0: give --temperature, too"
        )
    return fields


def adapter_ids(names: list[str] | None, lora_config: dict | None, count: int) -> list[int] | None:
    """The place of each prompt's adapter among those that the artifact was compiled with; behind the last is none."""
    if names is None:
        return None
    known = [*(lora_config or {}).get("lora_ckpt_paths", {}), "none"]
    if lora_config is None:
        raise SmolLM3Error(
            f"--adapter {names[0]}, but the artifact has no adapters: compile it with --lora NAME=FOLDER"
        )
    if unknown := [name for name in names if name not in known]:
        raise SmolLM3Error(f"--adapter is {unknown[0]!r}, the artifact has {', '.join(known)}")
    if len(names) not in (1, count):
        raise SmolLM3Error(f"--adapter is given {len(names)} times for {count} prompts: give it once, or for each")
    ids = [known.index(name) for name in names]
    return ids * count if len(ids) == 1 else ids


def note_cut_answers(max_new_tokens: int, prompts: list[list[int]], seq_len: int) -> None:
    """Prints a line per prompt whose answer the cache will cut short. The last token needs no place in it."""
    for index, prompt in enumerate(prompts):
        left = seq_len - len(prompt) + 1
        if max_new_tokens > left > 0:
            print(
                f"note: --max-new-tokens {max_new_tokens}, but prompt {index} leaves {left} of {seq_len}",
                file=sys.stderr,
            )


def note_candidates(results: list) -> None:
    """A line that says how many candidates were right, and how many steps there were for how many tokens."""
    accepted, offered = (sum(getattr(result, name) for result in results) for name in ("accepted", "offered"))
    tokens = sum(len(result.tokens) for result in results)
    share = f" ({accepted / offered:.0%})" if offered else ""
    print(
        f"note: {accepted} of {offered} candidates accepted{share}: {tokens - accepted} steps for {tokens} tokens",
        file=sys.stderr,
    )


def main() -> None:
    args = parse_args()
    check_args(args)
    place = choose_place(args.device)
    artifact = open_artifact(args.artifact, place, tp_degree=args.tp, verify=args.verify)
    common.note_foreign_code(artifact)
    from smollm3_neuron.generate.generation import check_prompts, generate
    from smollm3_neuron.generate.sampling import Sampling
    from smollm3_neuron.generate.speculation import check_prompt_lookup

    fields = sampling_parameters(args, artifact)
    try:
        sampling = Sampling.of(fields, args.seed)
    except SmolLM3Error as error:
        raise SmolLM3Error(f"{error} (arguments, and {args.artifact / 'generation_config.json'})") from None
    if args.prompt_lookup is not None:
        check_prompt_lookup(args.prompt_lookup, artifact.settings.speculation_length)
    if place == "cpu":
        common.quiet()
    tokenizer = artifact.tokenizer()
    texts = chat_prompts(args, tokenizer) if args.chat else args.prompts
    prompts = chat.encode(tokenizer, texts, add_special_tokens=not args.chat)
    max_new_tokens = NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
    check_prompts(prompts, max_new_tokens, artifact.settings.max_context_length)
    if args.max_new_tokens is not None:
        note_cut_answers(args.max_new_tokens, prompts, artifact.settings.seq_len)
    adapters = adapter_ids(args.adapter, artifact.settings.lora_config, len(prompts))
    model = artifact.load()
    printer = Printer(tokenizer, [""] if args.chat and len(texts) == 1 else args.prompts)
    results = generate(
        model,
        prompts,
        max_new_tokens,
        eos_token_ids=artifact.eos_token_ids(),
        pad_token_id=tokenizer.pad_token_id or 0,
        sampling=sampling,
        on_token=printer,
        tokenizer=tokenizer,
        prompt_lookup=args.prompt_lookup,
        adapter_ids=adapters,
    )
    printer.close()
    if args.prompt_lookup is not None:
        note_candidates(results)


if __name__ == "__main__":
    common.run(main)
    sys.stdout.flush()
