"""Is the model right? Its tokens and logits beside transformers', and what its dtype explains of the difference.

Every prompt is answered greedily and then, under teacher forcing, its logits are held against transformers' run in the next
wider dtype. What the dtype explains is measured, not chosen: transformers' own run in the model's dtype, on the same tokens,
is off from that wider run by some error, and a right model by at most ALLOWANCE times as much. As in NxD Inference's logit
validation the tolerances go by top-k (`tol_map`), and two answers may part where both models see a tie
(`divergence_difference_tol`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import SmolLM3Error
from ..generate.generation import Generated, generate
from .reference import PUBLISHED_PROMPTS, load_reference, reference_generate, token_match

IDENTICAL, NEAR_TIE, WRONG = "identical", "near tie", "wrong"
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
TOP_K = ("5", "50", "1000", "all")  # the steps of NxD Inference's default tol_map
# a right model rounds what transformers rounds, and a rank's part of a sum and a bias once more: twice is room for both
ALLOWANCE = 2

PROMPTS = (
    *PUBLISHED_PROMPTS,
    "Once upon a time",
    "The three primary colours are",
    "SELECT name FROM users WHERE",
    "La capitale de l'Italie est",
    "Q: How many days are in a week?\nA:",
    "0, 1, 1, 2, 3, 5, 8,",
)
CHAT_PROMPTS = ("What is 3+4?", "Name the largest planet.", "Write one sentence about the sea.")
TEXT = (
    "A river begins as rain. The drops that fall on a hill run together, first into threads that a leaf could dam, then into "
    "a brook that children can jump over. Where two brooks meet the water is wider and slower, and it carries sand. By the "
    "time it reaches the plain, 300 kilometres from the first drop, it turns mills, waters fields and takes boats of 40 tons "
    "to the harbour. Nobody can say where the river ends and the sea begins: for an hour after high tide the salt water "
    "flows inland, and the fish of both are caught in the same net."
)
TEXT_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """Something to answer: `prompt` as token ids; a text's own continuation is `forced`, and it is not answered."""

    kind: str  # "prompt", "chat" or "text"
    text: str
    prompt: list[int]
    forced: list[int] | None = None


@dataclass
class Judged:
    """What was found for one case. Positions count the new tokens from 0; errors are shares of the position's largest logit."""

    case: Case
    tokens: list[int]  # the model's own answer
    expected: list[int]  # transformers'; of a text, the text
    agree: float = 0.0  # share of the expected tokens that the model chooses under teacher forcing
    margins: list[float] = field(default_factory=list)  # the model's two best logits' distance, under teacher forcing
    expected_margins: list[float] = field(default_factory=list)
    lead_noise: list[float] = field(
        default_factory=list
    )  # what transformers' run errs in the two best logits' distance
    errors: dict[str, list[float]] = field(default_factory=dict)  # by top-k and position: the model's largest error
    noise: dict[str, list[float]] = field(default_factory=dict)  # the same of transformers' run in the model's dtype
    divergence_difference: list[float] = field(
        default_factory=list
    )  # the larger of both models' margins; 0: they agree
    losses: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # of the model, transformers and the wider run
    verdict: str = ""
    reason: str = ""

    @property
    def match(self) -> float:
        return token_match(self.tokens, self.expected)

    @property
    def divergence(self) -> int | None:
        """Where the two answers part first; None: nowhere."""
        pairs = enumerate(zip(self.tokens, self.expected))
        return next((position for position, (a, b) in pairs if a != b), None)


@dataclass(frozen=True)
class Report:
    cases: list[Judged]
    tol_map: dict[str, float]
    divergence_difference_tol: float
    perplexity: dict[str, float]  # of the model, transformers and the wider run on the text, and what they may differ

    def of(self, *kinds: str) -> list[Judged]:
        return [case for case in self.cases if case.case.kind in kinds]

    @property
    def verdict(self) -> str:
        verdicts = {case.verdict for case in self.cases}
        return next(verdict for verdict in (WRONG, NEAR_TIE, IDENTICAL) if verdict in verdicts)

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                "kind": judged.case.kind, "prompt": judged.case.text, "verdict": judged.verdict, "reason": judged.reason,
                "token_match": judged.match, "first_divergence": judged.divergence, "teacher_forced_match": judged.agree,
                "margins": judged.margins, "expected_margins": judged.expected_margins, "errors": judged.errors,
                "noise": judged.noise, "tokens": judged.tokens, "expected_tokens": judged.expected,
            }
            for judged in self.cases
        ]  # fmt: skip
        return {
            "verdict": self.verdict, "tol_map": self.tol_map, "divergence_difference_tol": self.divergence_difference_tol,
            "perplexity": self.perplexity, "cases": rows,
        }  # fmt: skip


class Reference:
    """transformers in `dtype` and in the next wider one, as `load_reference` makes it; one of the two is in memory at a time,
    answers are kept."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, adapter: str | Path | None = None, quantized: Any = None
    ):
        self.dtype, self.wider = dtype, WIDER[dtype]
        self._load = functools.partial(load_reference, folder, adapter=adapter, quantized=quantized)
        self._loaded: tuple[torch.dtype, Any] | None = None
        self._logits: dict[tuple, torch.Tensor] = {}
        self._greedy: dict[tuple, list[int]] = {}

    def _model(self, dtype: torch.dtype):
        if self._loaded is None or self._loaded[0] != dtype:
            self._loaded = None  # before the other one is read
            self._loaded = dtype, self._load(dtype)
        return self._loaded[1]

    @torch.no_grad()
    def logits(self, dtype: torch.dtype, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits [len(tokens), vocab] that choose each of `tokens` after `prompt`."""
        key = dtype, tuple(prompt), tuple(tokens[:-1])
        if key not in self._logits:
            input_ids = torch.tensor([[*prompt, *tokens[:-1]]])
            self._logits[key] = self._model(dtype)(input_ids, logits_to_keep=len(tokens)).logits[0]
        return self._logits[key]

    def answer(self, prompt: Sequence[int], tokens: Sequence[int], barred: Sequence[int]) -> list[int]:
        """Greedy tokens, as many as `tokens`. Where those are greedy throughout one pass shows it; else it is generated."""
        key = tuple(prompt), len(tokens), tuple(barred)
        if key in self._greedy:
            return self._greedy[key]
        if _choices(self.logits(self.dtype, prompt, tokens), barred).indices[:, 0].tolist() != list(tokens):
            self._greedy[key] = reference_generate(self._model(self.dtype), prompt, len(tokens), barred).tokens
            return self._greedy[key]
        return list(tokens)


def make_cases(
    tokenizer, prompts: Sequence[str], text: str, max_context_length: int, seq_len: int
) -> tuple[list[Case], list[str]]:
    """Cases for `prompts`, the chat (where there is a template) and the text; the chats that do not fit are named."""
    cases = [Case("prompt", text, ids) for text, ids in zip(prompts, tokenizer(list(prompts))["input_ids"])]
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
    barred_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    tol_map: dict[str, float] | None = None,
    divergence_difference_tol: float | None = None,
) -> Report:
    """Judges a loaded model on `cases`. `tol_map` and `divergence_difference_tol` replace what is measured.

    The model is run in batches of its own size, twice where its answers part from transformers'.
    """
    run = dict(barred_token_ids=barred_token_ids, pad_token_id=pad_token_id, keep_logits=True)
    texts = [case for case in cases if case.forced is not None]
    asked = [case for case in cases if case.forced is None]
    judged, logits = [], []
    free = generate(model, [case.prompt for case in asked], max_new_tokens, **run)
    for case, result in zip(asked, free):
        expected = reference.answer(case.prompt, result.tokens, barred_token_ids)
        judged.append(Judged(case, result.tokens, expected))
    # where the answers are equal, the free run was fed with transformers' tokens already
    parted = [index for index, case in enumerate(judged) if case.divergence is not None]
    again = _forced(model, [judged[i].case.prompt for i in parted], [judged[i].expected for i in parted], run)
    for index, result in zip(parted, again):
        free[index] = result
    of_texts = _forced(model, [case.prompt for case in texts], [case.forced for case in texts], run)
    judged += [Judged(case, case.forced, case.forced) for case in texts]
    logits = [torch.stack(result.logits) for result in (*free, *of_texts)]
    _measure(judged, logits, reference, barred_token_ids)
    return _judge(judged, tol_map, divergence_difference_tol)


def _forced(model, prompts: list, tokens: list, run: dict) -> list[Generated]:
    return generate(model, prompts, max(map(len, tokens)), forced=tokens, **run) if prompts else []


def _choices(logits: torch.Tensor, barred: Sequence[int]):
    """The two best of each position that are not barred."""
    return logits.double().index_fill(-1, torch.tensor(barred, dtype=torch.long), -math.inf).topk(2, dim=-1)


def _measure(judged: list[Judged], logits: list[torch.Tensor], reference: Reference, barred: Sequence[int]) -> None:
    """Fills in what does not need the tolerances."""
    in_dtype = [reference.logits(reference.dtype, case.case.prompt, case.expected).double() for case in judged]
    for case, ours, theirs in zip(judged, logits, in_dtype):  # the wider model is read here, once
        exact = reference.logits(reference.wider, case.case.prompt, case.expected).double()
        ours, scale = ours.double(), exact.abs().amax(-1)
        for errors, values in ((case.errors, ours), (case.noise, theirs)):
            off = (values - exact).abs() / scale[:, None]
            for name in TOP_K:
                best = off if name == "all" else off.gather(-1, exact.topk(min(int(name), off.shape[-1])).indices)
                errors[name] = best.amax(-1).tolist()
        (mine, choice), (other, other_choice) = _choices(ours, barred), _choices(theirs, barred)
        case.margins, case.expected_margins = (mine[:, 0] - mine[:, 1]).tolist(), (other[:, 0] - other[:, 1]).tolist()
        case.agree = (choice[:, 0] == torch.tensor(case.expected)).double().mean().item()
        first, second = _choices(exact, barred).indices.unbind(-1)
        case.lead_noise = ((_lead(theirs, first, second) - _lead(exact, first, second)).abs() / scale).tolist()
        by_ours = _lead(ours, choice[:, 0], other_choice[:, 0])
        case.divergence_difference = (
            torch.maximum(by_ours, _lead(theirs, other_choice[:, 0], choice[:, 0])) / scale
        ).tolist()
        if case.case.kind == "text":
            losses = [_losses(values, case.expected) for values in (ours, theirs, exact)]
            case.losses = list(zip(*losses))


def _lead(logits: torch.Tensor, of: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
    """By how much each position's logit of one token exceeds that of the other."""
    return (logits.gather(-1, of[:, None]) - logits.gather(-1, over[:, None]))[:, 0]


def _losses(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="none").tolist()


def _judge(judged: list[Judged], tol_map: dict[str, float] | None, divergence_difference_tol: float | None) -> Report:
    noise = {name: max(max(case.noise[name]) for case in judged) for name in TOP_K}
    if tol_map is None:
        tol_map = {name: ALLOWANCE * noise[name] for name in TOP_K}
    if divergence_difference_tol is None:
        # of the distance of two logits the model may be off by ALLOWANCE times what transformers is off, and that is too
        divergence_difference_tol = (ALLOWANCE + 1) * max(max(case.lead_noise) for case in judged)
    losses = [loss for case in judged for loss in case.losses]
    perplexity = _perplexity(losses)
    for case in judged:
        case.reason = _fault(case, tol_map, divergence_difference_tol)
        if (
            not case.reason
            and case.losses
            and abs(perplexity["model"] / perplexity["exact"] - 1) > perplexity["tolerance"]
        ):
            case.reason = f"perplexity {perplexity['model']:.6g}, transformers' is {perplexity['exact']:.6g}"
        case.verdict = WRONG if case.reason else IDENTICAL if case.divergence is None else NEAR_TIE
        if case.verdict == NEAR_TIE:
            at = case.divergence
            case.reason = (
                f"parts at token {at}: the two best logits are {case.margins[at]:.3g} apart, transformers' "
                f"{case.expected_margins[at]:.3g}"
            )
    return Report(judged, tol_map, divergence_difference_tol, perplexity)


def _fault(case: Judged, tol_map: dict[str, float], divergence_difference_tol: float) -> str:
    """The first position at which the case is wrong, and why; empty: none."""
    for position, difference in enumerate(case.divergence_difference):
        for name, tolerance in tol_map.items():
            if not case.errors[name][position] <= tolerance:
                error = case.errors[name][position]
                return (
                    f"logits of the top {name} are off by {error:.2g} at token {position}, {tolerance:.2g} is allowed"
                )
        if not difference <= divergence_difference_tol:
            allowed = f"{divergence_difference_tol:.2g} is allowed"
            return f"another token at {position}, by {difference:.2g} of the largest logit, {allowed}"
    return ""


def _perplexity(losses: list[tuple[float, float, float]]) -> dict[str, float]:
    """Of the model, of transformers in its dtype and exactly; `tolerance` is ALLOWANCE times what the dtype's losses are off."""
    if not losses:
        return {}
    model, transformers, exact = (math.exp(sum(column) / len(losses)) for column in zip(*losses))
    tolerance = math.expm1(ALLOWANCE * sum(abs(loss[1] - loss[2]) for loss in losses) / len(losses))
    return {"model": model, "transformers": transformers, "exact": exact, "tolerance": tolerance}


def parse_tol_map(values: Any) -> dict[str, float]:
    """`{"5": 0.01, "all": 0.05}`: top-k, each one of TOP_K, to a share of the largest logit."""
    if not isinstance(values, dict) or not values:
        raise SmolLM3Error(f'tol_map is {values!r}, allowed is an object like {{"5": 0.01, "all": 0.05}}')
    for name, tolerance in values.items():
        if name not in TOP_K or type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
            raise SmolLM3Error(
                f"tol_map has {name} {tolerance!r}, allowed are {', '.join(TOP_K)}, each from 0 to below 1"
            )
    return values
