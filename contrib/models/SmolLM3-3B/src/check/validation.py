# SPDX-License-Identifier: Apache-2.0
"""Is the model right? Its tokens and logits beside transformers', and what its dtype explains of the difference.

Every prompt is answered greedily and then, under teacher forcing, its logits are held against transformers' run in the
next wider dtype. What the dtype explains is measured, not chosen: transformers' own run in the model's dtype, on the
same tokens, is off from that wider run by some error, and a right model by at most ALLOWANCE times as much. As in NxD
Inference's logit validation the tolerances go by top-k (`tol_map`), and two answers may part where both models see a
tie (`divergence_difference_tol`). In 16 bits the mean of the errors is judged, too (drift.py), and one may be larger.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SmolLM3Error
from ..generate.generation import Generated, generate
from ..model.json_files import read_json
from .drift import DTYPES, Drift, drift_of, log_ratios
from .prompts import CHAT_PROMPTS, PROMPTS, TEXT, TEXT_TOKENS
from .reference import token_match
from .streamed_reference import Reference, best_of

IDENTICAL, NEAR_TIE, WRONG = "identical", "near tie", "wrong"
TOP_K = ("5", "50", "1000", "all")  # the steps of NxD Inference's default tol_map
# a right model rounds what transformers rounds, and a rank's part of a sum and a bias once more: twice is room for both
# (right models in bfloat16 on the CPU runtime, TP 1 to 4, were off by 0.94 to 1.38 times as much; no device was seen)
ALLOWANCE = 2
# where the mean is judged, too, which finds what is small: one error of thousands was up to 4.5 times as large in right
# models of 32 layers with random biases (test/test_drift.py), and every seeded fault that is larger moves the mean
ALLOWANCE_BESIDE_MEAN = 6
LEADING = 5  # of the best tokens any may take the first's place in a tie
ROWS = 32  # positions that are measured at a time


@dataclass(frozen=True)
class Case:
    """Something to answer: `prompt` is token ids. A text's own continuation is `forced`, and nothing is answered."""

    kind: str  # "prompt", "chat" or "text"
    text: str
    prompt: list[int]
    forced: list[int] | None = None


@dataclass
class Judged:
    """What the judgement of one case is made from, and the judgement.

    Positions count the new tokens from 0. Errors and differences are shares of the position's largest logit.
    """

    case: Case
    tokens: list[int]
    """The model's own answer; of a text, the text."""
    expected: list[int]
    """transformers' answer; of a text, the text."""
    chosen: list[int] = field(default_factory=list)
    """What the model chooses under teacher forcing, by position."""
    margins: list[float] = field(default_factory=list)
    """By how much the model's best logit exceeds the second, by position, under teacher forcing."""
    expected_margins: list[float] = field(default_factory=list)
    """The same of transformers."""
    lead_noise: list[float] = field(default_factory=list)
    """By how much transformers' run in the model's dtype errs in the distances of the LEADING best, by position."""
    errors: dict[str, list[float]] = field(default_factory=dict)
    """The model's largest error, by top-k and position."""
    noise: dict[str, list[float]] = field(default_factory=dict)
    """The same of transformers' run in the model's dtype."""
    earlier_noise: dict[str, list[float]] = field(default_factory=dict)
    """The same at positions of the prompt, where the reference has them."""
    divergence_difference: list[float] = field(default_factory=list)
    """By position the larger of both models' leads of their own choice over the other's; 0 where they agree."""
    log_ratios: list[float] = field(default_factory=list)
    """Of the model's error to that of transformers' run in the model's dtype, by position."""
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    """Of a text, the cross entropy by position: the model's, transformers' and the wider run's."""
    verdict: str = ""
    reason: str = ""

    @property
    def match(self) -> float:
        """The share of the answer's tokens that are transformers', place by place."""
        return token_match(self.tokens, self.expected)

    @property
    def agree(self) -> float:
        """The share of the expected tokens that the model chooses under teacher forcing."""
        return token_match(self.chosen, self.expected)

    @property
    def divergence(self) -> int | None:
        """The position at which the two answers part first, or None."""
        pairs = enumerate(zip(self.tokens, self.expected))
        return next((position for position, (token, expected) in pairs if token != expected), None)


@dataclass(frozen=True)
class Report:
    """The judged cases, and what they were judged by.

    `perplexity` has those of the "model", of "transformers" in its dtype and of the wider run ("exact") on the text,
    and by what share they may differ ("tolerance"), of 8-bit weights that of the whole ones in bfloat16
    ("unquantized"), too; it is empty where there is no text. `passes` counts by dtype how
    often transformers' layers were read. `drift` is None where the mean error is not judged: in float32, for few cases,
    and where `tol_map` was given.
    """

    cases: list[Judged]
    tol_map: dict[str, float]
    divergence_difference_tol: float
    perplexity: dict[str, float]
    passes: dict[str, int]
    drift: Drift | None = None

    def cases_of(self, *kinds: str) -> list[Judged]:
        """Returns the cases whose kind is one of `kinds`."""
        return [judged for judged in self.cases if judged.case.kind in kinds]

    @property
    def verdict(self) -> str:
        """The worst verdict of any case, or wrong where all of them together err too much."""
        verdicts = {judged.verdict for judged in self.cases}
        if self.drift and self.drift.is_wrong:
            return WRONG
        return next(verdict for verdict in (WRONG, NEAR_TIE, IDENTICAL) if verdict in verdicts)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it."""
        cases = [
            {
                "kind": judged.case.kind,
                "prompt": judged.case.text,
                "verdict": judged.verdict,
                "reason": judged.reason,
                "token_match": judged.match,
                "first_divergence": judged.divergence,
                "teacher_forced_match": judged.agree,
                "margins": judged.margins,
                "expected_margins": judged.expected_margins,
                "errors": judged.errors,
                "noise": judged.noise,
                "tokens": judged.tokens,
                "expected_tokens": judged.expected,
            }
            for judged in self.cases
        ]
        return {
            "verdict": self.verdict,
            "tol_map": self.tol_map,
            "divergence_difference_tol": self.divergence_difference_tol,
            "perplexity": self.perplexity,
            "passes": self.passes,
            "drift": dataclasses.asdict(self.drift) if self.drift else None,
            "cases": cases,
        }


def prompts_and_text(folder: Path) -> tuple[list[str], str]:
    """Returns prompts and a text; a checkpoint with a `prompts.json` brings its own, the held-out ones among them.

    Raises SmolLM3Error for a `prompts.json` of another form.
    """
    if not (folder / "prompts.json").is_file():
        return list(PROMPTS), TEXT
    own = read_json(folder / "prompts.json")
    try:
        held_out = [(entry["prompt"], entry["answer"]) for entry in own["held_out"]]
        prompts = [*own["published"], *(prompt for prompt, _ in held_out)]
        text = "\n".join(map("".join, held_out))
    except (KeyError, TypeError):
        prompts = [None]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise SmolLM3Error(
            f"{folder / 'prompts.json'}: an object with published, a list of texts, and held_out, a list of objects "
            "with prompt and answer, is expected; download it again, or remove it"
        )
    return prompts, text


def make_cases(
    tokenizer, prompts: Sequence[str], text: str, max_context_length: int, seq_len: int
) -> tuple[list[Case], list[str]]:
    """Returns cases for `prompts`, the chat (where there is a template) and the text, and a line for each left out.

    A chat is left out where it is longer than `max_context_length`.
    """
    cases = [Case("prompt", prompt, ids) for prompt, ids in zip(prompts, tokenizer(list(prompts))["input_ids"])]
    left_out = []
    for question in CHAT_PROMPTS if tokenizer.chat_template else ():
        for thinking in (True, False):
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=thinking,
            )
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            if len(ids) > max_context_length:
                left_out.append(
                    f"{question!r} as a chat: {len(ids)} tokens, max_context_length is {max_context_length}"
                )
            else:
                cases.append(Case("chat", f"{question} ({'/think' if thinking else '/no_think'})", ids))
    ids = tokenizer(text)["input_ids"][: min(seq_len, TEXT_TOKENS)]
    return [*cases, Case("text", text, ids[:1], ids[1:])], left_out


def validate(
    model,
    reference: Reference,
    cases: Sequence[Case],
    max_new_tokens: int,
    *,
    suppress_tokens: Sequence[int] = (),
    pad_token_id: int = 0,
    tol_map: dict[str, float] | None = None,
    divergence_difference_tol: float | None = None,
    prompt_lookup: int | None = None,
) -> Report:
    """Judges a loaded model on `cases`. `tol_map` and `divergence_difference_tol` replace what is measured.

    The model is run in batches of its own size, twice where its answers part from transformers'. The token ids in
    `suppress_tokens` are never chosen, by neither model. With `prompt_lookup` the graph that verifies several tokens is
    judged, too: it answers wherever so many candidates are found, and reads the text.
    """
    how = {"suppress_tokens": suppress_tokens, "pad_token_id": pad_token_id, "prompt_lookup": prompt_lookup}
    run = functools.partial(generate, model, keep_logits=True, **how)
    texts = [case for case in cases if case.forced is not None]
    questions = [case for case in cases if case.forced is None]
    answers = run([case.prompt for case in questions], max_new_tokens)

    def draft(prompts: list[list[int]], begun: list[list[int]]) -> list[list[int]]:
        """Goes on with each prompt and what it was answered so far, where that fits into the model's context."""
        longer = [[*prompt, *tokens] for prompt, tokens in zip(prompts, begun)]
        fitting = [tokens for tokens in longer if len(tokens) <= model.config.neuron_config.max_context_length]
        drafted = iter(run(fitting, max_new_tokens))
        return [next(drafted).tokens if tokens in fitting else [] for tokens in longer]

    prompts = [case.prompt for case in (*questions, *texts)]
    tokens = [*(answer.tokens for answer in answers), *(case.forced for case in texts)]
    theirs = reference.answers(prompts, tokens, suppress_tokens, draft, fixed=range(len(questions), len(prompts)))
    judged = [Judged(case, own, expected) for case, own, (expected, _) in zip((*questions, *texts), tokens, theirs)]
    # where the answers are equal, the free run was fed with transformers' tokens already
    parted = [index for index, one in enumerate(judged) if one.divergence is not None]
    again = _forced(run, [judged[index].case.prompt for index in parted], [judged[index].expected for index in parted])
    for index, result in zip(parted, again):
        answers[index] = result
    answers += _forced(run, [case.prompt for case in texts], [case.forced for case in texts])
    exact = reference.logits(reference.wider, prompts, [one.expected for one in judged])
    for index, (one, of_wider) in enumerate(zip(judged, exact)):
        (_, of_theirs), ours = theirs[index], torch.stack(answers[index].logits)
        theirs[index] = answers[index] = None  # of a large vocabulary these are the most that is in memory
        for rows in zip(*(logits.split(ROWS) for logits in (ours, of_theirs, of_wider))):
            _measure(one, *rows, suppress_tokens)
        runs = (reference.earlier.pop((dtype, tuple(one.case.prompt)), None) for dtype in reference.passes)
        for rows in zip(*(() if logits is None else logits.double().split(ROWS) for logits in runs)):
            _measure_earlier(one, *rows, suppress_tokens)
    drift = drift_of([one.log_ratios for one in judged]) if reference.dtype in DTYPES and tol_map is None else None
    report = _judge(judged, tol_map, divergence_difference_tol, reference.passes, drift)
    if texts and reference.unquantized:
        inputs, kept = zip(*(([*case.prompt, *case.forced[:-1]], len(case.forced)) for case in texts))
        logits = reference.unquantized.logits(inputs, kept)
        losses = [
            loss for case, rows in zip(texts, logits) for loss in _losses(rows.double(), torch.tensor(case.forced))
        ]
        report.perplexity["unquantized"] = math.exp(sum(losses) / len(losses))
    return report


def _forced(run: Callable[..., list[Generated]], prompts: list, tokens: list) -> list[Generated]:
    return run(prompts, max(map(len, tokens)), forced=tokens) if prompts else []


def _measure(one: Judged, ours: Tensor, theirs: Tensor, exact: Tensor, suppress_tokens: Sequence[int]) -> None:
    """Adds what does not need the tolerances, from the next positions' logits [positions, vocab_size] of each run."""
    expected = torch.tensor(one.expected[len(one.margins) :][: len(ours)])
    ours, theirs, exact = ours.double(), theirs.double(), exact.double()
    scale = exact.abs().amax(-1)
    _add_errors(one.errors, ours, exact)
    _add_errors(one.noise, theirs, exact)
    one.log_ratios += log_ratios(ours - exact, theirs - exact)
    our_best, their_best = best_of(ours, suppress_tokens), best_of(theirs, suppress_tokens)
    one.margins += (our_best.values[:, 0] - our_best.values[:, 1]).tolist()
    one.expected_margins += (their_best.values[:, 0] - their_best.values[:, 1]).tolist()
    our_choice, their_choice = our_best.indices[:, 0], their_best.indices[:, 0]
    one.chosen += our_choice.tolist()
    one.lead_noise += _lead_noise(theirs, exact, suppress_tokens)
    leads = _lead(ours, our_choice, their_choice), _lead(theirs, their_choice, our_choice)
    one.divergence_difference += (torch.maximum(*leads) / scale).tolist()
    if one.case.kind == "text":
        one.losses += zip(*(_losses(run, expected) for run in (ours, theirs, exact)))


def _measure_earlier(one: Judged, theirs: Tensor, exact: Tensor, suppress_tokens: Sequence[int]) -> None:
    """Adds what the reference shows at positions of the prompt, from its logits [positions, vocab_size] there."""
    _add_errors(one.earlier_noise, theirs, exact)
    one.lead_noise += _lead_noise(theirs, exact, suppress_tokens)


def _add_errors(errors: dict[str, list[float]], other: Tensor, exact: Tensor) -> None:
    error = (other - exact).abs() / exact.abs().amax(-1, keepdim=True)
    for name in TOP_K:
        top = error if name == "all" else error.gather(-1, exact.topk(min(int(name), error.shape[-1])).indices)
        errors.setdefault(name, []).extend(top.amax(-1).tolist())


def _lead_noise(theirs: Tensor, exact: Tensor, suppress_tokens: Sequence[int]) -> list[float]:
    # of more than two: the two best may err alike, as tokens of almost equal rows of the head do
    error = (theirs - exact).gather(-1, best_of(exact, suppress_tokens, LEADING).indices)
    return ((error.amax(-1) - error.amin(-1)) / exact.abs().amax(-1)).tolist()


def _lead(logits: Tensor, token: Tensor, other_token: Tensor) -> Tensor:
    """Returns by how much each position's logit of one token exceeds that of the other [positions]."""
    return (logits.gather(-1, token[:, None]) - logits.gather(-1, other_token[:, None]))[:, 0]


def _losses(logits: Tensor, tokens: Tensor) -> list[float]:
    return torch.nn.functional.cross_entropy(logits, tokens, reduction="none").tolist()


def _judge(
    judged: list[Judged],
    tol_map: dict[str, float] | None,
    divergence_difference_tol: float | None,
    passes: dict[torch.dtype, int],
    drift: Drift | None,
) -> Report:
    noise = {name: max(max(one.noise[name] + one.earlier_noise.get(name, [])) for one in judged) for name in TOP_K}
    allowance = ALLOWANCE_BESIDE_MEAN if drift else ALLOWANCE
    if tol_map is None:
        tol_map = {name: allowance * noise[name] for name in TOP_K}
    if divergence_difference_tol is None:
        # the model's distance of two logits may be off by `allowance` times what transformers' is, which is off, too
        divergence_difference_tol = (allowance + 1) * max(max(one.lead_noise) for one in judged)
    perplexity = _perplexity([loss for one in judged for loss in one.losses])
    for one in judged:
        one.reason = _fault(one, tol_map, divergence_difference_tol)
        if (
            not one.reason
            and one.losses
            and abs(perplexity["model"] / perplexity["exact"] - 1) > perplexity["tolerance"]
        ):
            one.reason = f"perplexity {perplexity['model']:.6g}, transformers' is {perplexity['exact']:.6g}"
        position = one.divergence
        one.verdict = WRONG if one.reason else IDENTICAL if position is None else NEAR_TIE
        if one.verdict == NEAR_TIE:
            one.reason = (
                f"parts at token {position}: the two best logits are {one.margins[position]:.3g} apart, transformers' "
                f"{one.expected_margins[position]:.3g}"
            )
    passes = {str(dtype).removeprefix("torch."): count for dtype, count in passes.items()}
    return Report(judged, tol_map, divergence_difference_tol, perplexity, passes, drift)


def _fault(judged: Judged, tol_map: dict[str, float], divergence_difference_tol: float) -> str:
    """Returns what is wrong at the first position where something is, or an empty string."""
    for position, difference in enumerate(judged.divergence_difference):
        for name, tolerance in tol_map.items():
            error = judged.errors[name][position]
            if not error <= tolerance:
                return (
                    f"logits of the top {name} are off by {error:.2g} at token {position}, {tolerance:.2g} is allowed"
                )
        if not difference <= divergence_difference_tol:
            allowed = f"{divergence_difference_tol:.2g} is allowed"
            return f"another token at {position}, by {difference:.2g} of the largest logit, {allowed}"
    return ""


def _perplexity(losses: list[tuple[float, float, float]]) -> dict[str, float]:
    """Returns the report's perplexities; the tolerance is ALLOWANCE times what the dtype's losses are off."""
    if not losses:
        return {}
    model, transformers, exact = (math.exp(sum(column) / len(losses)) for column in zip(*losses))
    tolerance = math.expm1(ALLOWANCE * sum(abs(in_dtype - wider) for _, in_dtype, wider in losses) / len(losses))
    return {"model": model, "transformers": transformers, "exact": exact, "tolerance": tolerance}


def parse_tol_map(tol_map: Any) -> dict[str, float]:
    """Returns `tol_map`, from each top-k (of TOP_K) to a share of the largest logit, e.g. `{"5": 0.01, "all": 0.05}`.

    Raises SmolLM3Error where it is not like that.
    """
    if not isinstance(tol_map, dict) or not tol_map:
        raise SmolLM3Error(f'tol_map is {tol_map!r}, allowed is an object like {{"5": 0.01, "all": 0.05}}')
    for name, tolerance in tol_map.items():
        if name not in TOP_K or type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
            raise SmolLM3Error(
                f"tol_map has {name} {tolerance!r}, allowed are {', '.join(TOP_K)}, each from 0 to below 1"
            )
    return tol_map
