"""Several tokens in one step, on the CPU runtime: the tokens are those of steps of one token, whatever was guessed."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from commands import run
from places import ROOT
from test_features import drafts_of, prompt

from nxd_sources import model_jobs
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import generation, speculation
from smollm3_neuron.generate.generation import Sampling, decode_inputs, generate, prefill_inputs
from smollm3_neuron.machine.runtime import ensure_neuronx

PROMPTS = [prompt(9), prompt(40, 1), prompt(3, 2)]
NEW_TOKENS, WIDTH = 20, 4
# k from 2 to 8 at each TP degree, alone and in a batch of prompts of different lengths
MATRIX = [(length, tp, batch) for tp in (1, 2, 4, 3) for batch in (1, 3) for length in range(2, 9)]


def load(checkpoint, folder, **neuron):
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    job = {"checkpoint": checkpoint, "kind": "answer", "neuron": {"tp_degree": 1, "batch_size": 3, **neuron}}
    model = model_jobs.build(NeuronSmolLM3ForCausalLM, job)
    model.compile(folder)
    model.load(folder)
    return model


@pytest.fixture(scope="module")
def model(random_checkpoints, tmp_path_factory):
    ensure_neuronx()
    return load(random_checkpoints["plain"], tmp_path_factory.mktemp("model"), seq_len=64, speculation_length=WIDTH)


@pytest.fixture(scope="module")
def plain(model):
    return answers(model)


def answers(model, **how):
    return [result.tokens for result in generate(model, PROMPTS, how.pop("new_tokens", NEW_TOKENS), **how)]


def speculated(model, drafts, **how):
    with model_jobs.drafted(PROMPTS, drafts):
        return answers(model, prompt_lookup=WIDTH - 1, **how)


def wrong(tokens):
    return [(token + 1) % 256 for token in tokens]


@pytest.mark.parametrize("drafts", [drafts_of, lambda rows: [wrong(row) for row in rows], lambda rows: rows])
def test_tokens_are_those_of_plain_decoding(model, plain, drafts):
    """With candidates of which some are right, none, all."""
    assert speculated(model, drafts(plain)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("length, tp, batch", MATRIX)
def test_tokens_at_every_length_and_degree(length, tp, batch, random_checkpoints, tmp_path, plain):
    shape = {"tp_degree": tp, "batch_size": batch, "seq_len": 64, "speculation_length": length}
    model = load(random_checkpoints["plain"], tmp_path, **shape)
    assert answers(model) == plain
    with model_jobs.drafted(PROMPTS, drafts_of(plain)):
        results = generate(model, PROMPTS, NEW_TOKENS, prompt_lookup=length - 1)
    assert [result.tokens for result in results] == plain and all(result.accepted for result in results)
    assert answers(model, prompt_lookup=length - 1) == plain  # what is looked up in random text


def test_the_end_of_the_cache(model, monkeypatch):
    """Every row goes on to its last place, where fewer tokens are left than a step verifies."""
    whole = answers(model, new_tokens=100)
    assert [len(p) + len(row) for p, row in zip(PROMPTS, whole)] == [65] * 3
    widths, forward = [], type(model).forward

    def seen(self, **inputs):
        widths.append(inputs["input_ids"].shape[1])
        return forward(self, **inputs)

    monkeypatch.setattr(type(model), "forward", seen)
    assert speculated(model, whole, new_tokens=100) == whole
    # the row of 40 tokens and the others reach it at different steps
    assert {1, WIDTH} < set(widths) and widths[-1] == 1
    assert len(widths) < max(map(len, whole))


def test_an_end_of_sequence_among_the_candidates(model, plain):
    ends = {"eos_token_ids": [plain[0][9], plain[1][6]]}
    expected = answers(model, **ends)
    assert sorted(map(len, expected)) != [NEW_TOKENS] * 3
    assert speculated(model, plain, **ends) == expected
    assert speculated(model, plain, new_tokens=7) == [row[:7] for row in plain]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, seed=3), Sampling(0.7, top_k=20, seed=1), Sampling(further={"repetition_penalty": 1.5})]
)
def test_samples_are_those_of_plain_decoding(model, sampling):
    expected = answers(model, sampling=sampling)
    assert speculated(model, drafts_of(expected), sampling=sampling) == expected


def test_logits_and_margins_are_kept_and_forced_tokens_are_candidates(model, plain):
    drawn = random.Random(0)
    forced = [[drawn.randrange(256) for _ in range(count)] for count in (11, 24, 2)]
    one, several = (
        generate(model, PROMPTS, NEW_TOKENS, forced=forced, keep_logits=True, prompt_lookup=count)
        for count in (None, WIDTH - 1)
    )
    for a, b in zip(one, several):
        assert a.tokens == b.tokens and a.margins == pytest.approx(b.margins, abs=1e-4)
        torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), rtol=0, atol=1e-4)
    # behind the first token steps of 4: of 10 tokens 3 steps, of 19 5, of 1 one that has no candidates
    assert [(row.offered, row.accepted) for row in several] == [(7, 7), (14, 14), (0, 0)]


def test_dropped_candidates_are_never_seen(model):
    """What stands in the cache behind the tokens so far changes no bit of what comes."""
    lengths = [len(row) for row in PROMPTS]

    def logits_after(candidates):
        model.reset()
        model(**prefill_inputs(PROMPTS, 0))
        model(**decode_inputs([[7, *candidates]] * 3, lengths))
        behind = [length + 1 for length in lengths]
        verified = model(**decode_inputs([[8, 9, 10, 11]] * 3, behind)).logits
        return torch.cat([verified, model(**decode_inputs([[12]] * 3, [length + 1 for length in behind])).logits], 1)

    assert torch.equal(logits_after([1, 2, 3]), logits_after([250, 251, 252]))


def shifted_positions(model, monkeypatch):
    forward = type(model).forward

    def shifted(self, **inputs):
        inputs["position_ids"] = inputs["position_ids"] + (inputs["input_ids"].shape[1] == WIDTH)
        return forward(self, **inputs)

    monkeypatch.setattr(type(model), "forward", shifted)


def a_cache_that_is_not_rolled_over(model, monkeypatch):
    """K and V of what was verified are forgotten but for the first token's."""
    forward, caches = type(model).forward, model.traced_model._caches[0]

    def forgetting(self, **inputs):
        before = {name: cache.clone() for name, cache in caches.items()}
        output = forward(self, **inputs)
        if inputs["input_ids"].shape[1] == WIDTH:
            for row, first in enumerate(inputs["position_ids"][:, 0].tolist()):
                for name, cache in caches.items():
                    cache[row, :, first + 1 :] = before[name][row, :, first + 1 :]
        return output

    monkeypatch.setattr(type(model), "forward", forgetting)


def one_accepted_too_far(model, monkeypatch):
    """The first wrong candidate is taken for right: the tokens behind it follow on another one than the answer has."""
    step = generation._Group._step

    def lenient(self):
        output, candidates = step(self)
        chosen = output.logits.argmax(-1)
        for row, guess in enumerate(candidates):
            at = next((at for at, token in enumerate(guess) if token != chosen[row, at]), None)
            if at is not None:
                guess[at] = int(chosen[row, at])
        return output, candidates

    monkeypatch.setattr(generation._Group, "_step", lenient)


@pytest.mark.parametrize("fault", [shifted_positions, a_cache_that_is_not_rolled_over, one_accepted_too_far])
def test_faults_are_noticed(fault, model, plain, monkeypatch):
    fault(model, monkeypatch)
    assert speculated(model, drafts_of(plain)) != plain


def test_candidates_are_transformers(model):
    """Those of the longest match, at most as many as asked for; a row whose candidates are wrong does without them."""
    lookup = speculation.PromptLookup(3, rows=2)
    assert lookup(0, [5, 1, 2, 3, 9, 8, 7, 6, 1, 2, 3]) == [9, 8, 7]
    assert lookup(0, [1, 2, 3, 4]) == [] and lookup(0, [1]) == []
    pauses = []
    for _ in range(5):
        lookup.judged(0, accepted=0, offered=3)
        pauses.append(0)
        while not lookup(0, [4, 4, 4, 4]):
            pauses[-1] += 1
        assert lookup(1, [4, 4, 4, 4])
    assert pauses == [1, 4, 16, 16, 16]
    lookup.judged(0, accepted=1, offered=3)  # a hit by chance
    assert lookup.left == [8, 0]
    lookup.judged(0, accepted=2, offered=3)
    assert lookup(0, [4, 4, 4, 4])


@pytest.mark.parametrize(
    "count, length, named", [(0, 4, "1 to 3"), (4, 4, "1 to 3"), (3, 0, "speculation_length of 4")]
)
def test_numbers_of_candidates_that_are_not_possible(count, length, named, model, monkeypatch):
    monkeypatch.setattr(model.config.neuron_config, "speculation_length", length)
    with pytest.raises(SmolLM3Error, match=f"^prompt_lookup is {count}, [^\n]*{named}[^\n]*$"):
        generate(model, PROMPTS, 4, prompt_lookup=count)


@pytest.mark.parametrize("fault", [None, shifted_positions, a_cache_that_is_not_rolled_over])
def test_validation_judges_the_graph_that_verifies(fault, model, random_checkpoints, monkeypatch):
    """In a text, which it reads, and where so many candidates are found."""
    from smollm3_neuron.check.validation import IDENTICAL, WRONG, Case, Reference, validate

    if fault:
        fault(model, monkeypatch)
    text = prompt(30, 7)
    cases = [*(Case("prompt", str(p), p) for p in PROMPTS), Case("text", "text", text[:1], text[1:])]
    reference = Reference(random_checkpoints["plain"], torch.float32)
    report = validate(model, reference, cases, 8, prompt_lookup=WIDTH - 1)
    assert report.verdict == (WRONG if fault else IDENTICAL)
    (judged,) = report.cases_of("text")
    assert judged.verdict == report.verdict


def test_commands(tmp_path):
    """The answer with prompt lookup is the one without; benchmark.py says how many candidates were right."""

    def command(script, *args):
        return run(ROOT / f"scripts/{script}.py", *args)

    artifact = tmp_path / "artifact"
    shape = ["--model", "tiny", "--tp", 1, "--seq-len", 96, "--dtype", "float32", "--device", "cpu"]
    done = command("compile", *shape, "--speculation-length", 5, "--output", artifact)
    assert done.returncode == 0, done.stderr
    asked = [artifact, "7 * 8 = 56\n7 * 9 = 63\n7 * 8 =", "--max-new-tokens", 24]
    plain, looked_up = command("generate", *asked), command("generate", *asked, "--prompt-lookup", 4)
    assert looked_up.stdout == plain.stdout and "candidates accepted" in looked_up.stderr
    refused = command("generate", *asked, "--prompt-lookup", 5)
    assert refused.returncode == 2 and "prompt_lookup is 5, allowed is a whole number from 1 to 4" in refused.stderr
    sizes = ["--prompt-lengths", 40, "--new-tokens", 16, "--rounds", 1, "--without-transformers"]
    done = command("benchmark", artifact, *sizes, "--prompt-lookup", 4, "--json", tmp_path / "json")
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    engines = ["artifact", "artifact, prompt lookup"]
    assert [(row["engine"], row["prompts"]) for row in rows] == [
        (e, kind) for kind in ("free", "copying") for e in engines
    ]
    for row in rows:
        assert (row["lookup_ratio"] is None) == (row["engine"] == "artifact") == (row["accepted"] is None)
    assert rows[-1]["prompts"] == "copying" and 0 <= rows[-1]["accepted"] <= 1
    done = command("benchmark", artifact, *sizes, "--prompt-lookup", 5)
    assert done.returncode == 2 and "prompt_lookup is 5" in done.stderr


def test_the_copying_model_is_widened_without_a_change():
    """What tools/train_copying.py writes answers as what it trained, and is large enough to be compiled ahead."""
    from train_copying import TRAINED, batch, build_config, widened
    from transformers import SmolLM3ForCausalLM

    ensure_neuronx()
    from nxd_cpu_compiler.build import LEAST_BYTES

    torch.manual_seed(0)
    model = SmolLM3ForCausalLM(build_config(TRAINED)).eval()
    ids = batch()["input_ids"][:2]
    wide = widened(model).eval()
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert sum(parameter.nbytes for parameter in wide.parameters()) > LEAST_BYTES


# ---- with a draft ----


class WithDraft:
    """Graphs like the library's, which take a token of each row and return what they accept, on the CPU runtime's graph
    that verifies WIDTH tokens. What is guessed is what `drafts` goes on with; `padding` fills up, a release's own."""

    def __init__(self, model, drafts, padding):
        self.model, self.drafts, self.padding = model, drafts, padding
        self.config = SimpleNamespace(vocab_size=256, neuron_config=SimpleNamespace(**vars(model.config.neuron_config)))
        self.config.neuron_config.enable_fused_speculation = True
        self.config.neuron_config.on_device_sampling_config = SimpleNamespace(
            do_sample=False, dynamic=False, global_topk=256
        )
        self.reset, self.steps = model.reset, 0

    def __call__(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params):
        how = {"attention_mask": attention_mask, "seq_ids": seq_ids}
        if input_ids.shape[1] > 1:
            chosen = self.model(input_ids=input_ids, position_ids=position_ids, **how).logits.argmax(-1)
            counts, stands = torch.ones(len(chosen), dtype=torch.int64), attention_mask.sum(1, keepdim=True)
        else:
            self.steps += 1
            assert int(position_ids.max()) + WIDTH <= self.config.neuron_config.seq_len
            guessed = self._guessed(position_ids)
            fed, positions = torch.cat([input_ids, guessed], 1), position_ids + torch.arange(WIDTH)
            chosen = self.model(input_ids=fed, position_ids=positions, **how).logits.argmax(-1)
            counts = 1 + (guessed == chosen[:, :-1]).long().cumprod(1).sum(1)
            stands = position_ids + counts[:, None]
        accepted = torch.full((len(counts), WIDTH), self.padding)
        for row, count in enumerate(counts):
            accepted[row, :count] = chosen[row, :count]
        return SimpleNamespace(fused_outputs=[accepted, accepted[:, :1], attention_mask, stands])

    def _guessed(self, position_ids):
        rows = []
        for prompt_, draft, position in zip(PROMPTS, self.drafts, position_ids[:, 0].tolist()):
            rest = draft[position - len(prompt_) + 1 :][: WIDTH - 1]
            rows.append([*rest, *[0] * (WIDTH - 1 - len(rest))])
        return torch.tensor(rows)


@pytest.mark.parametrize("padding", [-1, 0])
def test_answers_are_those_of_plain_decoding(model, plain, padding):
    """With a draft that is right, wrong, or right but for some tokens; releases fill up with -1, or with token 0."""
    right = WithDraft(model, plain, padding)
    results = generate(right, PROMPTS, NEW_TOKENS)
    assert [row.tokens for row in results] == plain
    assert all(row.accepted == row.offered == NEW_TOKENS - 1 - right.steps for row in results)
    never = WithDraft(model, [wrong(row) for row in plain], padding)
    results = generate(never, PROMPTS, NEW_TOKENS)
    assert [row.tokens for row in results] == plain and never.steps == NEW_TOKENS - 1
    assert not any(row.accepted for row in results)
    results = generate(WithDraft(model, drafts_of(plain), padding), PROMPTS, NEW_TOKENS)
    assert [row.tokens for row in results] == plain
    accepted, offered = zip(*((row.accepted, row.offered) for row in results))
    assert all(accepted) and sum(accepted) < sum(offered)


def test_ends_of_answers(model, plain):
    """At a token in the middle of what a step accepts, at a number of tokens, and where no step fits any more."""
    ends = {"eos_token_ids": [plain[0][9], plain[1][6]]}
    assert answers(WithDraft(model, plain, -1), **ends) == answers(model, **ends)
    assert answers(WithDraft(model, plain, -1), new_tokens=7) == [row[:7] for row in plain]
    whole = answers(model, new_tokens=100)
    results = generate(WithDraft(model, whole, -1), PROMPTS, 100)
    for prompt_, row, expected in zip(PROMPTS, results, whole):
        assert len(prompt_) + len(row.tokens) == 64 - WIDTH + 2
        assert row.tokens == expected[: len(row.tokens)]
    longest = WithDraft(model, [[]], -1)
    assert len(generate(longest, [prompt(63)], 9)[0].tokens) == 1 and not longest.steps


def test_what_such_graphs_do_not_have(model, plain):
    fused = WithDraft(model, plain, -1)
    for how in ({"forced": plain}, {"keep_logits": True}):
        with pytest.raises(SmolLM3Error, match="compiled with a draft: its graphs return the tokens that they accept"):
            generate(fused, PROMPTS, 4, **how)
    with pytest.raises(SmolLM3Error, match="prompt_lookup is 3, but the model was compiled with a draft"):
        generate(fused, PROMPTS, 4, prompt_lookup=3)


def test_one_accepted_too_far_is_noticed(model, plain, monkeypatch):
    """The token behind a wrong guess follows on another one than the answer has."""
    forward = WithDraft.__call__

    def lenient(self, **inputs):
        output = forward(self, **inputs)
        if inputs["input_ids"].shape[1] == 1:
            accepted, *rest, stands = output.fused_outputs
            further = (stands + 1).minimum(inputs["position_ids"] + WIDTH)
            output.fused_outputs = [accepted.clamp(min=0), *rest, further]
        return output

    monkeypatch.setattr(WithDraft, "__call__", lenient)
    assert answers(WithDraft(model, drafts_of(plain), -1)) != plain
