"""Compiles, loads and judges tokens and logits beside transformers', as `check/validation.py` does.

By default: the small trained checkpoint beside this file, in float32, on the CPU runtime. With environment variables
the same test runs on the real checkpoint and a device, in bfloat16, or in the dtype that SMOLLM3_DTYPE names:

    SMOLLM3_MODEL=/path/to/SmolLM3-3B SMOLLM3_DEVICE=neuron pytest contrib/models/SmolLM3-3B/test/integration -s

In bfloat16 two right models part where two tokens are almost as likely: such a near tie is printed with its margin and
accepted, and anything else that differs is wrong. Where the dtype explains no difference the tokens are demanded: in
float32 of every prompt, in any dtype of the square root, whose best token is far ahead in a model that knows it.

In a checkout of NxD Inference without a device it runs on the library's own CPU mode, which compiles nothing.
"""

import os
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import AutoTokenizer

from smollm3_neuron.check.validation import (
    IDENTICAL,
    NEAR_TIE,
    Case,
    Reference,
    Report,
    make_cases,
    prompts_and_text,
    validate,
)
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
DTYPE = getattr(torch, os.environ.get("SMOLLM3_DTYPE", "bfloat16" if ON_DEVICE else "float32"))
NEW_TOKENS = 32
SEQ_LEN = 128
SQUARE_ROOT, ROOT_OF_144 = "The square root of 144 is", "12"


class CPUModeModel(NeuronSmolLM3ForCausalLM):
    """The library's CPU mode, and only it, calls a method that its releases 0.7 and 0.8 do not have."""

    def _get_captured_tensors_offset(self):
        return 0


@pytest.fixture(scope="module")
def config():
    neuron_config = SmolLM3InferenceConfig.get_neuron_config_cls()(
        tp_degree=TP_DEGREE,
        batch_size=2,
        seq_len=SEQ_LEN,
        max_context_length=SEQ_LEN,
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
    return Reference(MODEL, DTYPE)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def eos(tokenizer):
    return [tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def cases(tokenizer):
    prompts, text = prompts_and_text(MODEL)
    return make_cases(tokenizer, prompts[:30], text, SEQ_LEN, SEQ_LEN)[0]


def assert_right(model, reference: Reference, cases: list[Case], tokenizer, eos=(), new_tokens=NEW_TOKENS) -> Report:
    """Judges the model on the cases; prints a line for each prompt, a near tie's with its margins."""
    report = validate(model, reference, cases, new_tokens, suppress_tokens=eos)
    for judged in report.cases:
        print(f"{judged.match:7.1%}  {judged.verdict:<9}  {judged.case.text[:40]!r}  {judged.reason}")
    allowed = (IDENTICAL,) if reference.dtype == torch.float32 else (IDENTICAL, NEAR_TIE)
    wrong = {judged.case.text: judged.reason for judged in report.cases if judged.verdict not in allowed}
    assert wrong == {}, wrong
    assert report.verdict in allowed, report.drift
    for judged in report.cases:
        if judged.case.text == SQUARE_ROOT and ROOT_OF_144 in tokenizer.decode(judged.expected):
            assert judged.verdict == IDENTICAL, judged.reason
    return report


def test_smoke(model, reference, tokenizer):
    prompt = tokenizer([SQUARE_ROOT])["input_ids"]
    ((expected, _),) = reference.answers(prompt, [[0] * 8])
    tokens = generate(model, prompt, 8)[0].tokens
    assert ROOT_OF_144 in tokenizer.decode(tokens) or ROOT_OF_144 not in tokenizer.decode(expected)


def test_prompts_chats_and_a_text_are_judged(model, reference, cases, tokenizer, eos):
    assert {case.kind for case in cases} >= {"prompt", "text"} and SQUARE_ROOT in [case.text for case in cases]
    assert_right(model, reference, cases, tokenizer, eos)


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
    report = validate(
        model, reference, [Case("prompt", "", ids) for ids in prompts], 16, suppress_tokens=eos, pad_token_id=eos[0]
    )
    allowed = (IDENTICAL,) if reference.dtype == torch.float32 else (IDENTICAL, NEAR_TIE)
    assert [judged.reason for judged in report.cases if judged.verdict not in allowed] == []


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
