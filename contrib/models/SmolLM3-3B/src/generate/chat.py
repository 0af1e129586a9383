"""Conversations to prompts: the checkpoint's own chat template, with a guard in front. Imports no torch.

The guard is Jinja, so that the same one stands in front of the template for `scripts/generate.py --chat` and in the
file that vLLM is given. It renders nothing. What the template would lose or mangle it repairs (OpenAI's `tools` and
content parts, calls of an assistant, tools that are not in a list) or refuses with `raise_exception`; every other
conversation is rendered byte for byte as by the template alone. Reference: transformers' `apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error

VLLM_TEMPLATE = "vllm_chat_template.jinja"
VARIABLES = ("enable_thinking", "custom_instructions", "tools", "xml_tools", "python_tools", "today")
# SmolLM3's template reads `xml_tools` and `python_tools`, and `role` and `content` of each message; its flags are cut
# out of the system message wherever their letters stand. It calls strftime_now for the date.
GUARD = r"""
{%- if today is defined %}{% macro strftime_now(format) %}{{ today }}{% endmacro %}{% endif %}
{%- if xml_tools is string or xml_tools is mapping %}{% set xml_tools = [xml_tools] %}{% endif %}
{%- if python_tools is string or python_tools is mapping %}{% set python_tools = [python_tools] %}{% endif %}
{%- if tools %}{% set xml_tools = (xml_tools or []) + (tools | map(attribute="function") | list) %}{% endif %}
{%- set guarded = namespace(messages=[]) %}
{%- for message in messages %}
{%- set at = "message " ~ loop.index0 ~ " (" ~ message.role ~ ")" %}
{%- if message.role not in ("system", "user", "assistant", "tool") %}
{{- raise_exception(at ~ ": the chat template leaves this role out, allowed are system, user, assistant, tool") }}
{%- elif message.role == "system" and not loop.first %}
{{- raise_exception(at ~ ": the chat template leaves a system message out unless it is the first; put it there") }}
{%- endif %}
{%- set content = message.content %}
{%- if content is defined and content is sequence and content is not string and content is not mapping %}
{%- if content | rejectattr("type", "equalto", "text") | list %}
{{- raise_exception(at ~ " has content parts that are no text: this model reads text alone") }}
{%- endif %}
{%- set content = content | map(attribute="text") | join("\n") %}
{%- endif %}
{%- set calls = namespace(text=content if content is string else "") %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{%- set arguments = call.arguments if call.arguments is string else (call.arguments | tojson) %}
{%- set calls.text = calls.text ~ ("\n" if calls.text else "") ~ "<tool_call>\n{\"name\": " ~ (call.name | tojson)
    ~ ", \"arguments\": " ~ arguments ~ "}\n</tool_call>" %}
{%- endfor %}
{%- if content is not string and not message.tool_calls %}
{{- raise_exception(at ~ " has no text as content: give it one, or leave the message out") }}
{%- endif %}
{%- if message.role == "system" %}
{%- for word in calls.text.split() %}
{%- for flag in ("/think", "/no_think", "/system_override") %}
{%- if flag in word and word.strip("\"'`.,;:!?()[]{}<>*") != flag %}
{{- raise_exception(at ~ " has " ~ flag ~ " inside " ~ word ~ ": the chat template would take it for the switch and cut it "
    ~ "out; write it another way, or pass the text as custom_instructions") }}
{%- endif %}
{%- endfor %}
{%- endfor %}
{%- endif %}
{%- set guarded.messages = guarded.messages + [dict(message, content=calls.text)] %}
{%- endfor %}
{%- set messages = guarded.messages %}
"""


def guarded_template(template: str) -> str:
    """`template` with the guard on a line in front; as it is where it is not of SmolLM3's kind, which reads `xml_tools`."""
    if "xml_tools" not in template:
        return template
    # the newline after the guard's last tag is not rendered: transformers and vLLM compile with trim_blocks
    return GUARD.replace("\n", "") + "\n" + template


def render(tokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt of a conversation, with the start of the assistant's turn.

    `variables`, see VARIABLES: the template's own, `tools` as OpenAI's API has them, and `today`, e.g. "17 March 2026", for
    the date. Raises SmolLM3Error for a checkpoint without a template, and for what the template would lose or mangle.
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
    """The file for vLLM's --chat-template, derived from the checkpoint's template; none where there is none to guard."""
    template = None
    if (checkpoint / "chat_template.jinja").is_file():
        template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    elif (checkpoint / "tokenizer_config.json").is_file():
        template = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, str) and guarded_template(template) != template:
        (folder / VLLM_TEMPLATE).write_text(guarded_template(template), encoding="utf-8")


def read_conversation(path: Path) -> dict[str, Any]:
    """{"messages": [...], and of VARIABLES what is given} from a JSON file that holds that, or the messages alone."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SmolLM3Error(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SmolLM3Error(f"{path}: not valid JSON ({error})") from None
    value = {"messages": value} if isinstance(value, list) else value
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        raise SmolLM3Error(
            f"{path}: a list of messages is expected, or an object with messages and {', '.join(VARIABLES)}"
        )
    for name in value.keys() - {"messages", *VARIABLES}:
        raise SmolLM3Error(
            f"{path}: {name!r} is no variable of a chat, allowed are messages and {', '.join(VARIABLES)}"
        )
    return value
