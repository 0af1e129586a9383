"""`vllm serve` as the documents say, from an artifact of --for-vllm, gives the openai client transformers' answers."""

import asyncio
import json

import pytest
import torch
from places import TINY
from reference import reference_model
from serving import GREEDY, Served, artifact_command, serve
from transformers import AutoTokenizer

from smollm3_neuron.generate import chat

pytestmark = pytest.mark.vllm
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
EOS = TOKENIZER.eos_token_id
HOST = {"batch_size": 4, "seq_len": 256, "torch_dtype": "float32"}  # logprobs need the host's sampling
QUESTION = [{"role": "user", "content": "What is 3+4?"}]
WEATHER = {"name": "get_weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}


def expected(prompt: str, new_tokens: int, special: bool = True) -> list[int]:
    """transformers' greedy tokens, the EOS included."""
    inputs = torch.tensor([TOKENIZER(prompt, add_special_tokens=special)["input_ids"]])
    output = reference_model(str(TINY)).generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=new_tokens, eos_token_id=EOS
    )
    return output[0, inputs.shape[1] :].tolist()


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def command(release, vllm_neuron, tmp_path_factory):
    scratch = tmp_path_factory.mktemp(f"served-{release.version}")
    return artifact_command(TINY, HOST, release, vllm_neuron, scratch), scratch


@pytest.fixture(scope="module")
def served(command, release, vllm_neuron):
    words, scratch = command
    with serve(words, release, vllm_neuron, scratch) as url:
        yield Served(url, scratch / "serve/log")


def test_it_starts_from_the_artifact(served):
    log = served.log.read_text()
    assert "Successfully loaded pre-compiled model artifacts" in log and "Recompiling" not in log


def test_other_flags_than_the_artifacts_are_said_before_anything_is_loaded(command, release, vllm_neuron, tmp_path):
    words, _ = command
    words = [*words, "--max-num-seqs", "8"]
    with pytest.raises(RuntimeError) as error, serve(words, release, vllm_neuron, tmp_path):
        pass
    assert "was made with batch_size 4, the server asks for 8: change --max-num-seqs" in str(error.value)


def test_logprobs(served):
    prompt, count = "The square root of 144 is", 8
    choice = served.complete(prompt, max_tokens=count, logprobs=2).choices[0]
    tokens = expected(prompt, count)
    assert choice.text == text(tokens)
    ids = TOKENIZER(prompt)["input_ids"]
    with torch.inference_mode():
        logits = reference_model(str(TINY))(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(choice.logprobs.token_logprobs), logprobs[range(count), tokens], atol=1e-4, rtol=0
    )
    for top, row in zip(choice.logprobs.top_logprobs, logprobs):
        assert list(top) == [TOKENIZER.decode([token]) for token in row.topk(2).indices.tolist()]


def test_stop_strings(served):
    whole = text(expected("7 * 8 =", 24))
    choice = served.complete("7 * 8 =", max_tokens=24, stop=["9 ="]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole[: whole.index("9 =")], "stop", "9 =")


def test_the_context_left_ends_an_answer(served):
    prompt = " 1" * 100
    length = len(TOKENIZER(prompt)["input_ids"])
    answer = served.complete(prompt, max_tokens=256 - length, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
    import openai

    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.complete(prompt, max_tokens=256)


def test_64_requests_at_once(served):
    """More than slots, of different lengths, streamed and not; every eighth hangs up after its first token."""
    prompts = [
        f"{a}+{b}=" if (a + b) % 2 else f"What is {a}+{b}? So {b} plus {a} equals"
        for a in range(11, 19)
        for b in range(2, 10)
    ]
    lengths = [3 + 5 * index % 23 for index in range(64)]

    async def ask(client, index):
        kwargs = dict(model=served.model, prompt=prompts[index], max_tokens=lengths[index], **GREEDY)
        if index % 2:
            return (await client.completions.create(**kwargs)).choices[0].text
        stream, answer = await client.completions.create(**kwargs, stream=True), ""
        async for part in stream:
            answer += part.choices[0].text
            if index % 8 == 0:
                await stream.close()
                return None
        return answer

    async def all_at_once():
        async with served.asynchronous() as client:
            return await asyncio.gather(*(ask(client, index) for index in range(64)))

    answers = asyncio.run(all_at_once())
    assert answers.count(None) == 8
    wrong = [
        (prompt, answer, wanted)
        for prompt, answer, length in zip(prompts, answers, lengths)
        if answer is not None and answer != (wanted := text(expected(prompt, length)))
    ]
    assert wrong == []


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_chat_in_both_modes(served, thinking, streamed):
    how = {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}, "stream": streamed}
    answer = served.chat(QUESTION, **how)
    if streamed:
        deltas = [part.choices[0].delta for part in answer]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning, content = answer.choices[0].message.reasoning_content or "", answer.choices[0].message.content
    whole = text(expected(chat.render(TOKENIZER, QUESTION, enable_thinking=thinking), 60, special=False))
    assert bool(reasoning) is thinking
    assert whole == (f"<think>{reasoning}</think>{content}" if thinking else content)


@pytest.mark.parametrize(
    "messages, more, variables",
    [
        ([{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "3+4?"}]}],
         {}, {}),
        (QUESTION, {"tools": [{"type": "function", "function": WEATHER}]}, {"xml_tools": [WEATHER]}),
        ([*QUESTION, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]},
          {"role": "tool", "tool_call_id": "1", "content": "rain"}], {}, {}),
        (QUESTION,
         {"extra_body": {"chat_template_kwargs": {"custom_instructions": "At a/think/b.", "xml_tools": "f()"}}},
         {"custom_instructions": "At a/think/b.", "xml_tools": ["f()"]}),
    ],
    ids=["parts", "tools", "only-calls", "variables"],
)  # fmt: skip
def test_what_reaches_the_model(served, messages, more, variables):
    more = {**more, "extra_body": {**more.get("extra_body", {}), "return_token_ids": True}}
    answer = served.chat(messages, max_tokens=1, **more)
    prompt = chat.render(TOKENIZER, messages, **variables)
    assert answer.prompt_token_ids == TOKENIZER(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "messages, part",
    [
        ([{"role": "system", "content": "See /thinking."}, *QUESTION], "/think inside /thinking."),
        ([*QUESTION, {"role": "system", "content": "Be brief."}], "unless it is the first"),
    ],
)
def test_what_would_be_lost_is_refused(served, messages, part):
    import openai

    with pytest.raises(openai.BadRequestError, match=part):
        served.chat(messages)


def test_tp_2(release, vllm_neuron, tmp_path):
    """From an artifact whose shards two ranks read."""
    prompts = [f"{a}+5=" for a in range(20, 28)]
    command = artifact_command(TINY, {**HOST, "tp_degree": 2}, release, vllm_neuron, tmp_path)
    with serve(command, release, vllm_neuron, tmp_path) as url:
        answer = Served(url, None).complete(prompts, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [text(expected(prompt, 12)) for prompt in prompts]
    assert json.loads((tmp_path / "artifact/artifact.json").read_text())["settings"]["tp_degree"] == 2
