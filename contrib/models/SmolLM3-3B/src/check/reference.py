# SPDX-License-Identifier: Apache-2.0
"""transformers' `SmolLM3ForCausalLM` as the reference: the same prompts, greedy, beside the Neuron model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, SmolLM3Config, SmolLM3ForCausalLM

from ..errors import SmolLM3Error
from ..generate.generation import Generated
from ..model.config import fields_for_transformers, read_config
from ..weights.checkpoint import check_checkpoint

# Of the published results of this model on Neuron; the first two are the math prompts.
PUBLISHED_PROMPTS = (
    "The square root of 144 is",
    "1+1=",
    "Water boils at",
    "The chemical formula for water is",
    "The capital of France is",
    "def fibonacci(n):",
)


def load_reference(folder: str | Path, dtype: torch.dtype = torch.float32) -> SmolLM3ForCausalLM:
    """Returns transformers' model of the checkpoint in `folder`, whichever spelling its config.json has.

    Raises SmolLM3Error for a checkpoint that is damaged, and for weights that transformers does not find: they would be
    random.
    """
    check_checkpoint(folder, read_config(folder))
    config = SmolLM3Config.from_dict(fields_for_transformers(folder))
    model, loading_info = SmolLM3ForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True
    )
    if loading_info["missing_keys"]:
        raise SmolLM3Error(
            f"{folder}: transformers finds no {min(loading_info['missing_keys'])} there, and so cannot be the "
            "reference; name the weights as transformers does"
        )
    model.generation_config = GenerationConfig()  # the folder's own would shape what is to be greedy
    return model.eval()


@torch.no_grad()
def reference_generate(
    reference: SmolLM3ForCausalLM, prompt: Sequence[int], max_new_tokens: int, suppress_tokens: Sequence[int] = ()
) -> Generated:
    """Returns the greedy tokens of one prompt and the distance of the two best logits at each; it stops at no EOS.

    The token ids in `suppress_tokens` are never chosen.
    """
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
        suppress_tokens=list(suppress_tokens) or None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.scores)[:, 0].float().topk(2, dim=-1).values
    return Generated(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist(), finished=True)


def token_match(tokens: Sequence[int], expected: Sequence[int]) -> float:
    """Returns the share of equal tokens, place by place, as the published results count it."""
    return sum(a == b for a, b in zip(tokens, expected)) / max(len(expected), len(tokens))
