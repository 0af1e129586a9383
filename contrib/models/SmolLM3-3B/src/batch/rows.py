# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch: what files of JSONL and Parquet hold, each row a request or the reason why it is none.

A row has a `prompt` (a text, which is continued) or `messages` (a conversation), or the form of OpenAI's batch files:
`custom_id`, `url` and `body`. Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from ..model.json_files import parse_json

SUFFIXES = (".jsonl", ".parquet")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LENGTHS = ("max_completion_tokens", "max_tokens")  # the first is the newer name
SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
ASKED = {"model", "prompt", "messages", "tools", "chat_template_kwargs", *LENGTHS, *SAMPLING}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
PARQUET_ROWS = 256  # that are read at once


@dataclass(frozen=True)
class Row:
    """One request as it was written. `endpoint` is that of OpenAI's form, or None; `place` is file:line, for messages.

    Of `prompt` and `messages` one is None. `sampling` has those of SAMPLING that it names, `variables` what the chat
    template is given beside the messages.
    """

    id: str
    place: str
    prompt: str | None = None
    messages: list | None = None
    max_new_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    endpoint: str | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that is not answered, and why. `id` is None where it has none that can be read."""

    id: str | None
    place: str
    reason: str


def input_files(path: Path) -> list[Path]:
    """Returns the files of a batch: `path` itself, or those in the folder `path`. SmolLM3Error where there are none."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise SmolLM3Error(f"{path}: no file in it ends with {' or '.join(SUFFIXES)}; name a folder that has some")
        return files
    if not path.is_file():
        raise SmolLM3Error(f"{path}: no such file or folder; name one that holds {' or '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise SmolLM3Error(f"{path}: its name ends with {path.suffix!r}, allowed is {' or '.join(SUFFIXES)}")
    return [path]


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yields the rows of a file or folder in order, one in memory at a time. A second row with an id is a bad row.

    A row without an id has its place as one, such as "prompts.jsonl:3": it stays the same when the batch is run again.
    Raises SmolLM3Error for a file that cannot be read at all.
    """
    places: dict[str, str] = {}
    for file in input_files(path):
        records = _parquet(file) if file.suffix == ".parquet" else _lines(file)
        for number, (record, reason) in enumerate(records, 1):
            place = f"{file.name}:{number}"
            if record is None and reason is None:
                continue  # an empty line
            try:
                if reason:
                    raise SmolLM3Error(reason)
                row = parse_row(record, place)
                if first := places.get(row.id):
                    raise SmolLM3Error(f"its id is that of {first}: give each row one of its own")
            except SmolLM3Error as error:
                yield BadRow(_id(record), place, str(error))
                continue
            places[row.id] = place
            yield row


def _lines(file: Path) -> Iterator[tuple[Any, str | None]]:
    """Each line's value, or why it has none; (None, None) for an empty line."""
    with open(file, "rb") as lines:
        for line in lines:
            if not line.strip():
                yield None, None
                continue
            try:
                yield parse_json(line.decode()), None
            except UnicodeEncodeError:
                yield None, "it is not valid JSON: half a character is in it"
            except UnicodeDecodeError:
                yield None, "it is not UTF-8"
            except RecursionError:
                yield None, "it is not valid JSON: it is nested too deep"
            except ValueError as error:
                yield None, f"it is not valid JSON: {error}"


def _parquet(file: Path) -> Iterator[tuple[Any, str | None]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise SmolLM3Error(f"{file}: Parquet needs pyarrow: pip install pyarrow, or bring JSONL") from None
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    yield _without_null(record), None
    except (pyarrow.ArrowException, OSError) as error:
        raise SmolLM3Error(
            f"{file}: no Parquet that can be read ({str(error).splitlines()[0]}); write it again"
        ) from None


def _without_null(value: Any) -> Any:
    """A Parquet struct has every field of its column in each row; those that are null were not written."""
    if isinstance(value, dict):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _id(record: Any) -> str | None:
    value = record.get("custom_id", record.get("id")) if isinstance(record, dict) else None
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def parse_row(record: Any, place: str) -> Row:
    """Returns the request that a row is. Raises SmolLM3Error, whose text is the reason, where it is none."""
    if not isinstance(record, dict):
        raise SmolLM3Error(f"it is {_short(record)}, a JSON object is expected")
    endpoint, body = None, record
    if "custom_id" in record or "body" in record:
        endpoint, body = _openai(record)
    identity = record.get("custom_id", record.get("id"))
    if identity is not None and _id(record) in (None, ""):
        raise SmolLM3Error(f"its id is {_short(identity)}, allowed is a text or a whole number")
    if ("prompt" in body) == ("messages" in body):
        raise SmolLM3Error("it needs a prompt or messages, and not both")
    if "prompt" in body and not isinstance(body["prompt"], str):
        raise SmolLM3Error(f"prompt is {_short(body['prompt'])}, allowed is a text")
    messages = body.get("messages")
    if "messages" in body and not (isinstance(messages, list) and all(_is_message(message) for message in messages)):
        raise SmolLM3Error(f"messages is {_short(messages)}, allowed is a list of objects with a role")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise SmolLM3Error(f"chat_template_kwargs is {_short(variables)}, allowed is an object")
    if body.get("tools") is not None:
        variables = {**variables, "tools": body["tools"]}
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    if lengths and not (type(lengths[0]) is int and lengths[0] >= 1):
        raise SmolLM3Error(f"max_tokens is {_short(lengths[0])}, allowed is a whole number of at least 1")
    return Row(
        id=place if identity is None else str(identity),
        place=place,
        prompt=body.get("prompt"),
        messages=messages,
        max_new_tokens=lengths[0] if lengths else None,
        sampling={name: body[name] for name in SAMPLING if body.get(name) is not None},
        variables=variables,
        endpoint=endpoint,
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _openai(record: dict) -> tuple[str, dict]:
    """The endpoint and the body of a row in the form of OpenAI's batch files."""
    body, url = record.get("body"), record.get("url", CHAT)
    if "custom_id" not in record:
        raise SmolLM3Error("it has a body and no custom_id: OpenAI's form has both")
    if not isinstance(body, dict):
        raise SmolLM3Error(f"body is {_short(body)}, allowed is an object")
    if url not in (CHAT, COMPLETION) or record.get("method", "POST") != "POST":
        method = record.get("method", "POST")
        raise SmolLM3Error(f"it asks for {_short(method)} {_short(url)}, allowed is POST and {CHAT} or {COMPLETION}")
    for name in body.keys() - ASKED - WITHOUT_EFFECT:
        if body[name] and not (name == "n" and body[name] == 1):
            raise SmolLM3Error(f"{name} is {_short(body[name])}, which a batch does not do: leave it out")
    return url, body


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
