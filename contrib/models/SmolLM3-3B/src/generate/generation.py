"""Prefill and decode by calling the model itself: NxDI's generation adapter is broken in the public 0.7 and 0.8 sources.

Sampling is transformers' logits processors. Every prompt has a generator of its own, so that in a batch it gets the
tokens that it gets alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import SmolLM3Error


class NotANumber(RuntimeError):
    """The model is broken: nothing can be chosen from what it returned."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy. `seed` makes it repeat."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise SmolLM3Error(f"temperature is {self.temperature}, allowed is 0 (greedy) or a number above 0")
        if self.top_k is not None and self.top_k < 1:
            raise SmolLM3Error(f"top_k is {self.top_k}, allowed is a whole number of at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SmolLM3Error(f"top_p is {self.top_p}, allowed is a number above 0 and up to 1")
        if not 0 <= self.seed < 2**63:
            raise SmolLM3Error(f"seed is {self.seed}, allowed is a whole number from 0 to 2**63 - 1")

    def on_device_params(self, global_topk: int) -> list[float]:
        """top_k, top_p and temperature as the library's `sampling_params` wants them."""
        if self.temperature == 0:
            return [1, 1.0, 1.0]
        return [min(self.top_k or global_topk, global_topk), self.top_p or 1.0, self.temperature]

    def processors(self) -> LogitsProcessorList:
        """transformers' processors, in transformers' order."""
        warpers = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList(warpers)


@dataclass
class Generated:
    """One prompt's new tokens (the EOS that ended it included) and, per token, the two best logits' distance (none where
    the device samples) and, where they are kept, the logits [vocab] themselves, none of them barred."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    finished: bool = False


def prefill_inputs(prompts: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, position_ids [batch, longest], right padded, and seq_ids [batch]."""
    batch, longest = len(prompts), max(map(len, prompts))
    input_ids = torch.full((batch, longest), pad_token_id)
    attention_mask = torch.zeros(batch, longest, dtype=torch.long)
    position_ids = torch.ones(batch, longest, dtype=torch.long)  # 1 on padding, as the library's own adapter has it
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = torch.tensor(prompt)
        attention_mask[row, : len(prompt)] = 1
        position_ids[row, : len(prompt)] = torch.arange(len(prompt))
    return dict(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, seq_ids=torch.arange(batch)
    )


def decode_inputs(tokens: Sequence[int], positions: Sequence[int]) -> dict[str, torch.Tensor]:
    """One token per row, to be written at `positions`; the mask covers the tokens before it."""
    position_ids = torch.tensor(positions)[:, None]
    attention_mask = (torch.arange(int(position_ids.max())) < position_ids).long()
    return dict(
        input_ids=torch.tensor(tokens)[:, None],
        attention_mask=attention_mask,
        position_ids=position_ids,
        seq_ids=torch.arange(len(tokens)),
    )


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_context_length: int) -> None:
    """SmolLM3Error for what `generate` cannot take, before a model is loaded for it."""
    if max_new_tokens < 1:
        raise SmolLM3Error(f"max_new_tokens is {max_new_tokens}, allowed is a whole number of at least 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise SmolLM3Error(f"prompt {index} has no tokens: write something in it")
        if len(prompt) > max_context_length:
            raise SmolLM3Error(
                f"prompt {index} has {len(prompt)} tokens, the artifact's context takes {max_context_length}: shorten it, or "
                "compile with a larger --max-context-length"
            )


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
    barred_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    sampling: Sampling = Sampling(),
    on_token: Callable[[int, int], None] | None = None,
    forced: Sequence[Sequence[int]] | None = None,
    keep_logits: bool = False,
) -> list[Generated]:
    """New tokens for each prompt (token ids), in groups of the model's batch size.

    `on_token(prompt index, token)` is called as tokens come. A row ends at an EOS, after max_new_tokens, or where the
    model's seq_len is full. `forced` (teacher forcing) are, per prompt, the tokens that are fed in the place of the
    model's own choices, as many of which come back. Raises SmolLM3Error for an empty prompt, one longer than
    max_context_length or a token that the vocabulary has not.
    """
    neuron_config = model.config.neuron_config
    check_prompts(prompts, max_new_tokens, neuron_config.max_context_length)
    for index, prompt in enumerate(prompts):
        if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
            raise SmolLM3Error(
                f"prompt {index} has tokens from {min(prompt)} to {max(prompt)}, allowed is 0 to "
                f"{model.config.vocab_size - 1}: is the tokenizer another model's?"
            )
    results = [Generated() for _ in prompts]
    for first in range(0, len(prompts), neuron_config.batch_size):
        group = slice(first, first + neuron_config.batch_size)
        _generate_group(
            model, prompts[group], results[group], max_new_tokens, eos_token_ids, barred_token_ids, pad_token_id, sampling,
            (lambda row, token, first=first: on_token(first + row, token)) if on_token else None,
            forced and forced[group], keep_logits,
        )  # fmt: skip
    return results


def _generate_group(
    model, prompts, results, max_new_tokens, eos_token_ids, barred_token_ids, pad_token_id, sampling, on_token, forced,
    keep_logits,
):  # fmt: skip
    seq_len = model.config.neuron_config.seq_len
    on_device = getattr(model.config.neuron_config, "on_device_sampling_config", None)
    if on_device:
        choose, more = _on_device(on_device, sampling, len(prompts), barred_token_ids)
    else:
        choose, more = _Chooser(sampling, len(prompts), barred_token_ids), {}
    limits = [min(max_new_tokens, len(row)) for row in forced] if forced else [max_new_tokens] * len(prompts)
    model.reset()
    output = model(**prefill_inputs(prompts, pad_token_id), **more)
    while True:
        logits = output.logits[:, -1].float().clone() if keep_logits else None  # `choose` bars tokens in place
        tokens, margins = choose(prompts, results, output)
        for row, result in enumerate(results):
            if result.finished:
                continue
            result.tokens.append(tokens[row])
            result.margins += margins[row : row + 1]
            if keep_logits:
                result.logits.append(logits[row])
            used = len(prompts[row]) + len(result.tokens)
            result.finished = tokens[row] in eos_token_ids or len(result.tokens) >= limits[row] or used > seq_len
            if on_token:
                on_token(row, tokens[row])
        if all(result.finished for result in results):
            return
        # a finished row goes on in its last place, where it writes over its own last token
        fed = forced or [result.tokens for result in results]
        last = [tokens[len(result.tokens) - 1] for tokens, result in zip(fed, results)]
        positions = [min(len(p) + len(r.tokens) - 1, seq_len - 1) for p, r in zip(prompts, results)]
        output = model(**decode_inputs(last, positions), **more)


def _on_device(on_device, sampling: Sampling, batch: int, barred_token_ids: Sequence[int]):
    """A chooser that takes the tokens as they come, and the model's sampling_params [batch, 3]."""
    if barred_token_ids:
        raise SmolLM3Error(
            "tokens cannot be barred where the device samples; compile without on_device_sampling_config"
        )
    if sampling.temperature > 0 and not (on_device.do_sample or on_device.dynamic):
        raise SmolLM3Error(
            f"temperature is {sampling.temperature}, but on_device_sampling_config is greedy: use 0, or compile with "
            "do_sample"
        )
    torch.manual_seed(sampling.seed)  # of the CPU runtime; a device has its own
    params = torch.tensor([sampling.on_device_params(on_device.global_topk)] * batch)
    return lambda prompts, results, output: (output.tokens.flatten().tolist(), []), {"sampling_params": params}


class _Chooser:
    """The next token of each row, and the distance of the two best logits."""

    def __init__(self, sampling: Sampling, batch: int, barred_token_ids: Sequence[int]):
        self.greedy = sampling.temperature == 0
        self.processors = None if self.greedy else sampling.processors()
        self.generators = [torch.Generator().manual_seed(sampling.seed) for _ in range(batch)]
        self.barred = list(barred_token_ids)

    def __call__(self, prompts, results, output) -> tuple[list[int], list[float]]:
        logits = output.logits[:, -1].float()
        if not torch.isfinite(logits).any(-1).all() or logits.isnan().any():
            raise NotANumber("the model returned logits that are not numbers")
        logits[:, self.barred] = float("-inf")
        best = logits.topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        if self.greedy:
            return best.indices[:, 0].tolist(), margins
        tokens = []
        for row, generator in enumerate(self.generators):
            input_ids = torch.tensor([[*prompts[row], *results[row].tokens]])
            probabilities = self.processors(input_ids, logits[row : row + 1]).softmax(-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return tokens, margins
