# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompts: the checkpoint's own chat template, with a guard in front. Imports no torch.

The guard (guard.jinja) is Jinja, so that the same one stands in front of the template for `scripts/generate.py --chat`
and in the file that vLLM is given. It renders nothing. What the template would lose or mangle it repairs (OpenAI's
`tools` and content parts, calls of an assistant, tools that are not in a list) or refuses with `raise_exception`; every
other conversation is rendered byte for byte as by the template alone. Reference: transformers' `apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from ..model.json_files import read_json
from .limit import SECONDS, within

VLLM_TEMPLATE = "vllm_chat_template.jinja"
TYPES = {
    "enable_thinking": (bool, "true or false"),
    "custom_instructions": (str, "a text"),
    "tools": (list, "a list"),
    "xml_tools": (list | str | Mapping, "a list, a text or an object"),
    "python_tools": (list | str | Mapping, "a list, a text or an object"),
    "today": (str, "a text"),
}
VARIABLES = tuple(TYPES)
GUARD = Path(__file__).with_name("guard.jinja").read_text(encoding="utf-8")


def guarded_template(template: str) -> str:
    """Returns `template` with the guard in front, or as it is where it does not read `xml_tools`, as SmolLM3's does."""
    return GUARD + template if "xml_tools" in template else template


def render(tokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Returns the prompt of a conversation, with the start of the assistant's turn.

    `variables` (their names are VARIABLES) are the template's own, `tools` as OpenAI's API has them, and `today`, e.g.
    "17 March 2026", for the date. Raises SmolLM3Error for a checkpoint without a template, and for what the template
    would lose or mangle, and one that does not end.
    """
    from jinja2 import TemplateError

    if not messages:
        raise SmolLM3Error("there are no messages: give at least one")
    if tokenizer.chat_template is None:
        raise SmolLM3Error("the checkpoint has no chat template; leave --chat out")
    _check_variables(variables)
    _check_arguments(messages)
    try:
        template = guarded_template(tokenizer.get_chat_template(tools=variables.get("tools")))
    except ValueError as error:  # several templates, none of them the default
        raise SmolLM3Error(f"the checkpoint's chat templates: {error}") from None
    try:
        return within(
            SECONDS,
            "the checkpoint's chat template",
            lambda: tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=True, **variables
            ),
        )
    except (TemplateError, SmolLM3Error) as error:
        raise SmolLM3Error(str(error)) from None
    except Exception as error:  # of any kind: a template is a program
        raise SmolLM3Error(f"the checkpoint's chat template fails ({type(error).__name__}: {error})") from None


def encode(tokenizer, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    """Returns the token ids of each text. Raises SmolLM3Error for one that is no Unicode, as other bytes may be."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SmolLM3Error(f"prompt {index} is {text!r}, which is not UTF-8: save or type it as UTF-8") from None
    return tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]


def _check_variables(variables: Mapping[str, Any]) -> None:
    """Raises SmolLM3Error for a variable that the template would take for something else, or end in a traceback."""
    for name, (kind, allowed) in TYPES.items():
        value = variables.get(name)
        if value is not None and not isinstance(value, kind):
            raise SmolLM3Error(f"{name} is {value!r}, allowed is {allowed}")
    for index, tool in enumerate(variables.get("tools") or []):
        if not isinstance(tool, Mapping):
            raise SmolLM3Error(f"tools[{index}] is {tool!r}, allowed is an object: a function with a name")


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises SmolLM3Error for a call whose arguments are a text that is no JSON object, which Jinja cannot read."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        for call in calls if isinstance(calls, list) else []:
            if not isinstance(call, Mapping):
                raise SmolLM3Error(f"message {index}: {call!r} among its tool_calls is no object")
            function = call.get("function") or call
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            try:
                is_object = not isinstance(arguments, str) or not arguments or isinstance(json.loads(arguments), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                raise SmolLM3Error(f"message {index}: the arguments {arguments!r} of a call are no JSON object")


def vllm_template(tokenizer) -> str | None:
    """Returns the text for vLLM's --chat-template, or None where the checkpoint has no template to guard.

    Of several templates it has `default`, and for requests with tools `tool_use`, as transformers chooses.
    """
    templates = tokenizer.chat_template
    if templates is None:
        return None
    chosen = guarded_template(tokenizer.get_chat_template())
    with_tools = guarded_template(tokenizer.get_chat_template(tools=[]))
    if with_tools != chosen:
        chosen = f"{{%- if tools is defined and tools is not none %}}{with_tools}{{%- else %}}{chosen}{{%- endif %}}"
    return None if GUARD not in chosen else chosen


def read_conversation(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds messages, or an object with "messages" and any of VARIABLES; returns the object.

    Raises SmolLM3Error where the file is neither.
    """
    value = read_json(path, "name a file with --messages that holds a conversation")
    conversation = {"messages": value} if isinstance(value, list) else value
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise SmolLM3Error(
            f"{path}: a list of messages is expected, or an object with messages and {', '.join(VARIABLES)}"
        )
    for name in conversation.keys() - {"messages", *VARIABLES}:
        raise SmolLM3Error(
            f"{path}: {name!r} is no variable of a chat, allowed are messages and {', '.join(VARIABLES)}"
        )
    return conversation
