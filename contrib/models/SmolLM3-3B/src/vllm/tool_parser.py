# SPDX-License-Identifier: Apache-2.0
"""vLLM's `--tool-parser-plugin`: SmolLM3's tool calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

vLLM's own parser for that form, `hermes`, reads a stream token by token: it loses a call of which one step brings more
than a token (as a busy server's may), the `{}` of a call without arguments, and text that is no call after all. This
one hands a call on when it is whole, and all that is no call as text; of a call that breaks off, a stream shows
nothing. It is written for vLLM 0.11, 0.13 and 0.16, and imported by the server alone.
"""

import json
from typing import Any

try:
    from vllm.entrypoints.openai.engine import protocol
except ImportError:  # before vLLM 0.16
    from vllm.entrypoints.openai import protocol
try:
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
except ImportError:  # before vLLM 0.13
    from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

START, END = "<tool_call>", "</tool_call>"


def read_call(text: str) -> dict[str, Any] | None:
    """Returns "name" and "arguments" of what stands between the tags, or None where it is no call."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return {"name": name, "arguments": arguments} if isinstance(name, str) and isinstance(arguments, dict) else None


def read(text: str) -> tuple[str, list[dict[str, Any]], int]:
    """Returns the text outside of calls, the calls, and how many characters the two cover.

    Of a call that has begun and not ended nothing is covered.
    """
    outside, calls, position = "", [], 0
    while (start := text.find(START, position)) >= 0:
        outside += text[position:start]
        end = text.find(END, start)
        if end < 0:
            return outside, calls, start
        call = read_call(text[start + len(START) : end])
        position = end + len(END)
        if call is None:
            outside += text[start:position]
        else:
            calls.append(call)
    # a tag that is no token of its own may come in parts
    begun = next((n for n in range(len(START) - 1, 0, -1) if text.endswith(START[:n], position)), 0)
    return outside + text[position : len(text) - begun], calls, len(text) - begun


@ToolParserManager.register_module("smollm3")
class SmolLM3ToolParser(ToolParser):
    """What the server calls with an answer that is whole, or with what a stream's step added to one."""

    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.position = 0  # in the answer; what is before it was handed on

    def adjust_request(self, request):
        request = super().adjust_request(request)  # which from vLLM 0.13 on asks for a required call's schema
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False  # the tags must come through, whatever kind of token they are
        return request

    def extract_tool_calls(self, model_output: str, request) -> protocol.ExtractedToolCallInformation:
        outside, calls, covered = read(model_output)
        content = outside + model_output[covered:]
        return protocol.ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                protocol.ToolCall(
                    type="function", function=protocol.FunctionCall(name=call["name"], arguments=_dump(call))
                )
                for call in calls
            ],
            content=content if content.strip() or not calls else None,
        )

    def extract_tool_calls_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
    ) -> protocol.DeltaMessage | None:
        outside, calls, covered = read(current_text[self.position :])
        self.position += covered
        deltas = []
        for call in calls:
            index = len(self.prev_tool_call_arr)
            # what the server compares with at the end of the stream
            self.prev_tool_call_arr.append(call)
            self.streamed_args_for_tool.append(_dump(call))
            # the name first: at the end of a stream the server rewrites a first delta that has arguments
            whole = protocol.ToolCall(
                type="function", function=protocol.FunctionCall(name=call["name"], arguments=_dump(call))
            )
            deltas += [
                protocol.DeltaToolCall(
                    index=index, type="function", id=whole.id, function=protocol.DeltaFunctionCall(name=call["name"])
                ),
                protocol.DeltaToolCall(
                    index=index, function=protocol.DeltaFunctionCall(arguments=whole.function.arguments)
                ),
            ]
        if deltas:
            return protocol.DeltaMessage(content=outside or None, tool_calls=deltas)
        return protocol.DeltaMessage(content=outside) if outside else None


def _dump(call: dict[str, Any]) -> str:
    return json.dumps(call["arguments"], ensure_ascii=False)
