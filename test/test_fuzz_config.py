"""Every config.json is refused by one line, or runs as transformers runs it: seeded mutations, and both models."""

import json
import random

import pytest
import torch
from mutations import Hang, Outcomes, cases, changed, check, damaged, limit, of, written
from safetensors.torch import save_file

from smollm3_neuron.artifact.build import build_config
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import decode_inputs, prefill_inputs
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import fields_for_transformers, read_config
from smollm3_neuron.weights.shard_writer import write_shards

TOLERANCE = 1e-4  # of the largest logit, in float32
LENGTH = 20  # of the prompt; one more token follows
BASE = {
    "model_type": "smollm3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def scaling(rng: random.Random) -> dict:
    types = ("default", "linear", "yarn", "llama3")
    fields = {}
    for name in rng.choice((("rope_type",), ("type",), ("rope_type", "type"))):
        fields[name] = rng.choice(types)
    values = {
        "factor": (1, 1.0, 1.5, 4.0, 8, 1e6), "original_max_position_embeddings": (8, 16, 16.5, 32, 64),
        "low_freq_factor": (0.5, 1, 2.0), "high_freq_factor": (1, 2.0, 4.0, 4), "beta_fast": (32, 1.0, 64),
        "beta_slow": (1, 0.25, 32), "attention_factor": (1.0, 0.5, 2), "truncate": (True, False),
        "partial_rotary_factor": (1, 0.5), "mscale": (1.0, 0.7), "rope_theta": (100.0, 1e4),
    }  # fmt: skip
    wanted = {
        "default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    }[fields.get("type", fields.get("rope_type"))]  # fmt: skip
    for name in values:
        if (name in wanted) != (rng.random() < (0.1 if name in wanted or name in list(values)[-3:] else 0.2)):
            fields[name] = rng.choice(values[name])
    return fields


def listed(*values):
    return lambda rng: [rng.choice(values) for _ in range(rng.choice((1, 2, 2, 3, 3, 5)))]


POOLS = {
    "hidden_size": of(16, 32, 48, 64),
    "intermediate_size": of(1, 8, 33, 64),
    "num_hidden_layers": of(1, 2, 3, 4),
    "num_attention_heads": of(1, 2, 3, 4, 8),
    "num_key_value_heads": of(1, 2, 4, None),
    "head_dim": of(None, 2, 4, 8, 16, 6, 10),
    "vocab_size": of(3, 32, 61, 64, 100),
    "max_position_embeddings": of(2, 8, 16, 64, 200, 4096),
    "rms_norm_eps": of(1e-6, 1e-5, 1e-3, 0.1, 1e-30),
    "hidden_act": of("silu", "gelu", "gelu_pytorch_tanh", "relu", "swish", "mish"),
    "rope_theta": of(1.01, 2, 100, 1e4, 5e6, 1e30, 1, 10**29),
    "rope_scaling": lambda rng: scaling(rng),
    "rope_parameters": lambda rng: {**scaling(rng), "rope_theta": rng.choice((100.0, 1e4, 1e4))},
    "no_rope_layers": listed(0, 1, 1, True),
    "no_rope_layer_interval": of(1, 2, 3, 4, None),
    "layer_types": listed("full_attention", "full_attention", "sliding_attention"),
    "use_sliding_window": of(True, True, False, None, 1, "yes"),
    "sliding_window": of(2, 3, 8, 16, 100, None),
    "tie_word_embeddings": of(True, False, None),
    "attention_bias": of(True, False, None),
    "mlp_bias": of(True, False, None),
    "pad_token_id": of(0, 5, -1, None, 60, 61, 10**6),
    "eos_token_id": of(0, [1, 2], None, 10**6, []),
    "torch_dtype": of("float32", "bfloat16", "float16", None),
    "partial_rotary_factor": of(1, 1.0, 0.5, None),
    "num_labels": of(3, 2**40),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
KEYS = (
    *BASE, "head_dim", "layer_types", "rope_parameters", "dtype", "neuron_config", "text_config", "attribute_map",
    "problem_type", "num_labels", "id2label", "label2id", "pruned_heads", "partial_rotary_factor", "torchscript",
    "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder", "is_decoder", "use_cache",
    "attention_dropout", "chunk_size_feed_forward", "tie_encoder_decoder", "architectures", "attn_implementation",
    "_attn_implementation", "_name_or_path", "transformers_version", "quantization_config", "compression_config",
    "initializer_range", "auto_map", "sub_configs", "fused_spec_config", "metadata", "temperature", "num_beams",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def silent(caplog):
    import logging
    import warnings

    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def reference(raw: dict, folder) -> tuple[torch.nn.Module, bool]:
    """transformers' model of the file as it stands, and True; where it has none, of what its fields come to, and False.

    4.57 does not read rope_parameters, and makes as many labels as it is told, which takes for ever.
    """
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    if raw.get("rope_parameters") is None and raw.get("num_labels") != 2**40:
        try:
            with limit(5):
                return SmolLM3ForCausalLM(SmolLM3Config.from_dict(json.loads(json.dumps(raw)))).eval().float(), True
        except (Exception, Hang):
            pass
    return SmolLM3ForCausalLM(SmolLM3Config.from_dict(fields_for_transformers(folder))).eval().float(), False


def save_weights(model: torch.nn.Module, folder) -> None:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            mean, std = (1.0 if "norm" in name else 0.0), (0.2 if parameter.dim() == 1 else 0.15)
            parameter.normal_(mean, std, generator=generator)
        is_tied = bool(model.config.tie_word_embeddings)
        if is_tied:  # with `torchscript` the head is a copy
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and "lm_head" in name)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Those of the last two tokens, each after all before it: [2, vocab_size]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False, return_dict=True).logits[0, -2:]


def logits_of_ours(folder, tokens: list[int], seq_len: int) -> torch.Tensor:
    """The same of the product's model: all but the last token encoded, and that one generated with the cache."""
    from nxd_cpu_compiler.eager_ranks import EagerRanks
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    config = build_config(folder, Settings(tp_degree=1, seq_len=seq_len, torch_dtype="float32"))
    write_shards(folder, config.checkpoint_config, config.neuron_config, folder / "weights")
    app = NeuronSmolLM3ForCausalLM(str(folder), config)
    EagerRanks(app, folder / "weights")
    app.reset()
    with torch.no_grad():
        first = app(**prefill_inputs([tokens[:-1]], 0)).logits[0, -1]
        second = app(**decode_inputs([tokens[-1:]], [len(tokens) - 1])).logits[0, -1]
    return torch.stack([first, second])


def compare(outcomes: Outcomes, raw: dict, folder) -> None:
    """Both models of a config.json that the product takes."""
    config = outcomes.of(lambda: read_config(folder), raw)
    if config is None:
        return
    if config.vocab_size * config.hidden_size * config.num_hidden_layers > 10**6 or config.intermediate_size > 10**4:
        outcomes.counts["accepted, too large to be built here"] += 1
        return
    seq_len = min(LENGTH + 1, config.longest_sequence)
    tokens = [(7 + 31 * place + place * place) % config.vocab_size for place in range(seq_len)]
    model, is_of_file = reference(raw, folder)
    save_weights(model, folder)
    try:
        with limit():
            found = logits_of_ours(folder, tokens, seq_len)
    except SmolLM3Error:
        outcomes.counts["accepted"] -= 1
        outcomes.counts["refused"] += 1
        return
    except (Exception, Hang) as error:
        outcomes.fault("traceback", f"{error!r:.300}", raw)
        return
    expected = logits_of(model, tokens)
    if not is_of_file:
        outcomes.counts["of these transformers takes other spellings of"] += 1
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if found.isnan().equal(expected.isnan()) and expected.isnan().any():
        outcomes.counts["of these NaN in both"] += 1
    elif not difference <= TOLERANCE:
        outcomes.fault("differs", f"by {difference:.1e} of the largest logit", raw)


def run(count: int, damages: int, seed: str, folder) -> Outcomes:
    outcomes = Outcomes("config.json")
    bases = ({}, {"tie_word_embeddings": False}, WINDOW, {"attention_bias": True, "mlp_bias": True})
    for rng in cases(f"config {seed}", count):
        raw = changed(rng, {**BASE, **rng.choice(bases)}, KEYS, POOLS)
        (folder / "config.json").write_bytes(written(raw))
        compare(outcomes, raw, folder)
    for rng in cases(f"damaged config {seed}", damages):
        content = damaged(rng, written(changed(rng, BASE, KEYS, POOLS)))
        (folder / "config.json").write_bytes(content)
        outcomes.of(lambda: fields_for_transformers(folder), content[:1000])
    return outcomes


def test_every_accepted_config_gives_transformers_logits(tmp_path, capsys):
    outcomes = run(900, 100, "ordinary", tmp_path)
    check(outcomes, capsys)
    assert outcomes.counts["accepted"] >= 500


@pytest.mark.slow
def test_every_accepted_config_of_many_gives_transformers_logits(tmp_path, capsys):
    check(run(5000, 500, "slow", tmp_path), capsys)
