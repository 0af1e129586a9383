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

VLLM_TEMPLATE = "vllm_chat_template.jinja"
VARIABLES = ("enable_thinking", "custom_instructions", "tools", "xml_tools", "python_tools", "today")
GUARD = Path(__file__).with_name("guard.jinja").read_text(encoding="utf-8")


def guarded_template(template: str) -> str:
    """Returns `template` with the guard in front, or as it is where it does not read `xml_tools`, as SmolLM3's does."""
    return GUARD + template if "xml_tools" in template else template


def render(tokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Returns the prompt of a conversation, with the start of the assistant's turn.

    `variables` (their names are VARIABLES) are the template's own, `tools` as OpenAI's API has them, and `today`, e.g.
    "17 March 2026", for the date. Raises SmolLM3Error for a checkpoint without a template, and for what the template
    would lose or mangle.
    """
    from jinja2 import TemplateError

    if not messages:
        raise SmolLM3Error("there are no messages: give at least one")
    if tokenizer.chat_template is None:
        raise SmolLM3Error("the checkpoint has no chat template; leave --chat out")
    template = guarded_template(tokenizer.get_chat_template())
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True, **variables
        )
    except TemplateError as error:
        raise SmolLM3Error(str(error)) from None


def write_vllm_template(checkpoint: Path, folder: Path) -> None:
    """Writes the file for vLLM's --chat-template into `folder`, where the checkpoint has a template to guard."""
    template = None
    if (checkpoint / "chat_template.jinja").is_file():
        template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    elif (checkpoint / "tokenizer_config.json").is_file():
        template = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, str) and guarded_template(template) != template:
        (folder / VLLM_TEMPLATE).write_text(guarded_template(template), encoding="utf-8")


def read_conversation(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds messages, or an object with "messages" and any of VARIABLES; returns the object.

    Raises SmolLM3Error where the file is neither.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SmolLM3Error(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SmolLM3Error(f"{path}: not valid JSON ({error})") from None
    conversation = {"messages": value} if isinstance(value, list) else value
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise SmolLM3Error(
            f"{path}: a list of messages is expected, or an object with messages and {', '.join(VARIABLES)}"
        )
    for name in conversation.keys() - {"messages", *VARIABLES}:
        raise SmolLM3Error(
            f"{path}: {name!r} is no variable of a chat, allowed are messages and {', '.join(VARIABLES)}"
        )
    return conversation
