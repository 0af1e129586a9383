# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode by calling the model itself, as NxDI's own adapter fails in the public 0.7 and 0.8 sources.

Which token comes next is sampling.py's, which ones are guessed and verified in one step speculation.py's. Every prompt
has a random generator of its own, so that in a batch it gets the tokens that it gets alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import StopStringCriteria

from ..errors import NotANumber, SmolLM3Error
from ..model.config import token_ids
from .blocks import BlockTables
from .sampling import GREEDY, Sampling
from .speculation import (
    PromptLookup,
    accepted_tokens,
    check_prompt_lookup,
    check_returns_logits,
    has_draft,
    last_place,
)
from .turns import turn


@dataclass
class Generated:
    """One prompt's new tokens, the EOS that ended it included.

    `margins` has, for each token, by how much the best logit exceeds the second (nothing where the device samples), and
    `logits`, where they are kept, the float32 logits [vocab_size] themselves, those of suppressed tokens included.
    `accepted` of `offered` are the candidates that were verified, see speculation.py.
    """

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    finished: bool = False
    offered: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)


def prefill_inputs(prompts: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Returns the model's inputs that encode `prompts` (token ids), padded on the right to the longest one.

    They are input_ids, attention_mask and position_ids [batch_size, longest] and seq_ids [batch_size], all int64.
    """
    batch_size, longest = len(prompts), max(map(len, prompts))
    input_ids = torch.full((batch_size, longest), pad_token_id)
    attention_mask = torch.zeros(batch_size, longest, dtype=torch.long)
    # 1 on padding, as the library's own adapter has it
    position_ids = torch.ones(batch_size, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = torch.tensor(prompt)
        attention_mask[row, : len(prompt)] = 1
        position_ids[row, : len(prompt)] = torch.arange(len(prompt))
    return dict(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, seq_ids=torch.arange(batch_size)
    )


def decode_inputs(tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for as many more tokens of each row, to be written to the cache from `positions` on.

    They are input_ids and position_ids [batch_size, tokens of a row], seq_ids [batch_size], and attention_mask
    [batch_size, largest of positions], which covers the tokens before.
    """
    first = torch.tensor(positions)[:, None]
    input_ids = torch.tensor(tokens)
    return dict(
        input_ids=input_ids,
        attention_mask=(torch.arange(int(first.max())) < first).long(),
        position_ids=first + torch.arange(input_ids.shape[1]),
        seq_ids=torch.arange(len(tokens)),
    )


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_context_length: int) -> None:
    """Raises SmolLM3Error for prompts (token ids) that `generate` would refuse; it needs no loaded model."""
    if max_new_tokens < 1:
        raise SmolLM3Error(f"max_new_tokens is {max_new_tokens}, allowed is a whole number of at least 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise SmolLM3Error(f"prompt {index} has no tokens: write something in it")
        if len(prompt) > max_context_length:
            raise SmolLM3Error(
                f"prompt {index} has {len(prompt)} tokens, max_context_length is {max_context_length}: shorten it, or "
                "compile with a larger one"
            )


def check_generation_config(fields: Mapping[str, Any], vocab_size: int) -> None:
    """Raises SmolLM3Error for a generation_config.json, with these fields, by which no token could be chosen."""
    eos_token_ids = token_ids("eos_token_id", fields.get("eos_token_id"))
    chooser = _Chooser(Sampling.of(fields), [[0]], [1], eos_token_ids, ())
    for length in (1, 4096):  # some of it holds from a length on
        chooser(0, [0] * length, SimpleNamespace(logits=torch.zeros(1, 1, vocab_size)), -1)


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
    suppress_tokens: Sequence[int] = (),
    pad_token_id: int = 0,
    sampling: Sampling = GREEDY,
    on_token: Callable[[int, int], None] | None = None,
    forced: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
    tokenizer=None,
    prompt_lookup: int | None = None,
    adapter_ids: Sequence[int] | None = None,
) -> list[Generated]:
    """Returns the new tokens of each prompt (token ids), which it runs in groups of the model's batch size.

    A prompt's tokens end at an EOS, after `max_new_tokens`, or where the model's seq_len is full. The token ids in
    `suppress_tokens` are never chosen. `on_token(prompt index, token)` is called as tokens come. `forced` (teacher
    forcing) has, for each prompt, the tokens that are fed in the place of the model's own choices, as many of which
    come back. With `keep_logits` the results hold the logits. `tokenizer` is needed where the sampling has stop
    strings, with which an answer ends, too. `prompt_lookup` is how many candidates a step may verify, see
    speculation.py: the tokens stay the same; with `forced` the candidates are the tokens that are fed. `adapter_ids`
    has for each prompt the place of its adapter in the model's `lora_config`; without them no prompt has any. A call
    from another thread waits until this one has its answers: the model has one KV cache.

    Raises SmolLM3Error for an empty prompt, one longer than max_context_length, a token that the vocabulary has not,
    for what the model's on-device sampling cannot do, and for candidates that it cannot verify; NotANumber where the
    model returns logits that are not numbers.
    """
    neuron_config = model.config.neuron_config
    check_prompts(prompts, max_new_tokens, neuron_config.max_context_length)
    _check_tokens(prompts, model.config.vocab_size)
    if prompt_lookup is not None:
        check_prompt_lookup(prompt_lookup, neuron_config)
    check_returns_logits(neuron_config, forced or keep_logits)
    adapter_ids = _checked_adapter_ids(getattr(neuron_config, "lora_config", None), adapter_ids, len(prompts))
    stops = sampling.stops(tokenizer)
    results = [Generated() for _ in prompts]
    with turn(model):
        for first in range(0, len(prompts), neuron_config.batch_size):
            group = slice(first, first + neuron_config.batch_size)
            _Group(
                model,
                prompts[group],
                results[group],
                max_new_tokens,
                eos_token_ids=eos_token_ids,
                suppress_tokens=suppress_tokens,
                pad_token_id=pad_token_id,
                sampling=sampling,
                on_token=(lambda row, token, first=first: on_token(first + row, token)) if on_token else None,
                forced=forced and forced[group],
                keep_logits=keep_logits,
                stops=stops,
                prompt_lookup=prompt_lookup,
                adapter_ids=adapter_ids and adapter_ids[group],
            ).run()
    return results


def _check_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise SmolLM3Error(
                f"prompt {index} has tokens from {min(prompt)} to {max(prompt)}, allowed is 0 to {vocab_size - 1}: is "
                "the tokenizer another model's?"
            )


def _checked_adapter_ids(lora_config: Any, adapter_ids: Sequence[int] | None, count: int) -> list[int] | None:
    """Returns an adapter's id per prompt, or None for a model without adapters: the id after the last is none."""
    if lora_config is None:
        if adapter_ids is not None:
            raise SmolLM3Error("adapter_ids are given, but the model was compiled without adapters; leave them out")
        return None
    none = len(lora_config.lora_ckpt_paths)
    adapter_ids = [none] * count if adapter_ids is None else list(adapter_ids)
    if len(adapter_ids) != count or not all(0 <= id_ < lora_config.max_loras for id_ in adapter_ids):
        raise SmolLM3Error(
            f"adapter_ids is {adapter_ids}, allowed is one for each of {count} prompts, from 0 to "
            f"{lora_config.max_loras - 1}"
        )
    return adapter_ids


class _Group:
    """Prompts that fit into one batch of the model, and their answers; see `generate`."""

    def __init__(
        self,
        model,
        prompts: Sequence[Sequence[int]],
        results: Sequence[Generated],
        max_new_tokens: int,
        *,
        eos_token_ids: Sequence[int],
        suppress_tokens: Sequence[int],
        pad_token_id: int,
        sampling: Sampling,
        on_token: Callable[[int, int], None] | None,
        forced: Sequence[Sequence[int]] | None,
        keep_logits: bool,
        stops: StopStringCriteria | None,
        prompt_lookup: int | None,
        adapter_ids: Sequence[int] | None,
    ):
        self.model, self.prompts, self.results = model, prompts, results
        self.eos_token_ids, self.pad_token_id, self.stops = eos_token_ids, pad_token_id, stops
        self.on_token, self.forced, self.keep_logits = on_token, forced, keep_logits
        neuron_config, count = model.config.neuron_config, len(prompts)
        self.seq_len, self.has_draft = neuron_config.seq_len, has_draft(neuron_config)
        self.last_place = last_place(neuron_config)
        on_device_sampling_config = getattr(neuron_config, "on_device_sampling_config", None)
        self.limits = [min(max_new_tokens, len(row)) for row in forced] if forced else [max_new_tokens] * count
        if on_device_sampling_config:
            self.choose, self.inputs = _on_device(on_device_sampling_config, sampling, count, suppress_tokens)
        else:
            self.choose = _Chooser(sampling, prompts, self.limits, eos_token_ids, suppress_tokens)
            self.inputs = {}
        if adapter_ids is not None:
            self.inputs = {**self.inputs, "adapter_ids": torch.tensor(adapter_ids, dtype=torch.int32)}
        self.tables = BlockTables(neuron_config, prompts, self.limits) if neuron_config.is_prefix_caching else None
        self.width = neuron_config.speculation_length if prompt_lookup or self.has_draft else 1
        self.lookup = PromptLookup(prompt_lookup, count) if prompt_lookup else None

    def run(self) -> None:
        """Fills the results."""
        self.model.reset()
        if self.tables:
            output = _encode_one_by_one(self.model, self.tables, self.inputs)
        else:
            output = self.model(**prefill_inputs(self.prompts, self.pad_token_id), **self.inputs)
        candidates: list[list[int]] = [[] for _ in self.prompts]
        if self.has_draft:
            output.tokens = output.fused_outputs[0]
        while True:
            width = self.width if self.has_draft or any(candidates) else 1
            for row, result in enumerate(self.results):
                self._take(row, result, output, candidates[row], width)
            if all(result.finished for result in self.results):
                return
            output, candidates = self._step()

    def _take(self, row: int, result: Generated, output, candidates: list[int], width: int) -> None:
        """Adds a row's next token, and one for each candidate that was right, from what it says of `width` tokens."""
        if result.finished:
            return
        before = len(result.tokens)
        for place in range(len(candidates) + 1):
            if result.finished or (place and not self.forced and result.tokens[-1] != candidates[place - 1]):
                break
            self._add(row, result, output, place - width)
        accepted = len(result.tokens) - before - 1
        if self.has_draft and before:
            is_cut = accepted < len(candidates)  # the answer ended among them
            result.offered += accepted if is_cut else width - 1
            result.accepted += accepted
        elif candidates:
            result.offered += len(candidates)
            result.accepted += accepted
            self.lookup.judged(row, accepted, len(candidates))

    def _add(self, row: int, result: Generated, output, place: int) -> None:
        """Adds the token that the output has for a row at `place`, counted from the end."""
        tokens = [*self.prompts[row], *result.tokens]
        token, margins = self.choose(row, tokens, output, place)
        result.tokens.append(token)
        result.margins += margins
        if self.keep_logits:
            result.logits.append(output.logits[row, place].float())
        tokens.append(token)
        is_last = len(result.tokens) >= self.limits[row] or len(tokens) > self.last_place
        result.finished = token in self.eos_token_ids or is_last
        if self.stops is not None:
            result.finished |= bool(self.stops(torch.tensor([tokens]), None))
        if self.on_token:
            self.on_token(row, token)

    def _step(self) -> tuple[Any, list[list[int]]]:
        """Feeds each row its last token, and its candidates if there are any; returns the output and those."""
        fed = self.forced or [result.tokens for result in self.results]
        lasts = [row[len(result.tokens) - 1] for row, result in zip(fed, self.results)]
        lengths = [len(prompt) + len(result.tokens) - 1 for prompt, result in zip(self.prompts, self.results)]
        candidates = self._candidates(lengths)
        width = self.width if any(candidates) else 1
        tokens = [[last, *row, *[self.pad_token_id] * (width - 1 - len(row))] for last, row in zip(lasts, candidates)]
        # a finished row goes on in its last place, where it writes over its own last token
        furthest = self.last_place - 1 if self.has_draft else self.seq_len - width
        inputs = decode_inputs(tokens, [min(length, furthest) for length in lengths])
        block_inputs = self.tables.step(inputs["position_ids"]) if self.tables else {}
        output = self.model(**inputs, **block_inputs, **self.inputs)
        if self.has_draft:
            candidates = accepted_tokens(output, inputs["position_ids"])
        return output, candidates

    def _candidates(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns what each row may go on with behind its last token, whose place in the cache `lengths` has.

        A step verifies as many tokens of all rows: where one has no room for that in the cache, there are none.
        """
        candidates: list[list[int]] = [[] for _ in lengths]
        live = [row for row, result in enumerate(self.results) if not result.finished]
        if self.lookup is None or any(lengths[row] + self.width > self.seq_len for row in live):
            return candidates
        for row in live:
            tokens = self.results[row].tokens
            count = min(self.lookup.count, self.limits[row] - len(tokens) - 1)
            if self.forced:
                candidates[row] = list(self.forced[row][len(tokens) :][:count])
            elif count:
                candidates[row] = self.lookup(row, [*self.prompts[row], *tokens])[:count]
        return candidates


def _encode_one_by_one(model, tables: BlockTables, sampling_inputs: dict[str, torch.Tensor]) -> SimpleNamespace:
    """Returns the outputs of all prompts, one below the other; `sampling_inputs` has a row for each."""
    outputs = [
        model(**tables.prompt(row), **{name: value[row : row + 1] for name, value in sampling_inputs.items()})
        for row in range(len(tables.prompts))
    ]
    joined = SimpleNamespace(logits=None, tokens=None)
    for name in vars(joined):
        if torch.is_tensor(getattr(outputs[0], name, None)):
            setattr(joined, name, torch.cat([getattr(output, name) for output in outputs]))
    return joined


def _on_device(on_device_sampling_config, sampling: Sampling, batch_size: int, suppress_tokens: Sequence[int]):
    """Returns a chooser that takes the tokens as they come, and the model's sampling_params [batch_size, 3]."""
    if suppress_tokens:
        raise SmolLM3Error(
            "tokens cannot be barred where the device samples; compile without on_device_sampling_config"
        )
    torch.manual_seed(sampling.seed)  # of the CPU runtime; a device has its own
    sampling_params = torch.tensor([sampling.on_device_params(on_device_sampling_config)] * batch_size)

    def choose(row: int, input_ids: list[int], output, place: int) -> tuple[int, list[float]]:
        return int(output.tokens.reshape(batch_size, -1)[row, place]), []

    return choose, {"sampling_params": sampling_params}


class _Chooser:
    """Chooses the next token of a row, and measures the distance of the two best logits."""

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        eos_token_ids: Sequence[int],
        suppress_tokens: Sequence[int],
    ):
        self.greedy = sampling.temperature == 0
        self.processors = [
            sampling.processors(prompt, limit, eos_token_ids, suppress_tokens) for prompt, limit in zip(prompts, limits)
        ]
        self.generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
        self.suppress_tokens = list(suppress_tokens)

    def __call__(self, row: int, input_ids: list[int], output, place: int) -> tuple[int, list[float]]:
        """Returns the token that follows on `input_ids`, by the logits at `place`, and the distance as a list."""
        logits = output.logits[row : row + 1, place].to(torch.float32, copy=True)
        if not torch.isfinite(logits).any() or logits.isnan().any():
            raise NotANumber(
                "the model returned logits that are not numbers: weights are damaged, or too large for its dtype"
            )
        token = self._choose(row, input_ids, logits)
        logits[:, self.suppress_tokens] = float("-inf")
        best = logits.topk(2).values
        return token, (best[:, 0] - best[:, 1]).tolist()

    def _choose(self, row: int, input_ids: list[int], logits: torch.Tensor) -> int:
        try:
            scores = self.processors[row](torch.tensor([input_ids]), logits)
        except Exception as error:  # of many kinds: ids that the vocabulary has not, texts for numbers
            raise SmolLM3Error(f"generation config: {' '.join(str(error).split())}") from None
        if not (scores > float("-inf")).any():
            raise SmolLM3Error("generation config: it bars every token of the vocabulary; bar fewer")
        if self.greedy:
            return int(scores.argmax(-1))  # of equals the lowest, which topk does not promise
        probabilities = scores.softmax(-1)
        if not torch.isfinite(probabilities).all():
            raise SmolLM3Error("generation config: it makes scores that are no numbers; take values nearer to 1")
        return int(torch.multinomial(probabilities, 1, generator=self.generators[row]))
