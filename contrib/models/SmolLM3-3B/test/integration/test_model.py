"""Compiles, loads and compares tokens and logits with transformers.

By default: the small trained checkpoint beside this file, in float32, on the CPU runtime. With two environment
variables the same test runs on the real checkpoint and a device:

    SMOLLM3_MODEL=/path/to/SmolLM3-3B SMOLLM3_DEVICE=neuron pytest contrib/models/SmolLM3-3B/test/integration

In a checkout of NxD Inference without a device it runs on the library's own CPU mode, which compiles nothing.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import AutoTokenizer

from smollm3_neuron.check.reference import PUBLISHED_PROMPTS, load_reference, reference_generate, token_match
from smollm3_neuron.generate.generation import Sampling, generate
from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM, SmolLM3InferenceConfig

TINY = Path(__file__).resolve().parents[1] / "tiny"
MODEL = Path(os.environ.get("SMOLLM3_MODEL", TINY))
ON_DEVICE = os.environ.get("SMOLLM3_DEVICE", "cpu") == "neuron"
# the library's own CPU mode compiles nothing; the CPU runtime does, and has no such mode
IS_THE_LIBRARY = hasattr(NeuronBaseForCausalLM, "to_cpu")
assert IS_THE_LIBRARY or not ON_DEVICE, "SMOLLM3_DEVICE is neuron, but what is installed is the CPU runtime"
LIBRARY_CPU_MODE = IS_THE_LIBRARY and not ON_DEVICE
TP_DEGREE = 1 if LIBRARY_CPU_MODE else 2
DTYPE = torch.bfloat16 if ON_DEVICE else torch.float32
NEW_TOKENS = 32
# largest logit error, as a share of the largest logit
TOLERANCE = 0.03 if ON_DEVICE else 1e-5


class CPUModeModel(NeuronSmolLM3ForCausalLM):
    """The library's CPU mode, and only it, calls a method that its releases 0.7 and 0.8 do not have."""

    def _get_captured_tensors_offset(self):
        return 0


@pytest.fixture(scope="module")
def config():
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(
        tp_degree=TP_DEGREE,
        batch_size=2,
        seq_len=128,
        max_context_length=128,
        torch_dtype=DTYPE,
        save_sharded_checkpoint=True,
        on_cpu=LIBRARY_CPU_MODE,
    )
    return SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(str(MODEL)))


@pytest.fixture(scope="module")
def compiled(config, tmp_path_factory):
    """The folder that `compile` wrote: graphs, config and the ranks' weights."""
    if LIBRARY_CPU_MODE:
        pytest.skip("NxD Inference's CPU mode compiles nothing")
    folder = str(tmp_path_factory.mktemp("compiled") / "SmolLM3")
    NeuronSmolLM3ForCausalLM(str(MODEL), config).compile(folder)
    return folder


def load(folder: str) -> NeuronSmolLM3ForCausalLM:
    model = NeuronSmolLM3ForCausalLM(folder)
    model.load(folder)
    return model


@pytest.fixture(scope="module")
def model(config, request):
    if LIBRARY_CPU_MODE:
        model = CPUModeModel(str(MODEL), config)
        model.to_cpu()
        return model
    return load(request.getfixturevalue("compiled"))


@pytest.fixture(scope="module")
def reference():
    return load_reference(MODEL, DTYPE)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def eos(tokenizer):
    return [tokenizer.eos_token_id]


def math_prompts() -> list[str]:
    of_folder = json.loads((MODEL / "prompts.json").read_text()) if (MODEL / "prompts.json").is_file() else None
    return (
        [*of_folder["published"], *(e["prompt"] for e in of_folder["held_out"][:20])]
        if of_folder
        else PUBLISHED_PROMPTS[:2]
    )


def test_smoke(model, tokenizer):
    prompt = tokenizer(["The square root of 144 is"])["input_ids"]
    tokens = generate(model, prompt, 8)[0].tokens
    assert "12" in tokenizer.decode(tokens)


def test_math_prompts_match(model, reference, tokenizer, eos):
    texts = math_prompts()
    prompts = tokenizer(texts)["input_ids"]
    results = generate(model, prompts, NEW_TOKENS, suppress_tokens=eos)
    expected = [reference_generate(reference, prompt, NEW_TOKENS, eos) for prompt in prompts]
    different = [t for t, r, e in zip(texts, results, expected) if r.tokens != e.tokens]
    assert len(texts) >= 2 and different == []


def test_open_ended_prompts_are_reported(model, reference, tokenizer, eos, record_property):
    """Near ties part under bfloat16, so the match is reported; in float32 it is demanded."""
    prompts = tokenizer(list(PUBLISHED_PROMPTS[2:]))["input_ids"]
    for text, prompt, result in zip(
        PUBLISHED_PROMPTS[2:], prompts, generate(model, prompts, NEW_TOKENS, suppress_tokens=eos)
    ):
        match = token_match(result.tokens, reference_generate(reference, prompt, NEW_TOKENS, eos).tokens)
        print(f"{match:7.1%}  {text}")
        record_property(text, match)
        assert match == 1 or torch.float32 != DTYPE


def test_logits_under_teacher_forcing(model, reference, tokenizer, eos):
    prompt = tokenizer(["The square root of 144 is"])["input_ids"][0]
    tokens = reference_generate(reference, prompt, 24, eos).tokens
    logits = torch.stack(generate(model, [prompt], len(tokens), forced=[tokens], keep_logits=True)[0].logits)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    error = (logits - expected).abs().max() / expected.abs().max()
    assert logits.shape == expected.shape and error < TOLERANCE, f"largest logit error {error:.2e}"


def test_a_batch_gives_each_prompt_what_it_gets_alone(model, tokenizer, eos):
    prompts = tokenizer(["1+1=", "The square root of 144 is"])["input_ids"]
    assert len(prompts[0]) != len(prompts[1])
    together = [r.tokens for r in generate(model, prompts, 16, suppress_tokens=eos)]
    assert together == [generate(model, [prompt], 16, suppress_tokens=eos)[0].tokens for prompt in prompts]


def test_an_eos_in_the_history_is_attended_even_where_it_is_the_padding(model, reference, tokenizer, eos):
    """As every turn of a chat ends in one; the mask goes by lengths, not by the token."""
    prompts = [tokenizer(text)["input_ids"] for text in ("1+1=2<|im_end|>\n2+2=", "3+4=7<|im_end|><|im_end|>")]
    prompts.append([*prompts[0], *prompts[1]])
    assert all(eos[0] in prompt for prompt in prompts)
    results = generate(model, prompts, 16, suppress_tokens=eos, pad_token_id=eos[0])
    assert [r.tokens for r in results] == [reference_generate(reference, p, 16, eos).tokens for p in prompts]


def test_sampling_repeats_with_a_seed(model, tokenizer, eos):
    prompt = tokenizer(["1+1="])["input_ids"]
    runs = [
        generate(model, prompt, 16, suppress_tokens=eos, sampling=Sampling(3.0, seed=s))[0].tokens for s in (1, 1, 2, 3)
    ]
    assert runs[0] == runs[1] and len({tuple(run) for run in runs}) > 1


def test_what_is_loaded_again_gives_the_same_tokens(compiled, model, tokenizer, eos):
    prompt = tokenizer(["1+1="])["input_ids"]
    again = load(compiled)
    assert generate(again, prompt, 16, suppress_tokens=eos) == generate(model, prompt, 16, suppress_tokens=eos)
