# SPDX-License-Identifier: Apache-2.0
"""How the next token is chosen: transformers' `GenerationConfig`, its logits processors in its own order.

What a generation config names and this package cannot do is refused by name; what shapes only speed or beams, and what
transformers itself does not know, is ignored, as transformers ignores it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, StopStringCriteria
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import SmolLM3Error
from ..model.config import LARGEST_INTEGER, LARGEST_NUMBER

GLOBAL_TOPK = 256  # the library's default of how many logits a device chooses from
LEAST_TEMPERATURE = 1e-6  # of smaller ones logits overflow
ONLY_SAMPLES = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
FURTHER = (
    *ONLY_SAMPLES,
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "exponential_decay_length_penalty", "stop_strings",
    "renormalize_logits", "remove_invalid_values",
)  # fmt: skip
# values other than these are refused: each would change the tokens, and is not done
UNDONE = {
    "num_beams": (None, 1), "num_beam_groups": (None, 1), "num_return_sequences": (None, 1),
    "diversity_penalty": (None, 0, 0.0), "penalty_alpha": (None, 0, 0.0), "dola_layers": (None,),
    "constraints": (None,), "force_words_ids": (None,), "guidance_scale": (None, 1, 1.0), "max_time": (None,),
    "watermarking_config": (None,), "token_healing": (None, False), "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 is greedy, and with the same `seed` the same tokens come again.

    `further` has fields of transformers' GenerationConfig, those of FURTHER. Raises SmolLM3Error for a value that is
    out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    further: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        temperature = self.temperature
        if not _is_number(temperature) or (temperature != 0 and not LEAST_TEMPERATURE <= temperature <= LARGEST_NUMBER):
            raise SmolLM3Error(
                f"temperature is {temperature!r:.40}, allowed is 0 (greedy) or a number from {LEAST_TEMPERATURE:g} to "
                f"{LARGEST_NUMBER:g}"
            )
        if self.top_k is not None and (type(self.top_k) is not int or not 1 <= self.top_k <= LARGEST_INTEGER):
            raise SmolLM3Error(f"top_k is {self.top_k!r:.40}, allowed is a whole number of at least 1")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise SmolLM3Error(f"top_p is {self.top_p!r}, allowed is a number above 0 and up to 1")
        if not 0 <= self.seed < 2**63:
            raise SmolLM3Error(f"seed is {self.seed}, allowed is a whole number from 0 to 2**63 - 1")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            if not isinstance(self.further.get(name, []), list):
                raise SmolLM3Error(f"{name} is {self.further[name]!r}, allowed is a list of token ids")
        strings = self.further.get("stop_strings") or []
        listed = [strings] if isinstance(strings, str) else strings
        if not isinstance(listed, list) or not all(isinstance(string, str) and string for string in listed):
            raise SmolLM3Error(f"stop_strings is {strings!r}, allowed is a text or a list of them")
        self.processors([0], 1, [0])

    @classmethod
    def of(cls, fields: Mapping[str, Any], seed: int = 0) -> "Sampling":
        """Returns the sampling of a generation_config.json's fields, with transformers' defaults (top_k 50 among them).

        null and 0 switch top_k off. Raises SmolLM3Error for what is not done, such as beams, and for a bad value.
        """
        for name, done in UNDONE.items():
            value = fields.get(name)
            if not any(type(value) is type(allowed) and value == allowed for allowed in done):
                raise SmolLM3Error(
                    f"{name} is {value!r}, which is not done here: set it to {done[-1]!r}, or leave it out"
                )
        defaults = GenerationConfig()
        do_sample, temperature, top_k, top_p = (
            fields.get(name, getattr(defaults, name)) for name in ("do_sample", "temperature", "top_k", "top_p")
        )
        if do_sample not in (None, True, False):
            raise SmolLM3Error(f"do_sample is {do_sample!r}, allowed is true or false")
        further = {name: fields[name] for name in FURTHER if fields.get(name) is not None}
        if not do_sample:
            return cls(seed=seed, further={name: further[name] for name in further if name not in ONLY_SAMPLES})
        temperature = 1.0 if temperature is None else temperature
        if temperature == 0:
            raise SmolLM3Error(
                "temperature is 0, but do_sample is true: set do_sample to false, or a temperature above 0"
            )
        return cls(temperature, top_k or None, top_p, seed, further)

    def on_device_params(self, config) -> list[float]:
        """Returns top_k, top_p and temperature as the library's `sampling_params` wants them.

        `config` is the on_device_sampling_config, the library's object or its fields. Without a top_k it is the
        config's global_topk, the most that the device looks at. Raises SmolLM3Error for more, and for what this device
        cannot do.
        """
        if self.temperature > 0 and is_only_greedy(config):
            raise SmolLM3Error(
                f"temperature is {self.temperature}, but on_device_sampling_config is greedy: use 0, or compile with "
                "do_sample"
            )
        global_topk = _fields(config).get("global_topk", GLOBAL_TOPK)
        for name, value in self.further.items():
            if name != "stop_strings" and value != getattr(GenerationConfig(), name):
                raise SmolLM3Error(
                    f"{name} is {value!r}, which a device that samples cannot do: compile without "
                    "on_device_sampling_config, or leave it out"
                )
        if self.temperature == 0:
            return [1, 1.0, 1.0]
        if self.top_k is not None and self.top_k > global_topk:
            raise SmolLM3Error(
                f"top_k is {self.top_k}, on_device_sampling_config has a global_topk of {global_topk}: give no "
                "more, or compile with a larger one"
            )
        return [self.top_k or global_topk, self.top_p or 1.0, self.temperature]

    def processors(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        suppress_tokens: Sequence[int] = (),
    ) -> LogitsProcessorList:
        """Returns transformers' own processors for one prompt (token ids), in transformers' order.

        Raises SmolLM3Error for a value that one of them refuses.
        """
        suppressed = [*(self.further.get("suppress_tokens") or []), *suppress_tokens]
        is_sample = self.temperature > 0
        chosen = {"temperature": float(self.temperature), "top_k": self.top_k, "top_p": self.top_p} if is_sample else {}
        values = {**self.further, **chosen, "do_sample": is_sample, "suppress_tokens": suppressed or None}
        values["max_length"] = len(prompt) + max_new_tokens
        try:
            if values.get("min_new_tokens") is not None:  # of the two it is the one that counts
                values["min_length"] = len(prompt) + values["min_new_tokens"]
            config = GenerationConfig(**values)
            config._eos_token_tensor = torch.tensor(list(eos_token_ids)) if eos_token_ids else None
            return GenerationMixin()._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=torch.tensor([list(prompt)]),
                device="cpu",
                model_kwargs={},
            )
        except Exception as error:  # of many kinds: the values may be anything
            raise SmolLM3Error(f"generation config: {' '.join(str(error).split())}") from None

    def stops(self, tokenizer) -> StopStringCriteria | None:
        """Returns what ends an answer at one of the `stop_strings`, which needs a tokenizer, or None without them."""
        strings = self.further.get("stop_strings")
        if not strings:
            return None
        if tokenizer is None:
            raise SmolLM3Error(f"stop_strings is {strings!r}, for which generate needs the tokenizer: pass it")
        return StopStringCriteria(tokenizer, [strings] if isinstance(strings, str) else strings)


def asked_fields(
    generation_config: Mapping[str, Any], asked: Mapping[str, Any], is_chat: bool, on_device_sampling_config=None
) -> dict[str, Any]:
    """Returns generation_config.json's fields with those that a user asks for in their places.

    What the file has of samples is meant for its chat: outside of one, and where the device is greedy, only a
    temperature above 0 that is asked for makes samples.
    """
    fields = dict(generation_config)
    if not is_chat:
        fields = {name: value for name, value in fields.items() if name not in ("temperature", "top_k", "top_p")}
    if not is_chat or (on_device_sampling_config is not None and is_only_greedy(on_device_sampling_config)):
        fields["do_sample"] = False
    if "temperature" in asked:
        fields["do_sample"] = asked["temperature"] != 0
    return fields | asked


def is_only_greedy(config) -> bool:
    """Whether a device never draws: `config` is its on_device_sampling_config, the library's object or its fields."""
    return not (_fields(config).get("do_sample") or _fields(config).get("dynamic"))


def _fields(config) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else vars(config)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


GREEDY = Sampling()
