"""Rendered prompts are byte for byte those of the checkpoint's template, and where it would lose something repaired
or refused."""

import datetime
import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat
from smollm3_neuron.machine.locate import tiny_folder

OF_3B = Path(__file__).resolve().parents[1] / "data/smollm3_chat_template.jinja"  # see SOURCES.txt beside it
TODAY = "17 March 2026"
USER = {"role": "user", "content": "What is 3+4?"}
SYSTEMS = (
    None, "Be brief.\n", "Be brief. /no_think", "/think Be exact.", "/no_think", "Only this. /system_override",
    "/system_override /no_think\nYou are a pirate.",
)  # fmt: skip
WEATHER = {
    "name": "get_weather",
    "description": "Wetter für 'Köln'",
    "parameters": {"type": "object", "properties": {}},
}
TURNS = (
    [USER],
    [USER, {"role": "assistant", "content": "\n7"}, {"role": "user", "content": "And then? /no_think <b>&amp;</b>"}],
    [USER, {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'},
     {"role": "tool", "content": "ok"}],
)  # fmt: skip
VARIABLES = (
    {}, {"enable_thinking": False}, {"enable_thinking": True, "xml_tools": [WEATHER, "now() -> str"]},
    {"custom_instructions": "See a/think/b.", "python_tools": ["def now() -> str: ..."], "enable_thinking": False},
    {"xml_tools": [WEATHER], "python_tools": ["def now() -> str: ..."], "custom_instructions": "Use tools."},
)  # fmt: skip
CONVERSATIONS = [
    ([{"role": "system", "content": system}] * (system is not None) + turns, variables)
    for system, turns, variables in itertools.product(SYSTEMS, TURNS, VARIABLES)
    # the template would drop the one, and with the flag the tools: refused below
    if not (system and "custom_instructions" in variables)
    and not (system and "/system_override" in system and ("xml_tools" in variables or "python_tools" in variables))
]


def templates():
    yield pytest.param((tiny_folder() / "chat_template.jinja").read_text(), id="tiny")
    yield pytest.param(OF_3B.read_text(), id="SmolLM3-3B")


@pytest.fixture(params=templates())
def tokenizer(request):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    tokenizer.chat_template = request.param
    return tokenizer


def transformers_prompt(tokenizer, messages, **variables):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)


def test_prompts_are_those_of_the_template(tokenizer):
    assert len(CONVERSATIONS) > 60
    dated = {"strftime_now": datetime.datetime(2026, 3, 17).strftime}
    for messages, variables in CONVERSATIONS:
        expected = transformers_prompt(tokenizer, messages, **variables, **dated)
        assert chat.render(tokenizer, messages, **variables, today=TODAY) == expected, (messages, variables)


def test_the_date_is_todays_unless_given(tokenizer):
    assert chat.render(tokenizer, [USER]) == transformers_prompt(tokenizer, [USER])


def test_both_modes_differ(tokenizer):
    thinking, plain = (chat.render(tokenizer, [USER], enable_thinking=mode) for mode in (True, False))
    assert thinking.endswith("<|im_start|>assistant\n") and plain.endswith("<think>\n\n</think>\n")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": "ä"}}\n</tool_call>'
REPAIRED = {
    "parts": ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
              {"role": "user", "content": "a\nb"}),
    "only calls": (
        {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": CALLED}
    ),
    "only calls, no content": ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": CALLED}),
    "text and calls": (
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {"name": "g", "arguments": {"b": 1}}]},
        {"role": "assistant", "content": f"Let me see.\n{CALLED}\n"
         '<tool_call>\n{"name": "g", "arguments": {"b": 1}}\n</tool_call>'},
    ),
}  # fmt: skip


EMPTY_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
REPAIRED |= {
    f"a call with {arguments!r} as arguments": (
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", **arguments}}]},
        {"role": "assistant", "content": EMPTY_CALL},
    )
    for arguments in ({}, {"arguments": ""}, {"arguments": None}, {"arguments": {}}, {"arguments": "{}"})
} | {
    name: ({"role": "assistant", "content": "Wet.", name: "\nRain?\n"},
           {"role": "assistant", "content": "<think>\nRain?\n</think>Wet."})
    for name in ("reasoning_content", "reasoning")
}  # fmt: skip


@pytest.mark.parametrize("case", REPAIRED)
def test_a_turn_that_would_be_lost_is_repaired(tokenizer, case):
    given, meant = REPAIRED[case]
    assert chat.render(tokenizer, [USER, given]) == transformers_prompt(tokenizer, [USER, meant])


@pytest.mark.parametrize(
    "given, meant",
    [
        ({"tools": [{"type": "function", "function": WEATHER}]}, {"xml_tools": [WEATHER]}),
        ({"tools": [{"type": "function", "function": WEATHER}], "xml_tools": ["f"]}, {"xml_tools": ["f", WEATHER]}),
        ({"xml_tools": "def f(): ..."}, {"xml_tools": ["def f(): ..."]}),
        ({"xml_tools": WEATHER}, {"xml_tools": [WEATHER]}),
        ({"python_tools": "def f(): ..."}, {"python_tools": ["def f(): ..."]}),
        ({"tools": []}, {}),
        ({"tools": [{"type": "function", **WEATHER}]}, {"xml_tools": [WEATHER]}),
        ({"tools": [WEATHER, {"name": "f"}]}, {"xml_tools": [WEATHER, {"name": "f"}]}),
    ],
)
def test_tools_reach_the_model(tokenizer, given, meant):
    assert chat.render(tokenizer, [USER], **given) == transformers_prompt(tokenizer, [USER], **meant)


@pytest.mark.parametrize(
    "messages, parts",
    [
        ([], ["no messages"]),
        ([{"role": "user", "content": None}], ["message 0 (user) has no text as content"]),
        ([{"role": "user"}], ["message 0 (user) has no text"]),
        ([{"role": "user", "content": {"text": "a"}}], ["message 0 (user) has no text"]),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], ["message 1 (assistant) has no text"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], ["no text", "reads text alone"]),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], ["no text", "reads text alone"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["no text", "reads text alone"]),
        ([{"role": "user", "content": ["a"]}], ["no text", "reads text alone"]),
        ([{"role": "user", "content": 5}], ["message 0 (user)", "no text as content"]),
        ([USER, {"role": "assistant", "content": 5, "tool_calls": [CALL]}], ["no text as content"]),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], ["no list of an assistant's"]),
        ([USER, {"role": "assistant", "content": "a", "tool_calls": {"name": "f"}}], ["no list of an assistant's"]),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], ["message 1", "'f' among its tool_calls is no object"]),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], ["tool_calls[0] needs a name"]),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{a"}]}], ["'{a'", "no JSON object"]),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], ["'[1]'", "no JSON"]),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}], ["are a JSON object"]),
        (
            [USER, {"role": "assistant", "content": "a", "reasoning": {}, "reasoning_content": 5}],
            ["thoughts that are no"],
        ),
        ([{"role": "developer", "content": "a"}, USER], ["message 0 (developer)", "allowed are system, user"]),
        ([USER, {"role": "system", "content": "a"}], ["message 1 (system)", "unless it is the first"]),
        ([{"role": "system", "content": "See /thinking."}, USER], ["/think inside /thinking.", "custom_instructions"]),
        (
            [{"role": "system", "content": [{"type": "text", "text": "at a/no_think/b"}]}, USER],
            ["/no_think inside a/no"],
        ),
    ],
)
def test_what_would_be_lost_is_refused(tokenizer, messages, parts):
    with pytest.raises(SmolLM3Error) as error:
        chat.render(tokenizer, messages)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "variables, parts",
    [
        ({"tools": [{"type": "web_search"}]}, ["tools[0] is no function with a name"]),
        ({"tools": [WEATHER, {"type": "function"}]}, ["tools[1] is no function"]),
        ({"tools": [{"type": "function", "function": {"name": None}}]}, ["tools[0] is no function"]),
        ({"tools": [{"type": "custom", "name": "f"}]}, ["tools[0] is no function"]),
        ({"tools": ["f"]}, ["tools[0] is 'f'", "an object"]),
        ({"tools": {}}, ["tools is {}", "a list"]),
        ({"tools": "f"}, ["tools is 'f'", "a list"]),
        ({"tools": 5}, ["tools is 5", "a list"]),
        ({"xml_tools": 5}, ["xml_tools is 5"]),
        ({"enable_thinking": "false"}, ["enable_thinking is 'false'", "true or false"]),
        ({"custom_instructions": ["a"]}, ["custom_instructions is ['a']", "a text"]),
        ({"today": 17}, ["today is 17", "a text"]),
    ],
)
def test_variables_that_would_be_lost_are_refused(tokenizer, variables, parts):
    with pytest.raises(SmolLM3Error) as error:
        chat.render(tokenizer, [USER], **variables)
    assert [part for part in parts if part not in str(error.value)] == [] and "\n" not in str(error.value)


@pytest.mark.parametrize("tools", ["tools", "xml_tools", "python_tools"])
def test_what_a_system_message_would_push_out_is_refused(tokenizer, tools):
    system = {"role": "system", "content": "Only this. /system_override"}
    with pytest.raises(SmolLM3Error, match=r"message 0 \(system\) has /system_override.*leaves the tools out"):
        chat.render(tokenizer, [system, USER], **{tools: [WEATHER]})
    with pytest.raises(SmolLM3Error, match="custom_instructions beside a system message"):
        chat.render(tokenizer, [{"role": "system", "content": "Be brief."}, USER], custom_instructions="Rhyme.")


@pytest.mark.parametrize("quote", ["`{}`", "'{}'", '"{}"', "**{}**", "<{}>", "[{}]", "{{{}}}"])
@pytest.mark.parametrize("flag", ["/think", "/no_think", "/system_override"])
def test_a_flag_that_is_spoken_of_is_refused(tokenizer, quote, flag):
    word = quote.format(flag)
    with pytest.raises(SmolLM3Error, match="write it another way") as error:
        chat.render(tokenizer, [{"role": "system", "content": f"Use the {word} switch."}, USER], enable_thinking=False)
    assert f"{flag} inside {word}" in str(error.value)


def test_of_several_templates_transformers_choice_is_taken(tokenizer):
    """And vLLM's one file chooses the same."""
    ours = tokenizer.chat_template
    tokenizer.chat_template = {"default": ours, "tool_use": "{{ 'With tools: ' }}" + ours, "rag": "{{ documents }}"}
    expected = transformers_prompt(tokenizer, [USER], xml_tools=[WEATHER])
    assert chat.render(tokenizer, [USER], xml_tools=[WEATHER]) == expected
    with_tools = chat.render(tokenizer, [USER], tools=[WEATHER])
    assert with_tools == "With tools: " + expected
    of_vllm = chat.vllm_template(tokenizer)
    assert transformers_prompt(tokenizer, [USER], chat_template=of_vllm, xml_tools=[WEATHER]) == expected
    assert transformers_prompt(tokenizer, [USER], chat_template=of_vllm, tools=[WEATHER]) == with_tools
    tokenizer.chat_template = {"rag": ours, "tool_use": ours}
    with pytest.raises(SmolLM3Error, match="multiple chat templates with no default"):
        chat.render(tokenizer, [USER])


def test_flags_beside_punctuation_are_flags(tokenizer):
    messages = [{"role": "system", "content": "Be brief (/no_think)."}, USER]
    assert chat.render(tokenizer, messages) == transformers_prompt(tokenizer, messages)


def test_another_template_stays_as_it_is(tokenizer):
    other = "\n{% for message in messages %}{{ message.content }}|{{ tools | length }}{% endfor %}"
    assert chat.guarded_template(other) == other
    tokenizer.chat_template = None
    with pytest.raises(SmolLM3Error, match="no chat template"):
        chat.render(tokenizer, [USER])


def test_the_guard_stands_in_front_and_renders_nothing(tokenizer):
    guarded = chat.guarded_template(tokenizer.chat_template)
    guard = guarded.removesuffix(tokenizer.chat_template)
    assert guard == (Path(chat.__file__).parent / "guard.jinja").read_text(encoding="utf-8") != guarded
    tools = [{"type": "function", "function": WEATHER}]
    messages = [{"role": "system", "content": "Be brief. /no_think"}, USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert transformers_prompt(tokenizer, messages, chat_template=guard, tools=tools, today=TODAY) == ""


@pytest.mark.parametrize(
    "content, part",
    [
        ("[", "not valid JSON"),
        ("{}", "a list of messages is expected"),
        ('["hi"]', "a list of messages is expected"),
        (json.dumps({"messages": [USER], "enable_thinkin": True}), "'enable_thinkin' is no variable of a chat"),
        (None, "No such file"),
    ],
)
def test_a_conversation_that_is_none_is_refused(tmp_path, content, part):
    path = tmp_path / "conversation.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SmolLM3Error, match=part):
        chat.read_conversation(path)
