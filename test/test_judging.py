"""What validation asks, measures and judges, on logits of which every number can be worked out by hand."""

import json
import math

import pytest
import torch
from places import TINY
from transformers import AutoTokenizer

from smollm3_neuron.check import validation
from smollm3_neuron.check.drift import drift_of
from smollm3_neuron.check.prompts import CHAT_PROMPTS, PROMPTS, TEXT
from smollm3_neuron.check.validation import IDENTICAL, NEAR_TIE, TOP_K, WRONG, Case, Judged, Report, make_cases
from smollm3_neuron.errors import SmolLM3Error

# transformers in the wider dtype, transformers, the model; at the second position the model chooses another token
EXACT = torch.tensor([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, -2.0], [1.0, 2.0, 4.0, 0.0, 0.0, 0.0, -8.0]])
THEIRS = EXACT + torch.tensor([[-0.4, 0.0, 0.0, 0.0, 0.0, 1.6, 0.0], [0.0] * 7])
OURS = EXACT + torch.tensor([[0.0, 0.8, 0.0, 0.0, 0.0, 0.0, 4.0], [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]])


def measured(kind="prompt", suppress_tokens=(), tokens=(0, 1), expected=(0, 2)) -> Judged:
    one = Judged(Case(kind, "", [1]), list(tokens), list(expected))
    for row in range(2):  # position by position, as a long answer's are measured in parts
        validation._measure(one, *(logits[row : row + 1] for logits in (OURS, THEIRS, EXACT)), suppress_tokens)
    return one


def test_what_is_measured_of_a_position():
    one = measured()
    assert list(one.errors) == list(one.noise) == list(TOP_K)
    assert one.errors["5"] == pytest.approx([0.1, 0.375]) and one.noise["5"] == pytest.approx([0.05, 0.0])
    for name in ("50", "1000", "all"):
        assert one.errors[name] == pytest.approx([0.5, 0.375]) and one.noise[name] == pytest.approx([0.2, 0.0])
    assert one.margins == pytest.approx([0.2, 1.0]) and one.expected_margins == pytest.approx([0.6, 2.0])
    assert one.chosen == [0, 1] and (one.match, one.agree, one.divergence) == (0.5, 0.5, 1)
    # of the five best, which the sixth, 1.6 off, is not among
    assert one.lead_noise == pytest.approx([0.05, 0.0])
    # the model is ahead of transformers' choice by 1, transformers of the model's by 2; the largest logit is -8
    assert one.divergence_difference == pytest.approx([0.0, 0.25])
    assert one.log_ratios[0] == pytest.approx(math.log((16 + 0.64) / (0.16 + 2.56)) / 2)
    assert not one.losses and not one.earlier_noise


def test_a_barred_token_is_not_among_the_best():
    one = measured(suppress_tokens=[0, 1])
    assert one.chosen == [2, 2] and one.margins == pytest.approx([1.0, 4.0])
    # of the five best that are left, the sixth of all is one and the seventh another
    assert one.lead_noise == pytest.approx([1.6 / 8, 0.0])
    assert one.divergence_difference == [0.0, 0.0]


def test_a_texts_losses_are_those_of_its_tokens():
    one = measured("text", expected=(0, 2))
    rows = [(logits[0].double(), logits[1].double()) for logits in (OURS, THEIRS, EXACT)]
    expected = [[float(row.exp().sum().log() - row[token]) for row, token in zip(pair, (0, 2))] for pair in rows]
    assert [list(column) for column in zip(*one.losses)] == [pytest.approx(column) for column in expected]


def test_positions_of_the_prompt_are_more_to_measure_by():
    one = Judged(Case("prompt", "", [1]), [0], [0])
    validation._measure_earlier(one, THEIRS[:1], EXACT[:1], ())
    assert one.earlier_noise["5"] == pytest.approx([0.05]) and one.earlier_noise["all"] == pytest.approx([0.2])
    assert one.lead_noise == pytest.approx([0.05]) and not one.noise


def judged(noise=0.01, error=0.0, difference=0.0, lead_noise=0.001, kind="prompt", **fields) -> Judged:
    """One position."""
    return Judged(
        Case(kind, "", [1]), **{"tokens": [1], "expected": [1], "margins": [0.5], "expected_margins": [0.25], **fields},
        noise=dict.fromkeys(TOP_K, [noise]), errors=dict.fromkeys(TOP_K, [error]), lead_noise=[lead_noise],
        divergence_difference=[difference],
    )  # fmt: skip


def judge(*cases, tol_map=None, divergence_difference_tol=None, drift=None) -> Report:
    return validation._judge(list(cases), tol_map, divergence_difference_tol, {torch.float32: 1}, drift)


def test_what_the_dtype_explains_is_twice_what_transformers_is_off():
    report = judge(judged(0.01), judged(0.02, lead_noise=0.003), judged(0.0))
    assert report.tol_map == pytest.approx(dict.fromkeys(TOP_K, 0.04)) and report.verdict == IDENTICAL
    assert report.divergence_difference_tol == pytest.approx(0.009) and report.passes == {"float32": 1}
    earlier = judged(0.01, earlier_noise=dict.fromkeys(TOP_K, [0.03, 0.0]))
    assert judge(earlier).tol_map == pytest.approx(dict.fromkeys(TOP_K, 0.06))
    given = judge(judged(), tol_map={"5": 0.5}, divergence_difference_tol=0.25)
    assert (given.tol_map, given.divergence_difference_tol) == ({"5": 0.5}, 0.25)


def test_beside_the_mean_one_error_may_be_six_times_what_transformers_is_off():
    """In 16 bits one of thousands is that large in right models; what is wrong everywhere moves the mean."""
    even = drift_of([[0.0] * 10] * 8)
    report = judge(judged(0.01, error=0.06, difference=0.007, lead_noise=0.001), drift=even)
    assert report.tol_map == pytest.approx(dict.fromkeys(TOP_K, 0.06)) and report.verdict == IDENTICAL
    assert report.divergence_difference_tol == pytest.approx(0.007)
    assert judge(judged(0.01, error=0.061), drift=even).verdict == WRONG
    assert judge(judged(0.01), drift=drift_of([[0.2] * 10] * 8)).verdict == WRONG


@pytest.mark.parametrize(
    "error, difference, reason",
    [
        (0.5, 0.25, ""),  # what is allowed, and not more
        (0.51, 0.25, "logits of the top 5 are off by 0.51 at token 0, 0.5 is allowed"),
        (0.5, 0.26, "another token at 0, by 0.26 of the largest logit, 0.25 is allowed"),
        (math.nan, 0.0, "logits of the top 5 are off by nan at token 0, 0.5 is allowed"),
        (0.0, math.nan, "another token at 0, by nan of the largest logit, 0.25 is allowed"),
    ],
)
def test_what_is_wrong_is_said(error, difference, reason):
    report = judge(judged(0.0, error, difference), tol_map={"5": 0.5}, divergence_difference_tol=0.25)
    assert report.cases[0].reason == reason and report.verdict == (WRONG if reason else IDENTICAL)


def test_another_token_within_what_is_allowed_is_a_near_tie():
    parted = judged(tokens=[2])
    report = judge(parted, judged(), tol_map={"5": 0.5}, divergence_difference_tol=0.25)
    assert [one.verdict for one in report.cases] == [NEAR_TIE, IDENTICAL] and report.verdict == NEAR_TIE
    assert parted.reason == "parts at token 0: the two best logits are 0.5 apart, transformers' 0.25"
    assert not report.cases[1].reason


def test_perplexities_of_a_text():
    losses = [(1.0, 1.1, 1.0), (2.0, 2.2, 2.5)]
    found = validation._perplexity(losses)
    assert found == pytest.approx(
        {"model": math.exp(1.5), "transformers": math.exp(1.65), "exact": math.exp(1.75), "tolerance": math.expm1(0.4)}
    )
    assert validation._perplexity([]) == {}
    report = judge(judged(losses=losses, kind="text"))
    assert report.verdict == IDENTICAL and report.perplexity == found
    far = judge(judged(losses=[(2.0, 1.05, 1.0)], kind="text"), judged())
    assert [one.verdict for one in far.cases] == [WRONG, IDENTICAL] and far.verdict == WRONG
    assert far.cases[0].reason == "perplexity 7.38906, transformers' is 2.71828"


def test_a_mean_error_that_is_too_large_is_wrong_whatever_the_cases_are():
    cases = [judged() for _ in range(8)]
    for ratio, verdict in ((0.5, WRONG), (0.05, IDENTICAL)):
        report = validation._judge(cases, None, None, {}, drift_of([[ratio] * 10] * 8))
        assert report.verdict == verdict and {one.verdict for one in report.cases} == {IDENTICAL}
        assert report.as_dict()["verdict"] == verdict


def test_cases_are_found_by_their_kind():
    report = judge(judged(), judged(kind="chat"), judged(kind="text", losses=[(1.0, 1.0, 1.0)]))
    assert [one.case.kind for one in report.cases_of("chat", "text")] == ["chat", "text"]


def test_all_of_the_longest_is_forced():
    calls = []
    run = lambda *arguments, **named: calls.append((arguments, named)) or ["answers"]  # noqa: E731
    assert validation._forced(run, [[1], [2]], [[5], [6, 7, 8]]) == ["answers"]
    assert calls == [(([[1], [2]], 3), {"forced": [[5], [6, 7, 8]]})]
    assert validation._forced(run, [], []) == [] and len(calls) == 1


def test_a_share_of_the_largest_logit_is_from_0_to_below_1():
    assert validation.parse_tol_map({"5": 0, "1000": 0.999}) == {"5": 0, "1000": 0.999}
    for values in ({"5": 1}, {"5": 1.5}, {"5": 0.1, "50": True}, {"5": -0.5}, {"5": math.nan}, {"6": 0.1}, None, "5"):
        with pytest.raises(SmolLM3Error, match="tol_map"):
            validation.parse_tol_map(values)


class WithBos:
    """tiny's tokenizer, if it began every text with a special token."""

    def __init__(self):
        self.plain = AutoTokenizer.from_pretrained(TINY)
        self.chat_template, self.apply_chat_template = self.plain.chat_template, self.plain.apply_chat_template

    def __call__(self, texts, add_special_tokens=True):
        begin = [1] if add_special_tokens else []
        ids = self.plain(texts)["input_ids"]
        return {"input_ids": [*begin, *ids] if isinstance(texts, str) else [[*begin, *one] for one in ids]}


def test_what_a_model_is_asked():
    """Each prompt, each question of a chat with and without thinking, and the text."""
    tokenizer = WithBos()
    chats = [(question, thinking) for question in CHAT_PROMPTS for thinking in (True, False)]
    ids = [
        tokenizer.plain.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=thinking
        )
        for question, thinking in chats
    ]
    assert ids[0] != ids[1] and len(set(map(len, ids))) > 1
    longest = max(map(len, ids))
    cases, left_out = make_cases(tokenizer, ["1+1=", "7 * 8 ="], "some text", longest, 5)
    assert [case.kind for case in cases] == ["prompt"] * 2 + ["chat"] * len(ids) + ["text"] and left_out == []
    assert [case.prompt for case in cases[:2]] == [
        [1, *one] for one in tokenizer.plain(["1+1=", "7 * 8 ="])["input_ids"]
    ]
    assert [case.prompt for case in cases[2:-1]] == ids
    assert [case.text for case in cases[2:4]] == [f"{CHAT_PROMPTS[0]} (/think)", f"{CHAT_PROMPTS[0]} (/no_think)"]
    text = tokenizer.plain("some text")["input_ids"]
    assert (cases[-1].prompt, cases[-1].forced) == ([1], text[:4])
    fewer, left_out = make_cases(tokenizer, ["1+1="], "some text", longest - 1, 5)
    too_long = sum(len(one) == longest for one in ids)
    assert len(fewer) == len(cases) - 1 - too_long and len(left_out) == too_long > 0
    assert f"as a chat: {longest} tokens, max_context_length is {longest - 1}" in left_out[0]


def test_a_checkpoint_may_bring_its_own_prompts(tmp_path):
    assert validation.prompts_and_text(tmp_path) == (list(PROMPTS), TEXT)
    own = {"published": ["1+1="], "held_out": [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]}
    (tmp_path / "prompts.json").write_text(json.dumps(own))
    assert validation.prompts_and_text(tmp_path) == (["1+1=", "2+2=", "3+3="], "2+2=4\n3+3=6")
    for wrong in ({**own, "published": [1]}, {**own, "published": [None]}, {"published": []}, {**own, "held_out": [5]}):
        (tmp_path / "prompts.json").write_text(json.dumps(wrong))
        with pytest.raises(SmolLM3Error, match="prompts.json: an object with published"):
            validation.prompts_and_text(tmp_path)
