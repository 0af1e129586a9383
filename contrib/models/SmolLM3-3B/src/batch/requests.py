# SPDX-License-Identifier: Apache-2.0
"""Rows as the model takes them, and answers as they are written: the same for every engine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..artifact.folder import Artifact
from ..errors import SmolLM3Error
from ..generate import chat
from ..generate.generation import check_prompts
from ..generate.sampling import Sampling, asked_fields
from .rows import CHAT, Row

NEW_TOKENS = 128  # where neither the row nor the command says how many


@dataclass(frozen=True)
class Request:
    """A row with its token ids and its sampling."""

    row: Row
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Answer:
    """What an engine answered to a request: `tokens` is how many it made, the EOS included."""

    request: Request
    text: str
    tokens: int
    is_stopped: bool  # by an EOS or a stop string; else it has all the tokens that it may have


class Preparation:
    """Makes requests of rows. `max_new_tokens` is for the rows that say nothing of it."""

    def __init__(self, artifact: Artifact, max_new_tokens: int = NEW_TOKENS):
        self.tokenizer, self.max_new_tokens = artifact.tokenizer(), max_new_tokens
        self.settings, self.vocab_size = artifact.settings, artifact.vocab_size
        self.generation_config = artifact.generation_config()

    def __call__(self, row: Row) -> Request:
        """Raises SmolLM3Error, whose text is the reason, for a row that cannot be answered with this artifact."""
        text = row.prompt
        if row.messages is not None:
            text = chat.render(self.tokenizer, row.messages, **row.variables)
        (prompt,) = chat.encode(self.tokenizer, [text], add_special_tokens=row.messages is None)
        length = row.max_new_tokens or self.max_new_tokens
        try:
            check_prompts([prompt], length, self.settings.max_context_length)
        except SmolLM3Error as error:
            raise SmolLM3Error(str(error).replace("prompt 0", "the prompt")) from None
        on_device = self.settings.on_device_sampling_config
        sampling = sampling_of(row, self.generation_config, on_device)
        if on_device is not None:
            sampling.on_device_params(on_device)
        return Request(row, prompt, length, sampling)


def sampling_of(row: Row, generation_config: Mapping[str, Any], on_device_sampling_config=None) -> Sampling:
    """Returns what a row asks for, see `asked_fields`. Raises SmolLM3Error for values that are out of their range."""
    asked = dict(row.sampling)
    seed, stop = asked.pop("seed", 0), asked.pop("stop", None)
    if type(seed) is not int:
        raise SmolLM3Error(f"seed is {seed!r}, allowed is a whole number")
    if stop is not None:
        asked["stop_strings"] = stop
    return Sampling.of(
        asked_fields(generation_config, asked, row.messages is not None, on_device_sampling_config), seed
    )


def written(answer: Answer, model: str) -> dict[str, Any]:
    """Returns an answer's line: in OpenAI's form where the row had that, else with `id` and `text`."""
    row, reason = answer.request.row, "stop" if answer.is_stopped else "length"
    usage = dict(prompt_tokens=len(answer.request.prompt), completion_tokens=answer.tokens)
    if row.endpoint is None:
        return dict(id=row.id, text=answer.text, finish_reason=reason, **usage)
    is_chat = row.endpoint == CHAT
    said = {"message": {"role": "assistant", "content": answer.text}} if is_chat else {"text": answer.text}
    body = dict(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{row.id}",
        object="chat.completion" if is_chat else "text_completion",
        created=int(time.time()),
        model=model,
        choices=[dict(index=0, finish_reason=reason, **said)],
        usage=dict(**usage, total_tokens=sum(usage.values())),
    )
    response = dict(status_code=200, request_id=row.id, body=body)
    return dict(id=f"batch_req_{row.id}", custom_id=row.id, response=response, error=None)
