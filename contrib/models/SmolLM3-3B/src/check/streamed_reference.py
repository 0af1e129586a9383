# SPDX-License-Identifier: Apache-2.0
"""transformers as the reference where its whole model has no room: its own layers, one at a time, from the files.

A pass takes all cases through one layer before it reads the next one, so the weights of one layer are in memory, or
those of the head. The logits are those of the whole model, bit for bit, to ROWS positions. A longer prompt takes memory
that grows with its length, never with the square of it: there is no mask, and the MLPs run in pieces.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, SmolLM3Config

from ..model.config import fields_for_transformers, read_config
from ..model.rope import RotaryTable
from ..weights.checkpoint import check_checkpoint
from ..weights.files import PREFIX
from .altered_reference import Alteration

WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
# from prompts and what each was answered so far to how the model goes on with that
ROWS = 4096  # up to as many positions the logits are those of the whole model bit for bit
Draft = Callable[[list[list[int]], list[list[int]]], list[list[int]]]


class _Outline(nn.Module):
    """Stands for a layer where only what a layer is given, its mask and its positions, is asked for."""

    def __init__(self, attention_type: str):
        super().__init__()
        self.attention_type = attention_type
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        self.given = given
        return hidden_states


def _through(layer: nn.Module, states: Tensor, given: dict[str, Any], singly: int) -> Tensor:
    """Returns what a layer makes of `states`, the last `singly` positions one at a time over transformers' cache."""
    length, cache, parts = states.shape[1], DynamicCache() if singly else None, []
    first = length - singly
    for begin, end in [(0, first), *((position, position + 1) for position in range(first, length))]:
        own = dict(given)
        if cache is not None:
            own |= {"past_key_values": cache, "use_cache": True}
            own["position_ids"] = given["position_ids"][:, begin:end]
            own["cache_position"] = given["cache_position"][begin:end]
            own["position_embeddings"] = tuple(wave[:, begin:end] for wave in given["position_embeddings"])
            if given["attention_mask"] is not None:
                own["attention_mask"] = given["attention_mask"][..., begin:end, :end]
        output = layer(states[:, begin:end], **own)
        parts.append(output if torch.is_tensor(output) else output[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _in_pieces(mlp: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """Runs an MLP over at most ROWS positions at a time: of a long prompt its neurons would be the most in memory."""
    if hidden_states.shape[1] <= ROWS:
        return mlp(hidden_states)
    return torch.cat([mlp(rows) for rows in hidden_states.split(ROWS, dim=1)], dim=1)


class StreamedModel:
    """transformers' model of the checkpoint in `folder`, in `dtype`, of which one layer is in memory at a time.

    `adapter` and `quantized` alter its weights as in `load_altered_reference`; with `rope_table` cos and sin are those
    of a RotaryTable of so many positions, see model/rope.py. `layers`, `norm` and `lm_head` are transformers' own
    modules, for hooks. Raises SmolLM3Error for a checkpoint or an adapter that does not fit, and for files that are
    damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        adapter: str | Path | None = None,
        quantized: Any = None,
        rope_table: int | None = None,
    ):
        config = read_config(folder)
        self.dtype, self.is_tied = dtype, config.tie_word_embeddings
        self._files = {
            name.removeprefix(PREFIX): (name, file) for name, file in check_checkpoint(folder, config).items()
        }
        self._alteration = Alteration(config, dtype, adapter, quantized)
        transformers_config = SmolLM3Config.from_dict(fields_for_transformers(folder))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(transformers_config, dtype=dtype).eval()
        self.layers, self.norm, self.lm_head = model.model.layers, model.model.norm, model.lm_head
        for layer in self.layers:
            layer.mlp.forward = functools.partial(_in_pieces, layer.mlp.forward)
        self._model = model.model
        self._model.layers = nn.ModuleList(_Outline(layer.attention_type) for layer in self.layers)
        self._model.norm = nn.Identity()
        self._model.rotary_emb = (
            RotaryTable(config, rope_table) if rope_table else type(self._model.rotary_emb)(transformers_config)
        )

    def _stored(self, name: str) -> Tensor:
        """Returns a tensor as it is stored, mapped from its file."""
        stored_name, file = self._files[name]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(stored_name)

    def _weight(self, name: str) -> Tensor:
        """Returns a weight as the whole model has it; what needs no conversion stays mapped, as transformers has it."""
        is_shared = name == "lm_head.weight" and self.is_tied
        stored = self._stored("embed_tokens.weight" if is_shared else name)
        return self._alteration(name, stored.to(self.dtype, copy=is_shared and not self._alteration.is_none))

    def _fill(self, module: nn.Module, prefix: str) -> None:
        state = {name: self._weight(f"{prefix}.{name}") for name, _ in module.named_parameters()}
        module.load_state_dict(state, assign=True)

    @torch.no_grad()
    def logits(
        self, inputs: Sequence[Sequence[int]], keep: Sequence[int | Tensor], one_by_one: bool = False
    ) -> Iterator[Tensor]:
        """Yields the logits [positions, vocab_size] of each of `inputs` (token ids), in order, in one pass.

        `keep` has for each what transformers' logits_to_keep takes: how many of the last positions, or their indices.
        With `one_by_one`, where it is how many, those positions run as transformers generates: each over its cache.
        """
        embeddings = self._alteration.merged("embed_tokens.weight", self._stored("embed_tokens.weight"), self.dtype)
        hidden = [embeddings[torch.tensor(ids)].to(self.dtype)[None] for ids in inputs]
        given = []
        for states in hidden:
            # told that nothing is padding, and only then, transformers makes no mask of the length squared
            nothing_padded = torch.ones(states.shape[:2], dtype=torch.long)
            self._model(inputs_embeds=states, attention_mask=nothing_padded, use_cache=False)
            given.append([outline.given for outline in self._model.layers])
        for index, layer in enumerate(self.layers):
            self._fill(layer, f"layers.{index}")
            for case, of_layers in enumerate(given):
                hidden[case] = _through(layer, hidden[case], of_layers[index], keep[case] if one_by_one else 0)
            layer.to("meta")
        self._fill(self.norm, "norm")
        hidden = [self.norm(states) for states in hidden]
        self._fill(self.lm_head, "lm_head")
        try:
            for states, kept in zip(hidden, keep):
                yield self.lm_head(states[:, slice(-kept, None) if isinstance(kept, int) else kept])[0]
        finally:
            self.lm_head.to("meta")


class Reference:
    """transformers in `dtype` and in the next wider one, altered as `StreamedModel` says.

    `passes` counts by dtype how often all layers were read. `unquantized` is None, or beside 8-bit weights the same
    model without them, in bfloat16. `earlier` has, by dtype and prompt, the logits of up to so many positions before
    the answer, where that is asked for: of one prompt alone they are more to measure by. They and the answer's then run
    one by one, as the model's own: over many keys that rounds otherwise than all positions at once.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, *, earlier: int = 0, **altered: Any):
        self._earlier, self.earlier = earlier, {}
        self.dtype, self.wider = dtype, WIDER[dtype]
        self._models = {one: StreamedModel(folder, one, **altered) for one in (dtype, self.wider)}
        self.unquantized = None
        if altered.get("quantized"):
            self.unquantized = StreamedModel(folder, torch.bfloat16, **{**altered, "quantized": None})
        self._greedy: dict[tuple, list[int]] = {}
        self.passes = dict.fromkeys(self._models, 0)

    def logits(
        self, dtype: torch.dtype, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> Iterator[Tensor]:
        """Yields, in `dtype`, the logits [len(tokens), vocab_size] that choose each of its tokens after each prompt."""
        self.passes[dtype] += 1
        inputs = [[*prompt, *forced[:-1]] for prompt, forced in zip(prompts, tokens)]
        before = [min(self._earlier, len(prompt) - 1) for prompt in prompts]
        kept = [len(forced) + count for forced, count in zip(tokens, before)]
        passed = self._models[dtype].logits(inputs, kept, one_by_one=bool(self._earlier))
        for prompt, count, logits in zip(prompts, before, passed):
            if self._earlier:
                self.earlier[dtype, tuple(prompt)] = logits[:count]
            yield logits[count:]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        suppress_tokens: Sequence[int] = (),
        draft: Draft | None = None,
        fixed: Collection[int] = (),
    ) -> list[tuple[list[int], Tensor]]:
        """Returns transformers' greedy tokens after each prompt, as many as `tokens` are, and the logits of them.

        A pass shows how far `tokens` are greedy. Where one is not, transformers' own takes its place, what follows is
        what `draft` says (without it, what transformers chose after the other one), and one more pass shows that.
        The tokens of the prompts whose indices are `fixed` stay as they are.
        """
        keys = [(tuple(prompt), len(own), tuple(suppress_tokens)) for prompt, own in zip(prompts, tokens)]
        guesses = [self._greedy.get(key, list(own)) for key, own in zip(keys, tokens)]
        results: list[Any] = [None] * len(prompts)
        left = list(range(len(prompts)))
        while left:
            parted, begun, rest = [], [], []
            passed = self.logits(self.dtype, [prompts[index] for index in left], [guesses[index] for index in left])
            for index, logits in zip(left, passed):
                best = best_of(logits, suppress_tokens).indices[:, 0].tolist()
                right = next((n for n, pair in enumerate(zip(best, guesses[index])) if len(set(pair)) > 1), len(best))
                if index in fixed:
                    results[index] = guesses[index], logits
                elif right >= len(best) - 1:  # nothing was fed after the first other one
                    results[index] = best, logits
                    self._greedy[keys[index]] = best
                else:
                    parted.append(index)
                    begun.append(best[: right + 1])
                    rest.append(best[right + 1 :])
            if parted and draft:
                drafted = draft([[*prompts[index]] for index in parted], begun)
                rest = [[*new, *old[len(new) :]][: len(old)] for new, old in zip(drafted, rest)]
            for index, first, following in zip(parted, begun, rest):
                guesses[index] = [*first, *following]
            left = parted
        return results


def best_of(logits: Tensor, suppress_tokens: Sequence[int], count: int = 2):
    """Returns the values and indices [positions, count] of each position's best logits, in float64."""
    suppressed = torch.tensor(suppress_tokens, dtype=torch.long)
    return logits.double().index_fill(-1, suppressed, float("-inf")).topk(count, dim=-1)
