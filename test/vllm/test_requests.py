"""Requests as clients send them, to a real `vllm serve` with SmolLM3-3B's own template: random conversations.

vLLM 0.11 with vllm-neuron 0.2.0, and vLLM 0.13 with vllm-neuron 0.4.1.
"""

import json
import shutil
import sys
import urllib.error
import urllib.request

import pytest
from places import MODEL, TINY
from serving import Served, artifact_command, serve, vllm_version
from transformers import AutoTokenizer

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat

sys.path.append(str(MODEL / "test/unit"))

from test_chat_property import OF_3B, Conversation

pytestmark = pytest.mark.vllm
VLLM = ("0.11", "0.13")
HOST = {"tp_degree": 1, "batch_size": 4, "seq_len": 1024, "torch_dtype": "float32"}
THOUGHTS = ("reasoning", "reasoning_content")
IS_0_11 = (vllm_version() or "").startswith("0.11.")


@pytest.fixture(scope="module")
def served(release, vllm_neuron, tmp_path_factory):
    scratch = tmp_path_factory.mktemp(f"requests-{release.version}")
    checkpoint = shutil.copytree(TINY, scratch / "tiny")
    shutil.copyfile(OF_3B, checkpoint / "chat_template.jinja")
    words = artifact_command(checkpoint, HOST, release, vllm_neuron, scratch)
    with serve(words, release, vllm_neuron, scratch) as url:
        yield Served(url, scratch / "serve/log")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = OF_3B.read_text(encoding="utf-8")
    return tokenizer


def post(url: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def as_sent(conversation: Conversation, seed: int) -> dict:
    """The body of a request; three in four have calls and tools in the one form that the API of OpenAI knows."""
    messages, variables = conversation.messages, dict(conversation.variables)
    tools = variables.pop("tools", None)
    if seed % 4:
        messages = [
            {**message, "tool_calls": [as_the_api_has_it(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]
        tools = tools and [{"type": "function", "function": without_type(tool.get("function", tool))} for tool in tools]
    return {"messages": messages, "chat_template_kwargs": variables, **({} if tools is None else {"tools": tools})}


def as_the_api_has_it(call: dict) -> dict:
    function = call.get("function", call)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": "1", "type": "function", "function": {"name": function["name"], "arguments": text}}


def without_type(tool: dict) -> dict:
    return {name: value for name, value in tool.items() if name != "type"}


def as_vllm_reads(message: dict) -> dict:
    """What the template is given of it: an empty text where there is no content (null, {}), a string in a list as a
    part, a part without text left out, and in vLLM 0.11 the thoughts left out."""
    message = {name: value for name, value in message.items() if name not in THOUGHTS or not IS_0_11}
    content = message["content"] or ""
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        content = [part for part in parts if part.get("text", "") is not None]
    return {**message, "content": content}


@pytest.mark.parametrize("cases", [500])
def test_nothing_that_was_given_is_lost(served, tokenizer, cases):
    """A request is refused with a reason, or its prompt holds every piece once and is what chat.render makes of it."""
    outcomes = {"refused by the template": 0, "refused by vLLM": 0, "rendered": 0, "answered": 0}
    for seed in range(cases):
        conversation = Conversation(seed)
        body = as_sent(conversation, seed)
        code, answer = post(served.url.replace("/v1", "/tokenize"), {"model": served.model, **body})
        messages = [as_vllm_reads(message) for message in body["messages"]]
        try:
            expected = chat.render(tokenizer, messages, **body["chat_template_kwargs"], tools=body.get("tools"))
        except SmolLM3Error:
            expected = None
        if code != 200:
            assert code == 400 and answer["error"]["message"], (seed, answer)
            outcomes["refused by the template" if expected is None else "refused by vLLM"] += 1
            continue
        assert expected is not None, (seed, "should have been refused")
        assert answer["tokens"] == tokenizer(expected, add_special_tokens=False)["input_ids"], seed
        prompt = tokenizer.decode(answer["tokens"])
        lost = [message[name] for message in body["messages"] for name in THOUGHTS if name in message and IS_0_11]
        assert {piece: prompt.count(piece) for piece in conversation.pieces} == {
            piece: int(piece not in lost) for piece in conversation.pieces
        }, seed
        outcomes["rendered"] += 1
        if seed % 25 == 0 and len(answer["tokens"]) < HOST["seq_len"]:
            more = {"model": served.model, "max_tokens": 1, "return_token_ids": True}
            code, answered = post(f"{served.url}/chat/completions", {**body, **more})
            assert code == 200 and answered["prompt_token_ids"] == answer["tokens"], (seed, answered)
            outcomes["answered"] += 1
    assert outcomes["rendered"] > cases / 3 and min(outcomes.values()) > cases / 100, outcomes
    print(outcomes)
