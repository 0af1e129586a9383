# SPDX-License-Identifier: Apache-2.0
"""A batch on one model in this process: the CPU runtime, or one group of NeuronCores."""

from collections.abc import Iterable, Iterator, Sequence

from ..artifact.folder import Artifact
from ..generate.generation import generate
from .requests import Answer, Request

WAITING = 16  # times the batch size: so many requests wait for others of their kind


def answer_locally(artifact: Artifact, requests: Iterable[Request]) -> Iterator[list[Answer]]:
    """Yields the answers of one batch of the model at a time.

    Requests that are sampled alike and may have as many tokens share a batch. Raises as `Artifact.load` and `generate`.
    """
    model, tokenizer = artifact.load(), artifact.tokenizer()
    eos_token_ids, size = artifact.eos_token_ids(), artifact.settings.batch_size
    waiting: dict[str, list[Request]] = {}

    def answer(group: Sequence[Request]) -> list[Answer]:
        sampling = group[0].sampling
        results = generate(
            model,
            [request.prompt for request in group],
            group[0].max_new_tokens,
            eos_token_ids=eos_token_ids,
            pad_token_id=tokenizer.pad_token_id or 0,
            sampling=sampling,
            tokenizer=tokenizer,
        )
        return [_answer(request, result.tokens) for request, result in zip(group, results)]

    def _answer(request: Request, tokens: list[int]) -> Answer:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        stops = request.sampling.further.get("stop_strings") or []
        ends = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
        if ends:
            text = text[: min(ends)]  # as OpenAI's API has it: without the stop string
        return Answer(request, text, len(tokens), is_stopped=bool(ends) or tokens[-1] in eos_token_ids)

    for request in requests:
        group = waiting.setdefault(f"{request.max_new_tokens} {request.sampling}", [])
        group.append(request)
        if len(group) == size:
            yield answer(group)
            group.clear()
        elif sum(map(len, waiting.values())) >= WAITING * size:
            group = max(waiting.values(), key=len)
            yield answer(group)
            group.clear()
    for group in waiting.values():
        if group:
            yield answer(group)
