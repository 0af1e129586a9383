"""Judges an artifact against transformers, prompt by prompt.

    python scripts/validate.py artifacts/tiny-tp2

Every prompt is called identical, near tie (the answers part where both models see a tie that the dtype explains, and
the logits agree) or wrong. Exit code 0: nothing is wrong; 1: something is; 2: it could not be judged.
"""

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

import common
import svg

from smollm3_neuron.artifact.folder import Artifact, open_artifact
from smollm3_neuron.errors import NotANumber, SmolLM3Error
from smollm3_neuron.machine.preflight import choose_place

COLOURS = {"identical": "#1b9e77", "near tie": "#e6ab02", "wrong": "#d62728"}
BINS = 40


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "ARTIFACT")
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="the folder that compile.py made")
    inputs = parser.add_argument_group("what is compared")
    inputs.add_argument("--model", type=Path, help="checkpoint folder of the reference (default: the artifact's own)")
    inputs.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=32, help="with EOS barred (default: %(default)s)"
    )
    inputs.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="judge one long prompt in place of the others: N tokens with its answer, a text with a needle in the "
        "middle and the question for it at the end",
    )
    inputs.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="the text of --length, repeated or cut (default: a built-in one)",
    )
    inputs.add_argument(
        "--tp", type=int, metavar="N", help="refuse an artifact made for another tensor-parallel degree"
    )
    common.add_device(inputs)
    common.add_verify(inputs)
    limits = parser.add_argument_group("what is allowed")
    limits.add_argument(
        "--tol-map",
        metavar="JSON",
        help="logit errors by top-k as shares of the largest logit, "
        '{"5": 0.01, "50": 0.02, "1000": 0.03, "all": 0.05} '
        "(default: twice what transformers' own run in the artifact's dtype is off)",
    )
    limits.add_argument(
        "--divergence-difference-tol",
        type=float,
        metavar="SHARE",
        help="how far apart the two logits of a tie may be, as such a share (default: follows from the same error)",
    )
    outputs = parser.add_argument_group("what is written")
    outputs.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    outputs.add_argument(
        "--html", type=Path, metavar="FILE", help="one page with plots, which needs nothing but itself"
    )
    return parser.parse_args()


def judged_cases(args: argparse.Namespace, settings, folder: Path, tokenizer) -> list:
    """What is asked: a long prompt, or the prompts and the text that the checkpoint or validate.py itself has."""
    from smollm3_neuron.check.long_prompt import long_case
    from smollm3_neuron.check.validation import TEXT, make_cases, prompts_and_text

    limits = settings.max_context_length, settings.seq_len
    if args.length is not None:
        text = TEXT if args.prompt_file is None else read_text(args.prompt_file)
        return [long_case(tokenizer, text, args.length, args.max_new_tokens, *limits)]
    cases, left_out = make_cases(tokenizer, *prompts_and_text(folder), *limits)
    for reason in left_out:
        print(f"left out: {reason}")
    return cases


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SmolLM3Error(
            f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); name a file of text"
        ) from None


def judge(args: argparse.Namespace, artifact: Artifact, folder: Path, tokenizer):
    """Runs artifact and reference; the report. Where the artifact's logits are no numbers: says so, exit code 1."""
    import torch

    from smollm3_neuron.check.long_prompt import EARLIER
    from smollm3_neuron.check.validation import WRONG, Reference, parse_tol_map, validate

    tol_map = common.json_object("--tol-map", args.tol_map or "null", '{"5": 0.01, "all": 0.05}')
    tol_map = None if tol_map is None else parse_tol_map(tol_map)
    settings = artifact.settings
    cases = judged_cases(args, settings, folder, tokenizer)
    dtype = getattr(torch, settings.torch_dtype)
    try:
        return validate(
            artifact.load(),
            Reference(folder, dtype, earlier=EARLIER if args.length else 0, **artifact.alterations),
            cases,
            args.max_new_tokens,
            suppress_tokens=artifact.eos_token_ids(),
            pad_token_id=tokenizer.pad_token_id or 0,
            tol_map=tol_map,
            divergence_difference_tol=args.divergence_difference_tol,
            prompt_lookup=candidates_of(settings),
        )
    except NotANumber as error:
        print(f"verdict: {WRONG}: {error}")
        sys.exit(1)


def candidates_of(settings) -> int | None:
    """How many candidates the graph verifies that is judged, too, where there is one; a draft's graph has no logits."""
    has_graph = settings.speculation_length and not settings.enable_fused_speculation
    return settings.speculation_length - 1 if has_graph else None


def print_cases(report, tokenizer) -> None:
    from smollm3_neuron.check.validation import IDENTICAL

    print(f"{'verdict':<10}{'token match':>11}  {'margin':>7}  {'logit error':>11}  prompt -> answer")
    for judged in report.cases_of("prompt", "chat"):
        answer = tokenizer.decode(judged.tokens).split("\n")[0]
        print(
            f"{judged.verdict:<10}{judged.match:>11.1%}  {min(judged.margins):>7.3f}  "
            f"{max(judged.errors['all']):>11.1e}  {judged.case.text!r} -> {answer!r}"
        )
    for judged in report.cases:
        if judged.verdict != IDENTICAL:
            print(f"{judged.verdict}: {judged.case.text[:40]!r}: {judged.reason}")


def summary(report, artifact: Artifact, max_new_tokens: int) -> list[str]:
    """The report's lines below its table."""
    import torch

    from smollm3_neuron.check.drift import power

    settings, perplexity = artifact.settings, report.perplexity
    prompts, chats = report.cases_of("prompt"), report.cases_of("chat")
    errors = {name: max(max(judged.errors[name]) for judged in report.cases) for name in report.tol_map}
    error_texts = [f"top {name} {errors[name]:.1e} ({allowed:.1e})" for name, allowed in report.tol_map.items()]
    passes = ", ".join(f"{count} in {dtype}" for dtype, count in report.passes.items())
    of_text = "no text"
    if perplexity:
        of_text = (
            f"perplexity of a text {perplexity['model']:.5f}, transformers' {perplexity['transformers']:.5f}, "
            f"in the wider dtype {perplexity['exact']:.5f}"
        )
    if "unquantized" in perplexity:
        of_text += f", of the whole weights in bfloat16 {perplexity['unquantized']:.5f}"
    smallest_margin = min(min(judged.margins) for judged in prompts)
    return [
        f"verdict: {report.verdict}",
        f"largest logit errors under teacher forcing, as shares of the largest logit (allowed for "
        f"{settings.torch_dtype}): {', '.join(error_texts)}",
        f"a tie may be {report.divergence_difference_tol:.1e} apart; {count_equal(chats)} chat prompts equal; "
        f"{of_text}",
        *([str(report.drift)] if report.drift else []),
        power(getattr(torch, settings.torch_dtype), report.drift),
        f"passes over transformers' layers: {passes}",
        f"{count_equal(prompts)} prompts equal to transformers' ({artifact.place}, tp_degree {settings.tp_degree}, "
        f"{settings.torch_dtype}, {max_new_tokens} new tokens each, EOS barred); smallest margin between the two best "
        f"logits {smallest_margin:.3f}",
    ]


def count_equal(judged_cases: list) -> str:
    return f"{sum(judged.match == 1 for judged in judged_cases)} of {len(judged_cases)}"


def needle_found(report, tokenizer) -> str:
    """Whether the answers have what the needle says; a model that was not trained has it in neither."""
    from smollm3_neuron.check.long_prompt import ANSWER

    (judged,) = report.cases
    answers = {"the artifact's": judged.tokens, "transformers'": judged.expected}
    said = [
        f"{whose} {'has' if ANSWER in tokenizer.decode(tokens) else 'lacks'} it" for whose, tokens in answers.items()
    ]
    return f"the needle is {ANSWER}; of the answers {', '.join(said)}"


def match_plot(report) -> str:
    judged_cases = report.cases_of("prompt", "chat")
    return svg.bars(
        "Token match per prompt",
        [judged.match for judged in judged_cases],
        top=1,
        colours=[COLOURS[judged.verdict] for judged in judged_cases],
        labels=[f"{judged.case.text}: {judged.match:.1%}, {judged.verdict}" for judged in judged_cases],
        ticks=[(share, f"{share:.0%}") for share in (0, 0.5, 1)],
        x_label="prompt (point at a bar for its text)",
    )


def error_plot(report) -> str:
    """The largest error of each position over all cases, on an axis of powers of ten."""
    longest = max(len(judged.expected) for judged in report.cases)

    def by_position(measure: str) -> list[tuple[float, float]]:
        largest = [
            max(getattr(judged, measure)["all"][position] for judged in report.cases if position < len(judged.expected))
            for position in range(longest)
        ]
        return [(position, power_of_ten(error)) for position, error in enumerate(largest) if math.isfinite(error)]

    allowed = power_of_ten(report.tol_map.get("all", max(report.tol_map.values())))
    series = {
        "this artifact": by_position("errors"),
        "transformers in the same dtype": by_position("noise"),
        "allowed": [(0, allowed), (longest - 1, allowed)],
    }
    powers = [y for points in series.values() for _, y in points]
    return svg.lines(
        "Largest logit error by position",
        series,
        ticks=[(power, f"1e{power}") for power in range(math.floor(min(powers)), math.ceil(max(powers)) + 1)],
        x_ticks=[(0, "0"), (longest - 1, str(longest - 1))],
        x_label="new token, under teacher forcing",
        y_label="share of the largest logit",
    )


def power_of_ten(error: float) -> float:
    return math.log10(max(error, 1e-12))


def margin_plot(report) -> str:
    margins = [margin for judged in report.cases for margin in judged.margins if math.isfinite(margin)]
    width = (max(margins) or 1) / BINS
    counts = [0] * BINS
    for margin in margins:
        counts[min(int(margin / width), BINS - 1)] += 1
    return svg.bars(
        "Margins between the two best logits",
        counts,
        top=max(counts),
        labels=[f"{index * width:.2f} to {(index + 1) * width:.2f}: {count}" for index, count in enumerate(counts)],
        x_label=f"margin, 0 to {max(margins):.2f}",
        y_label="tokens",
    )


def page(report, provenance: dict, lines: list[str], tokenizer) -> str:
    """HTML with the three plots inside and no other file."""
    columns = (
        "verdict",
        "token match",
        "match when forced",
        "smallest margin",
        "logit error",
        "prompt",
        "answer",
        "why",
    )
    table_rows = "".join(
        f"<tr><td style='color:{COLOURS[judged.verdict]}'>{judged.verdict}</td><td>{judged.match:.1%}</td>"
        f"<td>{judged.agree:.1%}</td><td>{min(judged.margins):.3f}</td><td>{max(judged.errors['all']):.1e}</td>"
        f"<td>{escape(judged.case.text)}</td><td>{escape(tokenizer.decode(judged.tokens))}</td>"
        f"<td>{escape(judged.reason)}</td></tr>"
        for judged in report.cases
    )
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    plots = match_plot(report) + error_plot(report) + margin_plot(report)
    return svg.page(
        f"{provenance['model']}: {report.verdict}",
        f"{paragraphs}{plots}<table>{svg.header(columns)}{table_rows}</table>"
        f"<pre>{escape(json.dumps(provenance, indent=1))}</pre>",
    )


def main() -> None:
    args = parse_args()
    if args.prompt_file is not None and args.length is None:
        raise SmolLM3Error(f"--prompt-file {args.prompt_file} is the text of a long prompt: give --length N, too")
    common.check_outputs(args.json, args.html)
    artifact = open_artifact(args.artifact, choose_place(args.device), tp_degree=args.tp, verify=args.verify)
    common.note_foreign_code(artifact)
    if artifact.place == "cpu":
        common.quiet()
    tokenizer = artifact.tokenizer()
    report = judge(args, artifact, common.reference_folder(args.model, artifact), tokenizer)
    print_cases(report, tokenizer)
    if args.length is not None:
        print(needle_found(report, tokenizer))
    lines = summary(report, artifact, args.max_new_tokens)
    print("\n" + "\n".join(lines))
    provenance = {
        "artifact": str(args.artifact),
        "model": artifact.manifest["model"]["name"],
        "place": artifact.place,
        "settings": artifact.manifest["settings"],
        "versions": artifact.manifest["versions"],
    }
    if args.json:
        args.json.write_text(json.dumps({**provenance, **report.as_dict()}, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(report, provenance, lines, tokenizer))
    from smollm3_neuron.check.validation import WRONG

    sys.exit(report.verdict == WRONG)


if __name__ == "__main__":
    common.run(main, failed=2)
