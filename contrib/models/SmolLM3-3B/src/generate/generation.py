# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode by calling the model itself, as NxDI's own adapter fails in the public 0.7 and 0.8 sources.

Which token comes next is sampling.py's. Every prompt has a random generator of its own, so that in a batch it gets the
tokens that it gets alone.
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
from .turns import turn


@dataclass
class Generated:
    """One prompt's new tokens, the EOS that ended it included.

    `margins` has, for each token, by how much the best logit exceeds the second (nothing where the device samples), and
    `logits`, where they are kept, the float32 logits [vocab_size] themselves, those of suppressed tokens included.
    """

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    finished: bool = False


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


def decode_inputs(tokens: Sequence[int], positions: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for one more token of each row, to be written to the cache at `positions`.

    They are input_ids and position_ids [batch_size, 1], seq_ids [batch_size], and attention_mask
    [batch_size, largest position], which covers the tokens before.
    """
    position_ids = torch.tensor(positions)[:, None]
    attention_mask = (torch.arange(int(position_ids.max())) < position_ids).long()
    return dict(
        input_ids=torch.tensor(tokens)[:, None],
        attention_mask=attention_mask,
        position_ids=position_ids,
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
        chooser([[0] * length], [Generated()], SimpleNamespace(logits=torch.zeros(1, 1, vocab_size)))


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
    adapter_ids: Sequence[int] | None = None,
) -> list[Generated]:
    """Returns the new tokens of each prompt (token ids), which it runs in groups of the model's batch size.

    A prompt's tokens end at an EOS, after `max_new_tokens`, or where the model's seq_len is full. The token ids in
    `suppress_tokens` are never chosen. `on_token(prompt index, token)` is called as tokens come. `forced` (teacher
    forcing) has, for each prompt, the tokens that are fed in the place of the model's own choices, as many of which
    come back. With `keep_logits` the results hold the logits. `tokenizer` is needed where the sampling has stop
    strings, with which an answer ends, too. `adapter_ids` has for each prompt the place of its adapter in the model's
    `lora_config`; without them no prompt has any. A call from another thread waits until this one has its answers: the
    model has one KV cache.

    Raises SmolLM3Error for an empty prompt, one longer than max_context_length, a token that the vocabulary has not,
    and for what the model's on-device sampling cannot do; NotANumber where the model returns logits that are not
    numbers.
    """
    neuron_config = model.config.neuron_config
    check_prompts(prompts, max_new_tokens, neuron_config.max_context_length)
    for index, prompt in enumerate(prompts):
        if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
            raise SmolLM3Error(
                f"prompt {index} has tokens from {min(prompt)} to {max(prompt)}, allowed is 0 to "
                f"{model.config.vocab_size - 1}: is the tokenizer another model's?"
            )
    adapter_ids = _checked_adapter_ids(getattr(neuron_config, "lora_config", None), adapter_ids, len(prompts))
    stops = sampling.stops(tokenizer)
    results = [Generated() for _ in prompts]
    with turn(model):
        for first in range(0, len(prompts), neuron_config.batch_size):
            group = slice(first, first + neuron_config.batch_size)
            _generate_group(
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
                adapter_ids=adapter_ids and adapter_ids[group],
            )
    return results


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


def _generate_group(
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
    adapter_ids: Sequence[int] | None,
) -> None:
    """Fills `results` for prompts that fit into one batch of the model; see `generate`."""
    neuron_config = model.config.neuron_config
    seq_len = neuron_config.seq_len
    on_device_sampling_config = getattr(neuron_config, "on_device_sampling_config", None)
    limits = [min(max_new_tokens, len(row)) for row in forced] if forced else [max_new_tokens] * len(prompts)
    if on_device_sampling_config:
        choose, sampling_inputs = _on_device(on_device_sampling_config, sampling, len(prompts), suppress_tokens)
    else:
        choose, sampling_inputs = _Chooser(sampling, prompts, limits, eos_token_ids, suppress_tokens), {}
    if adapter_ids is not None:
        sampling_inputs = {**sampling_inputs, "adapter_ids": torch.tensor(adapter_ids, dtype=torch.int32)}
    tables = BlockTables(neuron_config, prompts, limits) if neuron_config.is_prefix_caching else None
    model.reset()
    if tables:
        output = _encode_one_by_one(model, tables, sampling_inputs)
    else:
        output = model(**prefill_inputs(prompts, pad_token_id), **sampling_inputs)
    while True:
        logits = output.logits[:, -1].float() if keep_logits else None
        tokens, margins = choose(prompts, results, output)
        for row, result in enumerate(results):
            if result.finished:
                continue
            result.tokens.append(tokens[row])
            result.margins += margins[row : row + 1]
            if keep_logits:
                result.logits.append(logits[row])
            length = len(prompts[row]) + len(result.tokens)
            result.finished = tokens[row] in eos_token_ids or len(result.tokens) >= limits[row] or length > seq_len
            if stops is not None:
                result.finished |= bool(stops(torch.tensor([[*prompts[row], *result.tokens]]), None))
            if on_token:
                on_token(row, tokens[row])
        if all(result.finished for result in results):
            return
        fed = forced or [result.tokens for result in results]
        last_tokens = [row[len(result.tokens) - 1] for row, result in zip(fed, results)]
        # a finished row goes on in its last place, where it writes over its own last token
        positions = [min(len(prompt) + len(result.tokens) - 1, seq_len - 1) for prompt, result in zip(prompts, results)]
        inputs = decode_inputs(last_tokens, positions)
        block_inputs = tables.step(inputs["position_ids"]) if tables else {}
        output = model(**inputs, **block_inputs, **sampling_inputs)


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
    if sampling.temperature > 0 and not (on_device_sampling_config.do_sample or on_device_sampling_config.dynamic):
        raise SmolLM3Error(
            f"temperature is {sampling.temperature}, but on_device_sampling_config is greedy: use 0, or compile with "
            "do_sample"
        )
    torch.manual_seed(sampling.seed)  # of the CPU runtime; a device has its own
    sampling_params = torch.tensor([sampling.on_device_params(on_device_sampling_config.global_topk)] * batch_size)

    def choose(prompts, results, output) -> tuple[list[int], list[float]]:
        return output.tokens.flatten().tolist(), []

    return choose, {"sampling_params": sampling_params}


class _Chooser:
    """Chooses the next token of each row, and measures the distance of the two best logits."""

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

    def __call__(self, prompts, results, output) -> tuple[list[int], list[float]]:
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        if not torch.isfinite(logits).any(-1).all() or logits.isnan().any():
            raise NotANumber(
                "the model returned logits that are not numbers: weights are damaged, or too large for its dtype"
            )
        tokens = [
            result.tokens[-1]
            if result.finished
            else self._choose(row, [*prompt, *result.tokens], logits[row : row + 1])
            for row, (prompt, result) in enumerate(zip(prompts, results))
        ]
        logits[:, self.suppress_tokens] = float("-inf")
        best = logits.topk(2, dim=-1).values
        return tokens, (best[:, 0] - best[:, 1]).tolist()

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
