"""What the results are compared with: transformers' tokens, for small random checkpoints and for `tiny`."""

import functools
import json
from pathlib import Path

import torch
from places import TINY
from transformers import AutoTokenizer, SmolLM3Config, SmolLM3ForCausalLM

SEQ_LEN = 128  # of the real library's jobs, unless a cell says otherwise
RANDOM = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "all-rope": {"no_rope_layers": [1] * 5},
    "all-nope": {"no_rope_layers": [0] * 5},
    "nope-first": {"no_rope_layers": [0, 1, 1, 1, 1]},
    "listed": {"no_rope_layers": [1, 0, 0, 1, 0]},
    "listed-inverted": {"no_rope_layers": [0, 1, 1, 0, 1]},
    "interval-2": {"no_rope_layer_interval": 2},
    "head-dim": {"head_dim": 32},
    "head-dim-72": {"head_dim": 72},
    "odd-vocabulary": {"vocab_size": 253},
    # prompts of 5 and 17 tokens with 32 more go over the original length
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "long": {"max_position_embeddings": 1024},
    "8192-positions": {"max_position_embeddings": 8192},
    "one-token": {},  # prompted with one, which the library would read at its padding
    "window": {"use_sliding_window": True, "sliding_window": 16},  # on the NoPE layer
    "window-listed": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
    },
    "window-everywhere": {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 5},
    "gelu": {"hidden_act": "gelu"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "odd-intermediate": {"intermediate_size": 191},
    "odd-intermediate-biases": {"intermediate_size": 191, "mlp_bias": True},
    "12-heads-4-kv": {"hidden_size": 192, "num_attention_heads": 12},
    "9-heads-3-kv": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
}


@functools.cache
def reference_model(checkpoint):
    torch.set_num_threads(1)  # a second thread slows models as small as these
    return SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@functools.cache
def reference_tokens(checkpoint, prompt: tuple[int, ...], new_tokens: int, barred: tuple[int, ...]) -> list[int]:
    """transformers' greedy tokens."""
    with torch.inference_mode():
        output = reference_model(checkpoint).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            suppress_tokens=list(barred) or None,
        )
    return output[0, len(prompt) :].tolist()


def make_checkpoint(folder: Path, **changes) -> str:
    """A small random checkpoint. Wide weights: its tokens differ as soon as anything in the computation does."""
    torch.manual_seed(0)
    config = SmolLM3Config(
        **{
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rope_theta": 10000.0,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    model = SmolLM3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    return str(folder)


def make_adapter(checkpoint, folder: Path, **config) -> Path:
    """A random adapter of PEFT's own; every tensor of it different from what it starts with."""
    from peft import LoraConfig, get_peft_model

    base = SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@functools.cache
def tiny_prompts() -> list[list[int]]:
    """The published prompts as token ids, shortest first."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompts = json.loads((TINY / "prompts.json").read_text())["published"]
    return sorted((tokenizer(prompt)["input_ids"] for prompt in prompts), key=len)


def tiny_eos() -> tuple[int, ...]:
    eos = json.loads((TINY / "config.json").read_text())["eos_token_id"]
    return tuple(eos) if isinstance(eos, list) else (eos,)
