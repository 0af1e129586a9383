"""transformers' `SmolLM3ForCausalLM` as the reference: the same prompts, greedy, beside the Neuron model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from ..errors import SmolLM3Error
from ..generate.generation import Generated
from ..model.config import read_config
from ..weights.adapter import Adapter
from ..weights.files import PREFIX
from ..weights.lazy_rows import QuantizedRows
from ..weights.quantization import quantized_linears

# Of the published results of this model on Neuron; the first two are the math prompts.
PUBLISHED_PROMPTS = (
    "The square root of 144 is",
    "1+1=",
    "Water boils at",
    "The chemical formula for water is",
    "The capital of France is",
    "def fibonacci(n):",
)


def load_reference(
    folder: str | Path, dtype: torch.dtype = torch.float32, adapter: str | Path | None = None, quantized: Any = None
) -> SmolLM3ForCausalLM:
    """The checkpoint in `folder`, whichever spelling its config has (transformers 4 does not read transformers 5's), with
    the PEFT adapter in that folder merged, and its weights as the settings `quantized` (artifact.Settings) leave them: each
    8-bit value times its scale. SmolLM3Error for weights that transformers does not find."""
    checkpoint_config, config = read_config(folder), SmolLM3Config.from_pretrained(folder)
    config.rope_theta, config.rope_scaling = checkpoint_config.rope_theta, checkpoint_config.rope_scaling
    model, found = SmolLM3ForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    if found["missing_keys"]:  # it would be random
        raise SmolLM3Error(
            f"{folder}: transformers finds no {min(found['missing_keys'])} there, and so cannot be the reference; name the "
            "weights as transformers does"
        )
    model.eval()
    linears = quantized_linears(checkpoint_config, quantized) if quantized else set()
    if adapter is None and not linears:
        return model
    merge = adapter and Adapter(adapter, checkpoint_config)
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        name, rows = name.removeprefix(PREFIX), parameter.data
        is_quantized = name.removesuffix(".weight") in linears
        if merge:
            rows = merge.merged(name, rows, torch.float32 if is_quantized else dtype)
        if is_quantized:
            rows = QuantizedRows(rows, quantized.quantization_type, quantized.quantization_dtype)
        parameter.data = (rows[:].float() * rows.scale if is_quantized else rows[:]).to(dtype)
    return model


@torch.no_grad()
def reference_generate(
    reference: SmolLM3ForCausalLM, prompt: Sequence[int], max_new_tokens: int, barred_token_ids: Sequence[int] = ()
) -> Generated:
    """Greedy tokens of one prompt and the distance of the two best logits at each; stops at no EOS."""
    input_ids = torch.tensor([list(prompt)])
    output = reference.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=None,
        pad_token_id=0,
        suppress_tokens=list(barred_token_ids) or None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.scores)[:, 0].float().topk(2, dim=-1).values
    return Generated(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist(), True)


def token_match(tokens: Sequence[int], expected: Sequence[int]) -> float:
    """Share of equal tokens, place by place, as the published results count it."""
    return sum(a == b for a, b in zip(tokens, expected)) / max(len(expected), len(tokens))
