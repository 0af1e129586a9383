"""The tool parser finds vLLM's classes where each release keeps them; test/vllm runs it in real vLLM 0.11 and 0.13.

The modules here stand in for vLLM's, laid out as in the release, and hold no more than the parser asks for.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

MODULE = "smollm3_neuron.vllm.tool_parser"
OPENAI = "vllm.entrypoints.openai"
PLACES = {
    "0.11": (f"{OPENAI}.protocol", f"{OPENAI}.tool_parsers.abstract_tool_parser"),
    "0.13": (f"{OPENAI}.protocol", "vllm.tool_parsers.abstract_tool_parser"),
    "0.16": (f"{OPENAI}.engine.protocol", "vllm.tool_parsers.abstract_tool_parser"),
}


class Record(SimpleNamespace):
    id = "1"


class ToolParser:
    def __init__(self, tokenizer, *args):
        self.prev_tool_call_arr, self.streamed_args_for_tool = [], []

    def adjust_request(self, request):
        return SimpleNamespace(**vars(request), schema="of the tool")


class ToolParserManager:
    @staticmethod
    def register_module(name):
        return lambda parser: parser


@pytest.fixture(params=PLACES)
def parser(request, monkeypatch):
    def add(name, **values):
        parent, _, last = name.rpartition(".")
        if parent and parent not in sys.modules:
            add(parent)
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        vars(sys.modules[name]).update(values)
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])

    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    protocol, parsers = PLACES[request.param]
    names = (
        "DeltaFunctionCall",
        "DeltaMessage",
        "DeltaToolCall",
        "ExtractedToolCallInformation",
        "FunctionCall",
        "ToolCall",
    )
    add(protocol, **{name: type(name, (Record,), {}) for name in names})
    add(parsers, ToolParser=ToolParser, ToolParserManager=ToolParserManager)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)  # it is imported on each release's modules
    return importlib.import_module(MODULE).SmolLM3ToolParser(None)


def test_calls_are_read_in_every_release(parser):
    answer = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "ä"}}\n</tool_call>'
    found = parser.extract_tool_calls(answer, None)
    assert found.tools_called and found.content == "Let me see.\n"
    assert [(call.function.name, call.function.arguments) for call in found.tool_calls] == [("f", '{"a": "ä"}')]
    delta = parser.extract_tool_calls_streaming("", answer, answer, [], [], [], None)
    assert delta.content == "Let me see.\n"
    assert [vars(call.function) for call in delta.tool_calls] == [{"name": "f"}, {"arguments": '{"a": "ä"}'}]


def test_what_vllm_asks_for_a_required_call_stays(parser):
    """vLLM 0.13 and 0.16 hold a required or named call to its schema there, and nowhere else."""
    request = SimpleNamespace(tools=[{}], tool_choice="required", skip_special_tokens=True)
    adjusted = parser.adjust_request(request)
    assert adjusted.schema == "of the tool" and adjusted.skip_special_tokens is False
    request.tool_choice = "none"
    assert parser.adjust_request(request).skip_special_tokens is True
