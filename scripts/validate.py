"""Judges an artifact against transformers: python scripts/validate.py ARTIFACT

Every prompt is called identical, near tie (the answers part where both models see a tie that the dtype explains, and
the logits agree) or wrong. Exit code 0: nothing is wrong; 1: something is; 2: it could not be judged.
"""

import argparse
import json
import logging
import math
import sys
import warnings
from html import escape
from pathlib import Path

import common
import svg

from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.preflight import choose_place

COLOURS = {"identical": "#1b9e77", "near tie": "#e6ab02", "wrong": "#d62728"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--model", type=Path, help="checkpoint folder of the reference (default: the artifact's own)")
    parser.add_argument("--tp", type=int, help="refuse an artifact made for another tensor-parallel degree")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="with EOS barred (default: %(default)s)")
    parser.add_argument(
        "--tol-map",
        type=json.loads,
        metavar="JSON",
        help='allowed logit errors by top-k as shares of the largest logit, {"5": 0.01, "50": 0.02, "1000": 0.03, "all": 0.05} '
        "(default: twice what transformers' own run in the artifact's dtype is off)",
    )
    parser.add_argument(
        "--divergence-difference-tol",
        type=float,
        metavar="SHARE",
        help="how far apart the two logits of a tie may be, as such a share (default: follows from the same error)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was found")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page with plots, which needs nothing but itself")
    common.add_device(parser)
    return parser.parse_args()


def prompts_of(folder: Path) -> tuple[list[str], str]:
    """Prompts and a text; a checkpoint of this repository brings its own, the held-out ones among them."""
    from smollm3_neuron.check.validation import PROMPTS, TEXT

    if not (folder / "prompts.json").is_file():
        return list(PROMPTS), TEXT
    of_folder = json.loads((folder / "prompts.json").read_text())
    held_out = [(entry["prompt"], entry["answer"]) for entry in of_folder["held_out"]]
    return [*of_folder["published"], *(prompt for prompt, _ in held_out)], "\n".join(map("".join, held_out))


def main() -> None:
    args = parse_args()
    common.check_outputs(args.json, args.html)
    place = choose_place(args.device)
    artifact = open_artifact(args.artifact, place, tp_degree=args.tp)
    folder = args.model or Path(artifact.manifest["model"]["folder"])
    if not (folder / "config.json").is_file():
        raise SmolLM3Error(f"{folder}: the checkpoint is not there any more; pass it with --model FOLDER")
    import torch

    from smollm3_neuron.check.validation import IDENTICAL, WRONG, Reference, make_cases, parse_tol_map, validate
    from smollm3_neuron.generate.generation import NotANumber

    tol_map = None if args.tol_map is None else parse_tol_map(args.tol_map)
    if place == "cpu":
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    settings, tokenizer = artifact.settings, artifact.tokenizer()
    cases, left_out = make_cases(tokenizer, *prompts_of(folder), settings.max_context_length, settings.seq_len)
    for line in left_out:
        print(f"left out: {line}")
    try:
        report = validate(
            artifact.load(),
            Reference(
                folder, getattr(torch, settings.torch_dtype), artifact.adapter, settings if settings.quantized else None
            ),
            cases,
            args.max_new_tokens,
            suppress_tokens=artifact.eos_token_ids(),
            pad_token_id=tokenizer.pad_token_id or 0,
            tol_map=tol_map,
            divergence_difference_tol=args.divergence_difference_tol,
        )
    except NotANumber as error:
        print(f"verdict: {WRONG}: {error}")
        sys.exit(1)
    print(f"{'verdict':<10}{'token match':>11}  {'margin':>7}  {'logit error':>11}  prompt -> answer")
    for judged in report.cases_of("prompt", "chat"):
        answer = tokenizer.decode(judged.tokens).split("\n")[0]
        print(
            f"{judged.verdict:<10}{judged.match:>11.1%}  {min(judged.margins):>7.3f}  {max(judged.errors['all']):>11.1e}  "
            f"{judged.case.text!r} -> {answer!r}"
        )
    for judged in report.cases:
        if judged.verdict != IDENTICAL:
            print(f"{judged.verdict}: {judged.case.text[:40]!r}: {judged.reason}")
    lines = summary(report, settings.torch_dtype)
    print("\n" + "\n".join(lines))
    asked = report.cases_of("prompt")
    smallest = min(min(judged.margins) for judged in asked)
    last = (
        f"{sum(judged.match == 1 for judged in asked)} of {len(asked)} prompts equal to transformers' ({place}, tp_degree "
        f"{settings.tp_degree}, {settings.torch_dtype}, {args.max_new_tokens} new tokens each, EOS barred); "
        f"smallest margin between the two best logits {smallest:.3f}"
    )
    print(last)
    about = {"artifact": str(args.artifact), "model": artifact.manifest["model"]["name"], "place": place}
    about |= {"settings": artifact.manifest["settings"], "versions": artifact.manifest["versions"]}
    if args.json:
        args.json.write_text(json.dumps({**about, **report.as_dict()}, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(report, about, [*lines, last], tokenizer))
    sys.exit(report.verdict == WRONG)


def summary(report, dtype: str) -> list[str]:
    chats = report.cases_of("chat")
    errors = {name: max(max(judged.errors[name]) for judged in report.cases) for name in report.tol_map}
    text = ", ".join(f"top {name} {errors[name]:.1e} ({tolerance:.1e})" for name, tolerance in report.tol_map.items())
    numbers = report.perplexity
    return [
        f"verdict: {report.verdict}",
        f"largest logit errors under teacher forcing, as shares of the largest logit (allowed for {dtype}): {text}",
        f"a tie may be {report.divergence_difference_tol:.1e} apart; {sum(judged.match == 1 for judged in chats)} of "
        f"{len(chats)} chat prompts equal; perplexity of a text {numbers['model']:.5f}, transformers' "
        f"{numbers['transformers']:.5f}, in the wider dtype {numbers['exact']:.5f}",
    ]


def page(report, about: dict, lines: list[str], tokenizer) -> str:
    """HTML with the three plots inside and no other file."""
    asked = report.cases_of("prompt", "chat")
    match = svg.bars(
        "Token match per prompt",
        [judged.match for judged in asked],
        top=1,
        colours=[COLOURS[j.verdict] for j in asked],
        labels=[f"{judged.case.text}: {judged.match:.1%}, {judged.verdict}" for judged in asked],
        ticks=[(share, f"{share:.0%}") for share in (0, 0.5, 1)],
        x_label="prompt (point at a bar for its text)",
    )
    longest = max(len(judged.expected) for judged in report.cases)

    def by_position(values: str) -> list[tuple[float, float]]:
        """The largest over the cases, as a power of ten."""
        found = [
            max(getattr(judged, values)["all"][position] for judged in report.cases if position < len(judged.expected))
            for position in range(longest)
        ]
        return [
            (position, math.log10(max(value, 1e-12))) for position, value in enumerate(found) if math.isfinite(value)
        ]

    allowed = math.log10(max(report.tol_map.get("all", max(report.tol_map.values())), 1e-12))
    series = {"this artifact": by_position("errors"), "transformers in the same dtype": by_position("noise")}
    series["allowed"] = [(0, allowed), (longest - 1, allowed)]
    powers = [y for points in series.values() for _, y in points]
    ticks = [(power, f"1e{power}") for power in range(math.floor(min(powers)), math.ceil(max(powers)) + 1)]
    error = svg.lines(
        "Largest logit error by position",
        series,
        ticks=ticks,
        x_ticks=[(0, "0"), (longest - 1, str(longest - 1))],
        x_label="new token, under teacher forcing",
        y_label="share of the largest logit",
    )
    margins = [margin for judged in report.cases for margin in judged.margins if math.isfinite(margin)]
    width = (max(margins) or 1) / 40
    counts = [0] * 40
    for margin in margins:
        counts[min(int(margin / width), 39)] += 1
    histogram = svg.bars(
        "Margins between the two best logits",
        counts,
        top=max(counts),
        labels=[f"{index * width:.2f} to {(index + 1) * width:.2f}: {count}" for index, count in enumerate(counts)],
        x_label=f"margin, 0 to {max(margins):.2f}",
        y_label="tokens",
    )
    rows = "".join(
        f"<tr><td style='color:{COLOURS[judged.verdict]}'>{judged.verdict}</td><td>{judged.match:.1%}</td>"
        f"<td>{judged.agree:.1%}</td><td>{min(judged.margins):.3f}</td><td>{max(judged.errors['all']):.1e}</td>"
        f"<td>{escape(judged.case.text)}</td><td>{escape(tokenizer.decode(judged.tokens))}</td>"
        f"<td>{escape(judged.reason)}</td></tr>"
        for judged in report.cases
    )
    head = svg.header(
        ("verdict", "token match", "match when forced", "smallest margin", "logit error", "prompt", "answer", "why")
    )
    facts = "".join(f"<p>{escape(line)}</p>" for line in lines)
    about_it = f"<pre>{escape(json.dumps(about, indent=1))}</pre>"
    return svg.page(
        f"{about['model']}: {report.verdict}", f"{facts}{match}{error}{histogram}<table>{head}{rows}</table>{about_it}"
    )


if __name__ == "__main__":
    common.run(main)
