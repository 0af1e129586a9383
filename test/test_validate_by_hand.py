"""What `validate` asks of a model and of its reference, and what it makes of the answers; both are tables here.

The logits that follow on a token depend on that token alone, so that every answer is known beforehand.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from smollm3_neuron.check import validation
from smollm3_neuron.check.validation import IDENTICAL, NEAR_TIE, WRONG, Case, validate

VOCAB, PROMPTS = 7, [[token] for token in range(4)] + [[0, token] for token in range(4)]
# after each token the next but one is best, by 2; in the model's dtype all is off by a little
EXACT = torch.stack([torch.roll(torch.tensor([4.0, 2, 0, -1, -2, -3, -8]), token + 2) for token in range(VOCAB)])
THEIRS = EXACT + 0.01 * torch.sin(torch.arange(49.0)).reshape(VOCAB, VOCAB)
TEXT = Case("text", "a text", [3], [5, 0, 2])


def greedy(table, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(table[tokens[-1]].argmax()))
    return tokens[len(prompt) :]


class Model:
    """Answers by a table; `calls` has the tokens of each step."""

    def __init__(self, table, max_context_length=8):
        self.table, self.calls = table, []
        neuron_config = SimpleNamespace(
            batch_size=3, seq_len=32, max_context_length=max_context_length, is_prefix_caching=False
        )
        self.config = SimpleNamespace(vocab_size=VOCAB, neuron_config=neuron_config)

    def reset(self):
        pass

    def __call__(self, input_ids, attention_mask, position_ids, seq_ids):
        last = attention_mask.sum(1) - 1 if input_ids.shape[1] > 1 else torch.zeros(len(input_ids), dtype=torch.long)
        tokens = input_ids[torch.arange(len(input_ids)), last]
        self.calls.append(tokens.tolist())
        return SimpleNamespace(logits=self.table[tokens][:, None], tokens=None)


class Tables:
    """A Reference of two tables; `drafts` are what was drafted where an answer parts from the greedy one."""

    unquantized, drafted = None, None

    def __init__(self, dtype=torch.float32, wider=torch.float64):
        self.dtype, self.wider = dtype, wider
        self.earlier, self.passes = {}, {dtype: 1, wider: 2}

    def answers(self, prompts, tokens, suppress_tokens, draft, fixed):
        self.asked = {"prompts": prompts, "tokens": tokens, "fixed": list(fixed)}
        answers = [own if index in fixed else greedy(THEIRS, prompt, len(own))
                   for index, (prompt, own) in enumerate(zip(prompts, tokens))]  # fmt: skip
        self.draft = draft
        return list(zip(answers, self.rows(THEIRS, prompts, answers)))

    def logits(self, dtype, prompts, tokens):
        assert dtype == self.wider
        return self.rows(EXACT, prompts, tokens)

    @staticmethod
    def rows(table, prompts, tokens):
        return [table[torch.tensor([prompt[-1], *own[:-1]])] for prompt, own in zip(prompts, tokens)]


def cases(*more):
    return [*(Case("prompt", str(prompt), prompt) for prompt in PROMPTS), *more]


def test_a_right_model_is_identical_and_is_asked_once():
    model, reference = Model(THEIRS), Tables()
    report = validate(model, reference, cases(TEXT), 4)
    assert report.verdict == IDENTICAL and report.drift is None
    assert [one.tokens for one in report.cases[:-1]] == [greedy(EXACT, prompt, 4) for prompt in PROMPTS]
    assert reference.asked == {
        "prompts": [*PROMPTS, [3]], "tokens": [*(greedy(EXACT, p, 4) for p in PROMPTS), [5, 0, 2]], "fixed": [8],
    }  # fmt: skip
    # groups of three prompts, four tokens each; then the text's three
    assert [len(call) for call in model.calls] == [3] * 4 + [3] * 4 + [2] * 4 + [1] * 3
    assert model.calls[-3:] == [[3], [5], [0]]
    losses = [float(row.exp().sum().log() - row[token]) for row, token in zip(THEIRS[[3, 5, 0]].double(), (5, 0, 2))]
    assert report.perplexity["model"] == report.perplexity["transformers"] == pytest.approx(math.exp(sum(losses) / 3))
    assert "unquantized" not in report.perplexity


@pytest.mark.parametrize("dtype, wider", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("tol_map", [None, {"all": 0.5}])
def test_the_mean_is_judged_in_16_bits_where_no_tolerance_was_given(dtype, wider, tol_map):
    report = validate(Model(THEIRS), Tables(dtype, wider), cases(), 3, tol_map=tol_map)
    if dtype == torch.float32 or tol_map:
        assert report.drift is None
    else:
        assert report.drift.ratio == pytest.approx(1.0) and (report.drift.cases, report.drift.positions) == (8, 24)
    assert report.tol_map == tol_map or tol_map is None


@pytest.mark.parametrize("by, verdict", [(1e-3, NEAR_TIE), (0.5, WRONG)])
def test_where_answers_part_the_models_logits_are_those_on_transformers_tokens(by, verdict):
    """After 2 a model prefers 5 where transformers and the table of the wider run have 4, by less or by more."""
    exact, model = EXACT.clone(), Model(THEIRS.clone())
    model.table[2, 5] = model.table[2, 4] + by
    tied = THEIRS.clone()
    tied[2, 5] = tied[2, 4] - 1e-3

    class Tied(Tables):
        def answers(self, prompts, tokens, suppress_tokens, draft, fixed):
            answers = [greedy(tied, prompt, len(own)) for prompt, own in zip(prompts, tokens)]
            return list(zip(answers, self.rows(tied, prompts, answers)))

        def logits(self, dtype, prompts, tokens):
            exact[2, 5] = exact[2, 4]
            return self.rows(exact, prompts, tokens)

    report = validate(model, Tied(), cases(), 4)
    expected = [greedy(tied, prompt, 4) for prompt in PROMPTS]
    assert report.verdict == verdict and [one.expected for one in report.cases] == expected
    for one, prompt in zip(report.cases, PROMPTS):
        passes_2 = 2 in [prompt[-1], *one.expected[:-1]]
        assert (one.divergence is not None) == passes_2
        # under teacher forcing every other token is transformers'
        fed = [prompt[-1], *one.expected[:-1]]
        assert one.chosen == [5 if token == 2 else best for token, best in zip(fed, one.expected)]
    assert {one.verdict for one in report.cases if one.divergence is None} == {IDENTICAL}


def test_a_draft_goes_on_with_what_fits_into_the_context():
    reference = Tables()
    validate(Model(THEIRS, max_context_length=3), reference, cases(), 4)
    drafted = reference.draft([[1], [2, 3], [0]], [[4], [5, 6], [1, 2]])
    assert drafted == [greedy(THEIRS, [1, 4], 4), [], greedy(THEIRS, [0, 1, 2], 4)]


def test_positions_of_a_prompt_count_where_the_reference_has_them():
    reference, off = Tables(), EXACT[:2].clone()
    off[1, 3] += 0.8
    reference.earlier = {(torch.float32, (0, 1)): off, (torch.float64, (0, 1)): EXACT[:2]}
    report = validate(Model(THEIRS), reference, cases(), 3)
    by_prompt = {tuple(one.case.prompt): one for one in report.cases}
    assert by_prompt[0, 1].earlier_noise["all"] == pytest.approx([0.0, 0.1]) and not reference.earlier
    assert not by_prompt[(1,)].earlier_noise and report.tol_map["all"] == pytest.approx(0.2)


def test_of_8_bit_weights_the_whole_ones_perplexity_is_told():
    asked = []

    def logits(inputs, kept):
        asked.append((list(inputs), list(kept)))
        return [EXACT[torch.tensor(inputs[0])].bfloat16()]

    for more, expected in (((TEXT,), [([[3, 5, 0]], [3])]), ((), [])):
        reference = Tables()
        reference.unquantized = SimpleNamespace(logits=logits)
        report = validate(Model(THEIRS), reference, cases(*more), 3)
        assert asked == expected and ("unquantized" in report.perplexity) == bool(more)
        if more:
            rows = EXACT[[3, 5, 0]].double()
            losses = [float(row.exp().sum().log() - row[token]) for row, token in zip(rows, (5, 0, 2))]
            assert report.perplexity["unquantized"] == pytest.approx(math.exp(sum(losses) / 3))
        asked.clear()


def test_every_run_of_the_model_is_asked_for_alike(monkeypatch):
    calls, run = [], validation.generate

    def generate(*arguments, **how):
        calls.append({name: value for name, value in how.items() if name != "forced"})
        return run(*arguments, **how)

    monkeypatch.setattr(validation, "generate", generate)
    validate(Model(THEIRS), Tables(), cases(TEXT), 2, suppress_tokens=[6], pad_token_id=5)
    how = {"keep_logits": True, "suppress_tokens": [6], "pad_token_id": 5, "prompt_lookup": None}
    assert len(calls) > 1 and all(call == how for call in calls)
