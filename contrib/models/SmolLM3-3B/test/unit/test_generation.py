from types import SimpleNamespace

import pytest
import torch

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import Generated, Sampling, decode_inputs, generate, prefill_inputs

VOCAB = 11


class Counter:
    """Stands in for a model: the logits of a row favour (last token + 1), its cache is the tokens that it was given."""

    def __init__(self, batch_size=2, seq_len=16, max_context_length=8):
        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            neuron_config=SimpleNamespace(
                is_prefix_caching=False, batch_size=batch_size, seq_len=seq_len, max_context_length=max_context_length
            ),
        )

    def reset(self):
        self.cache = {}

    def __call__(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params=None, adapter_ids=None):
        self.sampling_params, self.adapter_ids = sampling_params, adapter_ids
        logits = torch.zeros(len(seq_ids), 1, VOCAB)
        for row, seq in enumerate(seq_ids.tolist()):
            if position_ids.shape[1] > 1 or position_ids[row] == 0:
                assert self.cache.get(seq) is None
                self.cache[seq] = input_ids[row][attention_mask[row].bool()].tolist()
            else:
                position = int(position_ids[row])
                assert position < self.config.neuron_config.seq_len
                assert attention_mask[row].sum() == position and len(self.cache[seq]) in (position, position + 1)
                self.cache[seq][position:] = [int(input_ids[row])]
            logits[row, 0, (self.cache[seq][-1] + 1) % VOCAB] = 5.0
            logits[row, 0, (self.cache[seq][-1] + 2) % VOCAB] = 3.0
        return SimpleNamespace(logits=logits, tokens=logits[:, -1].argmax(-1).int())


def test_greedy_goes_on_until_the_limit():
    result = generate(Counter(), [[1, 2], [5]], 4)
    assert [r.tokens for r in result] == [[3, 4, 5, 6], [6, 7, 8, 9]]
    assert result[0].margins == [2.0] * 4


def test_more_prompts_than_the_batch_size():
    result = generate(Counter(batch_size=2), [[1], [2], [3], [4], [5]], 2)
    assert [r.tokens for r in result] == [[2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]


def test_a_row_ends_at_its_eos_and_the_others_go_on():
    result = generate(Counter(), [[1, 2], [5]], 5, eos_token_ids=[4, 7])
    assert [r.tokens for r in result] == [[3, 4], [6, 7]]
    result = generate(Counter(), [[1, 2], [5]], 5, eos_token_ids=[4])
    assert [r.tokens for r in result] == [[3, 4], [6, 7, 8, 9, 10]]


def test_suppressed_tokens_are_never_chosen():
    assert generate(Counter(), [[1, 2]], 3, eos_token_ids=[3], suppress_tokens=[3])[0].tokens == [4, 5, 6]


def test_a_full_cache_ends_a_row():
    # positions 0 to 5: the prompt's 4, then two new tokens are written and a third one is known
    assert generate(Counter(seq_len=6), [[1, 2, 3, 4]], 99)[0].tokens == [5, 6, 7]
    assert generate(Counter(seq_len=6), [[1, 2, 3, 4], [1]], 99)[1].tokens == [2, 3, 4, 5, 6, 7]


def test_tokens_are_given_as_they_come():
    seen = []
    generate(Counter(batch_size=1), [[1], [5]], 2, on_token=lambda row, token: seen.append((row, token)))
    assert seen == [(0, 2), (0, 3), (1, 6), (1, 7)]
    seen.clear()
    generate(Counter(batch_size=2), [[1], [5], [7], [9]], 1, on_token=lambda row, token: seen.append((row, token)))
    assert seen == [(0, 2), (1, 6), (2, 8), (3, 10)]


def test_sampling_repeats_with_a_seed_and_does_not_depend_on_the_batch():
    sampling = Sampling(temperature=2.0, top_k=4, top_p=0.9, seed=7)
    together = [r.tokens for r in generate(Counter(), [[1, 2], [5]], 6, sampling=sampling)]
    assert together == [r.tokens for r in generate(Counter(), [[1, 2], [5]], 6, sampling=sampling)]
    assert together[1] == generate(Counter(), [[5]], 6, sampling=sampling)[0].tokens
    others = [generate(Counter(), [[5]], 6, sampling=Sampling(2.0, seed=seed))[0].tokens for seed in range(8)]
    assert len({tuple(tokens) for tokens in others}) > 1


@pytest.mark.parametrize(
    "prompts, new, message",
    [
        ([[]], 4, "prompt 0 has no tokens"),
        ([[1], [1] * 9], 4, "prompt 1 has 9 tokens.* 8"),
        ([[1]], 0, "max_new_tokens is 0"),
        ([[1], [-1, 4]], 4, "prompt 1 has tokens from -1 to 4, allowed is 0 to 10"),
        ([[1], [11, 4]], 4, "prompt 1 has tokens from 4 to 11, allowed is 0 to 10"),
    ],
)
def test_prompts_that_do_not_fit(prompts, new, message):
    with pytest.raises(SmolLM3Error, match=message):
        generate(Counter(), prompts, new)


def test_the_longest_prompt_and_every_token_of_the_vocabulary_fit():
    assert [r.tokens for r in generate(Counter(), [[1] * 8, [0, VOCAB - 1]], 1)] == [[2], [0]]


def test_an_answer_is_its_tokens_and_margins():
    """Those with the logits kept, or of steps of several tokens, equal those without."""
    prompts = [[1, 2, 3, 4, 5, 1, 2, 3]]
    (plain,), (kept,) = generate(Counter(), prompts, 3), generate(Counter(), prompts, 3, keep_logits=True)
    assert plain == kept and not plain.logits and len(kept.logits) == 3 and "logits" not in repr(kept)
    (several,) = generate(Verifier(), prompts, 3, prompt_lookup=3)
    assert several.offered and several.accepted
    assert several == Generated(several.tokens, several.margins, finished=True) != Generated(several.tokens)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sampling_values_that_there_are_not(values, message):
    with pytest.raises(SmolLM3Error, match=message):
        Sampling(**values)


def test_inputs_are_right_padded():
    inputs = prefill_inputs([[7, 8, 9], [5]], pad_token_id=3)
    assert inputs["input_ids"].tolist() == [[7, 8, 9], [5, 3, 3]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 1]]
    following = decode_inputs([[4], [6]], [3, 1])
    assert following["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in (*inputs.values(), *following.values())} == {torch.int64}


def test_logits_that_are_not_numbers_are_an_error():
    model_call = Counter.__call__

    class Broken(Counter):
        def __call__(self, **inputs):
            output = model_call(self, **inputs)
            output.logits[0, 0, 3] = float("nan")
            return output

    with pytest.raises(RuntimeError, match="not numbers"):
        generate(Broken(), [[1]], 2)


def on_device(**config):
    model = Counter()
    model.config.neuron_config.on_device_sampling_config = SimpleNamespace(
        **{"do_sample": False, "dynamic": False, "global_topk": 8, **config}
    )
    return model


def test_the_devices_tokens_are_taken():
    model = on_device()
    result = generate(model, [[1, 2], [5]], 4)
    assert [r.tokens for r in result] == [[3, 4, 5, 6], [6, 7, 8, 9]] and result[0].margins == []
    assert model.sampling_params.tolist() == [[1, 1, 1]] * 2
    model = on_device(dynamic=True)
    generate(model, [[1]], 1, sampling=Sampling(0.5, seed=123))
    assert model.sampling_params.tolist() == [[8, 1, 0.5]]
    assert torch.initial_seed() == 123  # the CPU runtime draws from torch's own generator
    generate(model, [[1]], 1, sampling=Sampling(0.5, top_k=3, top_p=0.25))
    assert model.sampling_params.tolist() == [[3, 0.25, 0.5]]


def test_what_a_device_that_samples_cannot_do():
    with pytest.raises(SmolLM3Error, match="barred"):
        generate(on_device(), [[1]], 4, suppress_tokens=[3])
    with pytest.raises(SmolLM3Error, match="temperature is 0.5, but on_device_sampling_config is greedy"):
        generate(on_device(), [[1]], 4, sampling=Sampling(0.5))
    with pytest.raises(SmolLM3Error, match="top_k is 99, on_device_sampling_config has a global_topk of 8"):
        generate(on_device(dynamic=True), [[1]], 4, sampling=Sampling(0.5, top_k=99))
    for name, value in (("min_p", 0.1), ("repetition_penalty", 1.2), ("suppress_tokens", [3]), ("min_new_tokens", 2)):
        with pytest.raises(SmolLM3Error, match=f"{name} is .*which a device that samples cannot do"):
            generate(on_device(dynamic=True), [[1]], 4, sampling=Sampling(0.5, further={name: value}))


def test_of_equal_logits_the_lowest_token_is_chosen():
    class Ties(Counter):
        def __call__(self, **inputs):
            output = super().__call__(**inputs)
            output.logits[:] = torch.tensor([0.0, 3, 3, 1, 0, 0, 0, 0, 0, 0, 3])
            return output

    result = generate(Ties(), [[5], [6, 7]], 3)
    assert [row.tokens for row in result] == [[1, 1, 1]] * 2 and result[0].margins == [0.0] * 3


class WithAdapters(Counter):
    """Compiled with two adapters: ids 0 and 1, and 2 for none. `seen` has the ids of each call."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.config.neuron_config.lora_config = SimpleNamespace(lora_ckpt_paths={"a": "A", "b": "B"}, max_loras=3)

    def __call__(self, **inputs):
        assert inputs["adapter_ids"].dtype == torch.int32
        self.seen.append(inputs["adapter_ids"].tolist())
        return super().__call__(**inputs)


def test_each_prompt_has_its_adapter_in_every_step():
    model = WithAdapters()
    generate(model, [[1], [2], [3]], 2, adapter_ids=[1, 0, 2])
    assert model.seen == [[1, 0], [1, 0], [2], [2]]
    model = WithAdapters()
    generate(model, [[1], [2]], 1)
    assert model.seen == [[2, 2]]


@pytest.mark.parametrize("adapter_ids", [[0], [0, 1, 2], [0, 3], [-1, 0]])
def test_adapters_that_there_are_not(adapter_ids):
    with pytest.raises(SmolLM3Error, match=r"adapter_ids is \[.*, allowed is one for each of 2 prompts, from 0 to 2"):
        generate(WithAdapters(), [[1], [2]], 1, adapter_ids=adapter_ids)
    with pytest.raises(SmolLM3Error, match="compiled without adapters"):
        generate(Counter(), [[1], [2]], 1, adapter_ids=[0, 0])


class Verifier(Counter):
    """Takes several tokens of a row at once, and has logits behind each of them; `widths` are those of its calls."""

    def __init__(self, seq_len=32):
        super().__init__(seq_len=seq_len)
        self.config.neuron_config.speculation_length = 4
        self.widths = []

    def __call__(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params=None):
        self.widths.append(input_ids.shape[1])
        if not self.cache:
            return super().__call__(input_ids, attention_mask, position_ids, seq_ids)
        assert input_ids.shape[1] in (1, 4)
        logits = torch.zeros(*input_ids.shape, VOCAB)
        for row, (tokens, positions) in enumerate(zip(input_ids.tolist(), position_ids.tolist())):
            assert positions == list(range(positions[0], positions[0] + len(tokens)))
            assert positions[-1] < self.config.neuron_config.seq_len and positions[0] <= len(self.cache[row])
            self.cache[row][positions[0] :] = tokens
            logits[row] = torch.nn.functional.one_hot((input_ids[row] + 1) % VOCAB, VOCAB) * 5.0
        return SimpleNamespace(logits=logits, tokens=logits.argmax(-1))


def test_candidates_are_taken_as_far_as_they_are_right():
    model = Verifier()
    (result,) = generate(model, [[1, 2, 3, 4, 5, 1, 2, 3]], 6, prompt_lookup=3)
    assert result.tokens == [4, 5, 6, 7, 8, 9] and len(result.margins) == 6
    # behind 4 stand 5, 1, 2: the 5 is right, a 6 takes the place of the 1, and on 6 nothing ever followed
    assert (result.offered, result.accepted) == (3, 1) and model.widths == [8, 4, 1, 1, 1]
    model = Verifier()
    results = generate(model, [[1, 2, 3, 4, 5, 1, 2, 3], [7]], 6, prompt_lookup=3)  # the other row has no candidates
    assert [row.tokens for row in results] == [result.tokens, [8, 9, 10, 0, 1, 2]]
    assert [row.offered for row in results] == [3, 0] and model.widths == [8, 4, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "count, length, message",
    [
        (4, 4, "prompt_lookup is 4, allowed is a whole number from 1 to 3"),
        (0, 4, "prompt_lookup is 0, allowed is"),
        (3, 0, "prompt_lookup is 3, but the model has no graph that verifies tokens"),
    ],
)
def test_candidates_that_a_model_cannot_verify(count, length, message):
    model = Verifier()
    model.config.neuron_config.speculation_length = length
    with pytest.raises(SmolLM3Error, match=message):
        generate(model, [[1]], 2, prompt_lookup=count)
    assert not model.widths


def test_candidates_are_verified_by_a_device_that_samples():
    model = Verifier()
    model.config.neuron_config.on_device_sampling_config = SimpleNamespace(
        do_sample=False, dynamic=False, global_topk=8
    )
    results = generate(model, [[1, 2, 3, 4, 5, 1, 2, 3], [5, 6, 5]], 4, prompt_lookup=3)
    assert [result.tokens for result in results] == [[4, 5, 6, 7], [6, 7, 8, 9]]
    assert [result.accepted for result in results] == [1, 0] and model.widths == [8, 4, 1, 1]


def test_a_row_whose_candidates_are_wrong_pauses():
    model = Verifier()
    (result,) = generate(model, [[2, 9, 3, 9, 4, 9, 1]], 5, prompt_lookup=3)
    assert result.tokens == [2, 3, 4, 5, 6] and (result.offered, result.accepted) == (4, 0)
    assert model.widths == [7, 4, 1, 4, 1]


@pytest.mark.parametrize("seq_len, widths", [(12, [8, 4, 1, 1]), (11, [8, 1, 1, 1, 1])])
def test_where_one_row_has_no_room_for_it_no_row_is_verified(seq_len, widths):
    """A step writes 4 tokens: from place 8 on there is room for them in 12 places, and not in 11."""
    model = Verifier(seq_len)
    results = generate(model, [[1, 2, 3, 4, 5, 1, 2, 3], [1, 2, 3, 1, 2]], 5, prompt_lookup=3)
    assert [result.tokens for result in results] == [[4, 5, 6, 7, 8][: seq_len - 7], [3, 4, 5, 6, 7]]
    assert model.widths[: len(widths)] == widths


class Blocks(Counter):
    """Stands in for a model with prefix caching: `slots` are its cache, block by block."""

    def __init__(self, **on_device):
        super().__init__()
        neuron_config = self.config.neuron_config
        neuron_config.is_prefix_caching, neuron_config.pa_block_size, neuron_config.pa_num_blocks = True, 4, 8
        if on_device:
            neuron_config.on_device_sampling_config = SimpleNamespace(**on_device)
        self.samples_on_device, self.sampling_rows = bool(on_device), []

    def reset(self):
        self.slots = {}

    def __call__(
        self, input_ids, position_ids, seq_ids, block_table, slot_mapping, full_context_lens, computed_context_lens,
        attention_mask=None, sampling_params=None,
    ):  # fmt: skip
        self.sampling_rows.append(None if sampling_params is None else len(sampling_params))
        logits = torch.zeros(len(input_ids), 1, VOCAB)
        for row, tokens in enumerate(input_ids.tolist()):
            length = int(full_context_lens[row])
            assert position_ids[row].tolist() == list(range(int(computed_context_lens[row]), length))
            self.slots.update(zip(slot_mapping[row].tolist(), tokens))
            places = [int(block_table[row, place // 4]) * 4 + place % 4 for place in range(length)]
            assert [self.slots[place] for place in places[-len(tokens) :]] == tokens
            logits[row, 0, sum(self.slots[place] for place in places) % VOCAB] = 5.0
        if self.samples_on_device:
            return SimpleNamespace(logits=None, tokens=logits.argmax(-1))
        return SimpleNamespace(logits=logits, tokens=None)


@pytest.mark.parametrize("on_device", [{}, dict(do_sample=False, dynamic=False, global_topk=8)])
def test_prompts_whose_cache_is_in_blocks_are_encoded_one_by_one(on_device):
    """The next token is the sum of all before it, which is wrong where a block is another prompt's."""
    prompts, model = [[1, 2, 3, 4, 5], [6, 7]], Blocks(**on_device)
    expected = [list(prompt) for prompt in prompts]
    for row in expected:
        while len(row) < 7:
            row.append(sum(row) % VOCAB)
    results = generate(model, prompts, 5)
    assert [[*prompt, *r.tokens][:7] for prompt, r in zip(prompts, results)] == expected
    assert [len(r.tokens) for r in results] == [5, 5]
    assert model.sampling_rows == ([1, 1, 2, 2, 2, 2] if on_device else [None] * 6)


def test_forced_tokens_are_fed_and_the_models_own_choices_come_back():
    results = generate(Counter(), [[1], [2], [3]], 3, forced=[[5, 6, 7, 8], [9], [4, 0, 2]])
    assert [result.tokens for result in results] == [[2, 6, 7], [3], [4, 5, 1]]
