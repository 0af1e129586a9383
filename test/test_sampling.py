"""Sampling on the CPU runtime equals `transformers.generate` token by token, for random generation configs; what a
generation_config.json has and cannot be done is refused by name."""

import random

import pytest
import torch
from transformers import GenerationConfig

from smollm3_neuron.artifact import build
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.reference import load_reference
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.generate.sampling import FURTHER, Sampling
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

NEW_TOKENS, CONFIGS, VOCABULARY = 10, 200, 508


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The artifact's model and transformers', of tiny in float32."""
    ensure_neuronx()
    settings = Settings(tp_degree=1, seq_len=64, torch_dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")
        output = tmp_path_factory.mktemp("sampling") / "tiny"
        artifact = build.compile_artifact(tiny_folder(), output, settings, "cpu")
    return artifact.load(), load_reference(tiny_folder()), artifact.tokenizer()


def of_transformers(reference, tokenizer, prompt, fields, eos, seed):
    torch.manual_seed(seed)
    config = GenerationConfig(**{**fields, "eos_token_id": eos, "pad_token_id": 1, "max_new_tokens": NEW_TOKENS})
    input_ids = torch.tensor([prompt])
    sequences = reference.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, tokenizer=tokenizer
    )
    return sequences[0, len(prompt) :].tolist()


def random_fields(draw: random.Random, tokenizer) -> dict:
    def token():
        return draw.randrange(4, VOCABULARY)

    def tokens(count):
        return [token() for _ in range(draw.randint(1, count))]

    choices = {
        "temperature": lambda: draw.choice([None, 1.0, 0.3 + 4 * draw.random()]),
        "top_k": lambda: draw.choice([None, 0, 1, 2, 7, 40, 600]),
        "top_p": lambda: draw.choice([None, 1.0, 0.05, draw.uniform(0.1, 1)]),
        "min_p": lambda: draw.choice([0.0, draw.random() / 4]),
        "typical_p": lambda: draw.uniform(0.1, 1),
        "epsilon_cutoff": lambda: draw.choice([0.0, 3e-4, 0.02]),
        "eta_cutoff": lambda: draw.choice([0.0, 3e-4, 0.02]),
        "repetition_penalty": lambda: draw.uniform(0.7, 2),
        "encoder_repetition_penalty": lambda: draw.uniform(0.7, 2),
        "no_repeat_ngram_size": lambda: draw.randint(0, 3),
        "encoder_no_repeat_ngram_size": lambda: draw.randint(0, 3),
        "bad_words_ids": lambda: [tokens(2) for _ in range(draw.randint(1, 20))],
        "sequence_bias": lambda: [[[token()], draw.uniform(-9, 9)] for _ in range(draw.randint(1, 9))],
        "suppress_tokens": lambda: tokens(200),
        "begin_suppress_tokens": lambda: tokens(200),
        "forced_bos_token_id": token,
        "forced_eos_token_id": token,
        "min_length": lambda: draw.randint(0, 20),
        "min_new_tokens": lambda: draw.randint(0, NEW_TOKENS),
        "exponential_decay_length_penalty": lambda: [draw.randint(0, 5), draw.uniform(1, 2)],
        "stop_strings": lambda: draw.choice(["1", [" ", "7"], ["=", "no such text"]]),
        "renormalize_logits": lambda: draw.random() < 0.5,
        "remove_invalid_values": lambda: draw.random() < 0.5,
    }
    sampling = draw.random() < 0.75
    samples = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    fields = {
        name: choose()
        for name, choose in choices.items()
        if draw.random() < (0.4 if name in samples[:3] else 0.15) and (sampling or name not in samples)
    }
    return {"do_sample": sampling, **fields}


def test_tokens_equal_transformers(both):
    model, reference, tokenizer = both
    draw, seen, named = random.Random(17), set(), set()
    compared = refused = 0
    while compared < CONFIGS:
        fields = random_fields(draw, tokenizer)
        prompt = [draw.randrange(4, VOCABULARY) for _ in range(draw.choice([1, 2, 5, 20]))]
        eos, seed = draw.choice([[3], [3, 20, 300], [draw.randrange(4, VOCABULARY)] * 1]), draw.randrange(1000)
        options = dict(eos_token_ids=eos, sampling=Sampling.of(fields, seed), tokenizer=tokenizer)
        try:
            expected = of_transformers(reference, tokenizer, prompt, fields, eos, seed)
        except RuntimeError as error:  # the processors leave nothing to draw from
            assert "probability tensor contains" in str(error)
            with pytest.raises(SmolLM3Error, match="generation config: it (bars every|makes scores)"):
                generate(model, [prompt], NEW_TOKENS, **options)
            refused += 1
            continue
        found = generate(model, [prompt], NEW_TOKENS, **options)
        assert found[0].tokens == expected, (fields, prompt, eos, seed)
        compared += 1
        seen.add(tuple(expected))
        named |= fields.keys()
    assert named == {*FURTHER, "do_sample", "temperature", "top_k", "top_p"}
    assert len(seen) > CONFIGS / 2 and refused < CONFIGS / 20


def test_the_defaults_are_transformers(both):
    """top_k 50 where none is named, and null and 0 switch it off."""
    assert Sampling.of({"do_sample": True, "temperature": None}) == Sampling(1.0, 50, 1.0)
    assert Sampling.of({"do_sample": True, "top_k": 0, "top_p": None}) == Sampling(1.0)
    assert Sampling.of({"do_sample": True, "top_k": None, "temperature": 0.6}) == Sampling(0.6, None, 1.0)
    assert Sampling.of({}) == Sampling.of({"do_sample": None, "temperature": 0.6, "min_p": 0.1}) == Sampling()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_beams": 4}, "num_beams is 4, which is not done here: set it to 1"),
        ({"num_beams": "x"}, "num_beams is 'x'"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2"),
        ({"diversity_penalty": 0.5}, "diversity_penalty is 0.5"),
        ({"penalty_alpha": 0.6}, "penalty_alpha is 0.6"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config is {'bias': 2.0}.* set it to None"),
        ({"max_time": 3.0}, "max_time is 3.0"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3"),
        ({"do_sample": "yes"}, "do_sample is 'yes', allowed is true or false"),
        ({"do_sample": True, "temperature": 0}, "temperature is 0, but do_sample is true"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ({"do_sample": True, "top_k": 1.5}, "top_k is 1.5"),
        ({"do_sample": True, "top_p": 2}, "top_p is 2"),
        ({"do_sample": True, "min_p": 2.0}, "generation config: .*min_p"),
        ({"repetition_penalty": -1.0}, "generation config: .*penalty"),
        ({"repetition_penalty": "x"}, "generation config: .*penalty"),
        ({"bad_words_ids": [3]}, "generation config: .*bad_words_ids"),
        ({"suppress_tokens": "x"}, "suppress_tokens"),
        ({"stop_strings": [3]}, "stop_strings is"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(both, fields, message):
    model, _, tokenizer = both
    with pytest.raises(SmolLM3Error, match=message) as error:
        generate(model, [[5]], 2, sampling=Sampling.of(fields), tokenizer=tokenizer)
    assert "\n" not in str(error.value)


def test_ids_that_the_vocabulary_has_not_and_nothing_left(both):
    model, _, tokenizer = both
    for fields, message in (
        ({"bad_words_ids": [[9999]]}, "generation config: .*9999"),
        ({"suppress_tokens": list(range(512))}, "it bars every token"),
    ):
        with pytest.raises(SmolLM3Error, match=message):
            generate(model, [[5]], 2, sampling=Sampling.of(fields), tokenizer=tokenizer)
    with pytest.raises(SmolLM3Error, match="stop_strings is 'x', for which generate needs the tokenizer"):
        generate(model, [[5]], 2, sampling=Sampling.of({"stop_strings": "x"}))
