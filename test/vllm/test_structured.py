"""Structured outputs through a real `vllm serve`: a JSON schema, a regex, a choice, a call that is required.

vLLM 0.13 with vllm-neuron 0.4.1 holds the answers to them where the host samples. Where the device samples, and with
vllm-neuron 0.2.0 (vLLM 0.11) everywhere, they are ignored, as SERVING.md says: the tests hold that, too, so that a
release in which it changes is noticed.
"""

import asyncio
import json
import re

import pytest
from places import TINY
from serving import GREEDY, Served, artifact_command, serve, vllm_version
from transformers import AutoTokenizer

pytestmark = pytest.mark.vllm
VLLM = ("0.11", "0.13")
SETTINGS = {"tp_degree": 1, "batch_size": 4, "seq_len": 512, "torch_dtype": "float32"}
QUESTION = [{"role": "user", "content": "What is 3+4?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
COLOURS, CITIES = ("red", "green"), ("Rome", "Paris")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": list(COLOURS)}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def is_schema(message) -> bool:
    try:
        found = json.loads(message.content)
    except ValueError:
        return False
    return found in [{"colour": colour, "sure": sure} for colour in COLOURS for sure in (True, False)]


def is_call(message) -> bool:
    try:
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    except ValueError:
        return False
    return bool(calls) and all(call in [("get_weather", {"city": city}) for city in CITIES] for call in calls)


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
# `tiny` would go on with calls for ever
LIST_ENDS = {str(AutoTokenizer.from_pretrained(TINY).convert_tokens_to_ids("]")): 100}
REGEX, CHOICE = "[a-f]{4}-[0-9]{2}", ["north by east", "south"]
# what a request asks for beside its messages, and whether an answer is that
ASKED = {
    "a JSON schema": ({"response_format": JSON_SCHEMA}, is_schema),
    "a regex": (
        {"extra_body": {"structured_outputs": {"regex": REGEX}}},
        lambda message: bool(re.fullmatch(REGEX, message.content)),
    ),
    "a choice": (
        {"extra_body": {"structured_outputs": {"choice": CHOICE}}},
        lambda message: message.content in CHOICE,
    ),
    "a call, required": ({"tools": [TOOL], "tool_choice": "required", "logit_bias": LIST_ENDS}, is_call),
    "a call, named": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        is_call,
    ),
}


def arguments(case: str) -> dict:
    asked, _ = ASKED[case]
    return {**asked, "extra_body": {**asked.get("extra_body", {}), **NO_THINKING}}


@pytest.fixture(scope="module", params=["host", "device"])
def served(request, release, vllm_neuron, tmp_path_factory):
    """Whether answers are held to what is asked for, and the server."""
    scratch = tmp_path_factory.mktemp(f"structured-{request.param}-{release.version}")
    on_device = {"on_device_sampling_config": {"do_sample": False}} if request.param == "device" else {}
    words = artifact_command(TINY, {**SETTINGS, **on_device}, release, vllm_neuron, scratch)
    # `tiny` was never shown JSON: where it may write white space, it writes nothing else
    words += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    is_held = request.param == "host" and vllm_version().startswith("0.13.")
    with serve(words, release, vllm_neuron, scratch) as url:
        yield is_held, Served(url, scratch / "serve/log")


@pytest.mark.parametrize("case", ASKED)
def test_an_answer_is_held_to_what_is_asked_for(served, case):
    import openai

    is_held, server = served
    try:
        message = server.chat(QUESTION, max_tokens=120, **arguments(case)).choices[0].message
    except openai.BadRequestError as error:  # an answer that had to be a call, and is none
        assert case == "a call, required" and "Invalid JSON" in str(error)
        fits = False
    else:
        fits = ASKED[case][1](message)
    assert fits is is_held


def test_the_log_says_so_where_the_device_samples(served):
    is_held, server = served
    server.chat(QUESTION, **arguments("a choice"))
    is_said = "Structured outputs are not supported with on-device sampling" in server.log.read_text()
    assert is_said is (vllm_version().startswith("0.13.") and not is_held)


def test_other_requests_of_the_batch_are_free(served):
    is_held, server = served
    free = server.chat(QUESTION, extra_body=NO_THINKING).choices[0].message.content

    async def ask(client, case):
        more = arguments(case) if case else {"extra_body": NO_THINKING}
        how = {"model": server.model, "messages": QUESTION, "max_tokens": 60, **GREEDY, **more}
        return (await client.chat.completions.create(**how)).choices[0].message

    async def all_at_once(cases):
        async with server.asynchronous() as client:
            return await asyncio.gather(*(ask(client, case) for case in cases))

    cases = [None, "a choice", "a regex", None, "a JSON schema", None, "a choice", None]
    for case, message in zip(cases, asyncio.run(all_at_once(cases))):
        if case is None:
            assert message.content == free
        else:
            assert ASKED[case][1](message) is is_held


def test_an_answer_is_held_behind_its_thought(served):
    is_held, server = served
    asked = {"structured_outputs": {"choice": CHOICE}, "chat_template_kwargs": {"enable_thinking": True}}
    message = server.chat(QUESTION, max_tokens=200, extra_body=asked).choices[0].message
    assert message.reasoning_content and (message.content.strip() in CHOICE) is is_held
