"""Answers a file of prompts or conversations, and goes on where it was interrupted.

    python scripts/batch.py prompts.jsonl answers.jsonl --artifact artifacts/tiny-tp2 --engine local

INPUT is a file of JSONL or Parquet, or a folder of them. A row has a prompt or messages and, if it likes, an id,
max_tokens, temperature, top_p, top_k, seed, stop and tools; or it has the form of OpenAI's batch files. OUTPUT gets a
line of JSON per answered row. Run again, rows that are in it are not answered again. What cannot be answered is
written, with the reason, to a file beside it, whose name has .bad in it; the exit code is 1 then.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common
from tqdm import tqdm

from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.batch.journal import Journal
from smollm3_neuron.batch.rows import BadRow, input_files, read_rows
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import choose_place
from smollm3_neuron.machine.runtime import device_place
from smollm3_neuron.vllm.ray_cluster import connect


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "INPUT OUTPUT --artifact ARTIFACT")
    parser.add_argument("input", type=Path, metavar="INPUT", help="a .jsonl or .parquet file, or a folder of them")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a .jsonl file; one that is there is gone on with")
    engine = parser.add_argument_group("who answers")
    engine.add_argument("--artifact", type=Path, required=True, metavar="ARTIFACT", help="the folder")
    engine.add_argument(
        "--engine",
        choices=("ray", "local"),
        default="ray",
        help="ray: vLLM on each group of NeuronCores of a Ray cluster; local: this process alone (default: ray)",
    )
    engine.add_argument("--replicas", type=int, metavar="N", help="with ray, how many groups of cores (default: all)")
    common.add_device(engine)
    common.add_verify(engine)
    answers = parser.add_argument_group("the answers")
    answers.add_argument("--max-new-tokens", type=int, metavar="N", help="for rows that do not say (default: 128)")
    return parser.parse_args()


def check_args(args: argparse.Namespace) -> None:
    files = input_files(args.input)
    if args.output.suffix != ".jsonl":
        raise SmolLM3Error(f"{args.output}: its name ends with {args.output.suffix!r}, allowed is .jsonl")
    if args.output.resolve() in [file.resolve() for file in files] or (
        args.input.is_dir() and args.output.resolve().parent == args.input.resolve()
    ):
        raise SmolLM3Error(f"{args.output}: lies where the input is read; name a file elsewhere")
    common.check_outputs(args.output)
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise SmolLM3Error(f"--max-new-tokens is {args.max_new_tokens}, allowed is a whole number of at least 1")
    if args.device != "auto" and args.engine == "ray":
        raise SmolLM3Error(f"--device {args.device} is for --engine local: with Ray it is a cluster's devices that run")
    if args.replicas is not None and (args.engine != "ray" or args.replicas < 1):
        raise SmolLM3Error(f"--replicas is {args.replicas}, allowed is a number of at least 1, with --engine ray")


class Count:
    """What became of the rows."""

    def __init__(self):
        self.answered = self.before = self.bad = self.tokens = 0
        self.began = time.monotonic()

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        rows = self.answered + self.before + self.bad
        return (
            f"{rows} rows: {self.answered} answered, {self.before} answered before, {self.bad} bad; "
            f"{self.tokens} tokens in {seconds:.1f} s, {self.tokens / seconds:.1f} tokens/s"
        )


def pending(args: argparse.Namespace, artifact: Artifact, journal: Journal, count: Count) -> Iterator:
    """The requests that are still to be answered; bad rows are written on the way."""
    from smollm3_neuron.batch.requests import NEW_TOKENS, Preparation

    prepare = Preparation(artifact, args.max_new_tokens or NEW_TOKENS)
    for row in read_rows(args.input):
        if not isinstance(row, BadRow):
            if row.id in journal.done:
                count.before += 1
                continue
            try:
                yield prepare(row)
                continue
            except SmolLM3Error as error:
                row = BadRow(row.id, row.place, str(error))
        count.bad += 1
        journal.write_bad(row)


def answer(args: argparse.Namespace, artifact: Artifact, place: str, journal: Journal, count: Count) -> None:
    from smollm3_neuron.batch.requests import written

    requests = pending(args, artifact, journal, count)
    if args.engine == "ray":
        from smollm3_neuron.vllm.ray_batch import answer_on_ray

        answered = answer_on_ray(artifact, requests, args.replicas)
    else:
        from smollm3_neuron.batch.local import answer_locally

        if place == "cpu":
            common.quiet()
        answered = answer_locally(artifact, requests)
    name = artifact.manifest["model"]["name"]
    with tqdm(unit=" rows", initial=len(journal.done), disable=None) as progress:
        for answers in answered:
            journal.write(written(one, name) for one in answers)
            count.answered += len(answers)
            count.tokens += sum(one.tokens for one in answers)
            progress.update(len(answers))
            progress.set_postfix_str(f"{count.tokens} tokens, {count.bad} bad")


def main() -> None:
    args = parse_args()
    check_args(args)
    if args.engine == "ray":
        connect("give --engine local")
    # the cores are other processes', and may be other machines'
    place = device_place() if args.engine == "ray" else choose_place(args.device)
    artifact = open_artifact(args.artifact, place, verify=args.verify)
    count = Count()
    with Journal(args.output) as journal:
        answer(args, artifact, place, journal, count)
    print(count)
    if count.bad:
        print(f"{count.bad} bad rows, with the reasons: {journal.bad_path}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    common.run(main)
