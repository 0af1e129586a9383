import json
from dataclasses import asdict

import pytest
from transformers import SmolLM3Config

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config, resolve_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

RAW = SMOLLM3_3B


def without(*names: str, **changes) -> dict:
    return {**{name: value for name, value in RAW.items() if name not in names}, **changes}


def write(folder, raw) -> None:
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))


def test_the_3b():
    resolved = resolve_config(RAW)
    assert [i for i, flag in enumerate(resolved.no_rope_layers) if not flag] == [3, 7, 11, 15, 19, 23, 27, 31, 35]
    assert (resolved.head_dim, resolved.rope_theta, resolved.rope_scaling) == (128, 5e6, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layer_interval": 1},
        {"no_rope_layers": [0] * 36},
        {"no_rope_layers": [1, 0] * 30},
        {"no_rope_layers": [True, False] * 18},
        {"no_rope_layer_interval": None},
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_the_schedule_is_transformers(changes, given):
    raw = without(*([] if given or "no_rope_layers" in changes else ["no_rope_layers"]), **changes)
    arguments = {name: value for name, value in raw.items() if value is not None}
    expected = SmolLM3Config(**arguments).no_rope_layers[:36]
    assert resolve_config(raw).no_rope_layers == [int(flag) for flag in expected]


def test_resolving_twice_changes_nothing():
    once = resolve_config(RAW)
    assert resolve_config({**RAW, **asdict(once)}) == once


@pytest.mark.parametrize(
    "raw, theta",
    [
        (without("rope_theta", "rope_scaling", rope_parameters={"rope_theta": 5e6, "rope_type": "default"}), 5e6),
        # transformers 4.57 reads a version-5 config and puts its own default beside it
        (without(rope_theta=2e6, rope_parameters={"rope_theta": 5e6, "rope_type": "default"}), 5e6),
        (without(rope_scaling={}), 5e6),
        (without(rope_scaling={"rope_type": "default"}), 5e6),
        (without(rope_scaling={"type": "default"}, rope_theta=10000), 1e4),
    ],
)
def test_spellings_of_rope(raw, theta):
    resolved = resolve_config(raw)
    assert (resolved.rope_theta, resolved.rope_scaling) == (theta, None)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize(
    "raw",
    [
        without(rope_scaling=YARN),
        without(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}),
        without("rope_theta", "rope_scaling", rope_parameters={"rope_theta": 5e6, **YARN}),
        without(rope_theta=2e6, rope_parameters={"rope_theta": 5e6, **YARN}),
    ],
)
def test_spellings_of_yarn(raw):
    resolved = resolve_config(raw)
    assert (resolved.rope_theta, resolved.rope_scaling) == (5e6, YARN)
    assert resolve_config({**raw, **asdict(resolved)}) == resolved and resolved.longest_sequence == 131072


WINDOW = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    "changes", [{}, WINDOW, {**WINDOW, "use_sliding_window": False}, {**WINDOW, "no_rope_layers": [0] * 36}]
)
def test_layer_types_are_transformers(changes):
    raw = without("layer_types", **changes)
    expected = SmolLM3Config(**{name: value for name, value in raw.items() if value is not None}).layer_types
    resolved = resolve_config(raw)
    assert resolved.layer_types == expected and resolve_config({**raw, **asdict(resolved)}) == resolved
    assert resolved.sliding_window == (4096 if raw["use_sliding_window"] else None)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"no_rope_layers": [1, 1, 1, 0]}, ["no_rope_layers has 4 entries", "36"]),
        ({"no_rope_layers": []}, ["no_rope_layers has 0 entries", "36"]),
        ({"no_rope_layers": [1, 2] * 18}, ["no_rope_layers[1] is 2", "1 (applies RoPE) or 0 (NoPE)"]),
        ({"no_rope_layers": ["1"] * 36}, ["no_rope_layers[0] is '1'"]),
        ({"no_rope_layers": [1.0] * 36}, ["no_rope_layers[0] is 1.0"]),
        ({"no_rope_layers": 4}, ["no_rope_layers is 4", "list"]),
        ({"no_rope_layer_interval": 0}, ["no_rope_layer_interval is 0", "at least 1"]),
        ({"no_rope_layer_interval": 2.5}, ["no_rope_layer_interval is 2.5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "divide", "16"]),
        ({"num_attention_heads": 12}, ["num_attention_heads is 12", "2048", "head_dim"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "2048"}, ["hidden_size is '2048'", "whole number"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"vocab_size": True}, ["vocab_size is True"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps is missing"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"rope_theta": None}, ["rope_theta is missing"]),
        ({"rope_theta": -1.0}, ["rope_theta is -1.0"]),
        ({"rope_scaling": {"rope_type": "su"}}, ["rope_scaling.rope_type is 'su'", "'default'", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling.rope_type is 'dynamic'"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor is missing", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["rope_scaling.factor is 0.5", "at least 1"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["rope_scaling.factor is '2'"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fats": 32}},
            ["rope_scaling.beta_fats is unknown", "beta_fast"],
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor is missing"]),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 5e6}}, ["rope_parameters.rope_type is 'su'"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'", "object"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.rope_type is missing beside 'factor'", "'yarn'"]),
        ({"rope_parameters": {"rope_theta": 5e6, "factor": 2.0}}, ["rope_parameters.rope_type is missing"]),
        ({"layer_types": "full_attention"}, ["layer_types is 'full_attention'", "list"]),
        ({"layer_types": 3}, ["layer_types is 3", "list"]),
        ({"head_dim": 7}, ["head_dim is 7", "even"]),
        ({"hidden_act": "mish"}, ["hidden_act is 'mish'", "'silu'"]),
        ({"attention_bias": "no"}, ["attention_bias is 'no'", "true or false"]),
        ({"use_sliding_window": True, "sliding_window": 1}, ["sliding_window is 1", "at least 2"]),
        (
            {"layer_types": ["sliding_attention"] * 36},
            ["layer_types has 'sliding_attention'", "use_sliding_window is False"],
        ),
        ({**WINDOW, "layer_types": ["full_attention"] * 3}, ["layer_types is", "36 layers"]),
        (
            {**WINDOW, "layer_types": ["chunked_attention"] * 36},
            ["layer_types[0] is 'chunked_attention'", "'full_attention'"],
        ),
        ({"model_type": "llama"}, ["model_type is 'llama'", "'smollm3'"]),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            ["rope_theta is 5000000.0", "rope_parameters.rope_theta is 10000.0"],
        ),
        ({"dtype": "float32"}, ["torch_dtype is 'bfloat16'", "dtype is 'float32'"]),
        ({"torch_dtype": "int8"}, ["dtype is 'int8'", "bfloat16"]),
        *(
            (
                {"quantization_config": {"quant_method": method}},
                ["quantization_config", repr(method), "use the bfloat16"],
            )
            for method in ("awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, ["quantization_config", "'bitsandbytes'"]),
        ({"compression_config": {"format": "pack-quantized"}}, ["compression_config"]),
        *(
            ({"quantization_config": nothing}, [f"quantization_config is {nothing!r}", "remove it"])
            for nothing in ([], {}, "", False, 0)
        ),
        ({"eos_token_id": "x"}, ["eos_token_id is 'x'", "a list"]),
        ({"eos_token_id": [128012, None]}, ["eos_token_id is [128012, None]"]),
        ({"eos_token_id": -1}, ["eos_token_id is -1"]),
        ({"eos_token_id": True}, ["eos_token_id is True"]),
        ({"bos_token_id": "<s>"}, ["bos_token_id is '<s>'", "null or a token id"]),
        ({"pad_token_id": [0]}, ["pad_token_id is [0]"]),
    ],
)
def test_what_would_run_wrong_is_named(tmp_path, changes, named):
    write(tmp_path, without(**changes))
    with pytest.raises(SmolLM3Error) as error:
        read_config(tmp_path)
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"{tmp_path / 'config.json'}: ")
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "smollm3"}'])
def test_a_file_that_is_no_config(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(SmolLM3Error, match="config.json"):
        read_config(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(SmolLM3Error, match="no config.json there"):
        read_config(tmp_path)


def test_head_dim_that_is_not_hidden_over_heads():
    assert resolve_config(without(head_dim=72, num_attention_heads=12)).head_dim == 72


ORIGINAL = "use the bfloat16 safetensors checkpoint"


@pytest.mark.parametrize(
    "file, named, instead",
    [
        ("SmolLM3-Q4_K_M.gguf", "SmolLM3-Q4_K_M.gguf is GGUF", ORIGINAL),
        ("flax_model.msgpack", "flax_model.msgpack is Flax", ORIGINAL),
        ("tf_model.h5", "tf_model.h5 is TensorFlow", ORIGINAL),
        ("pytorch_model.bin", "pytorch_model.bin is a PyTorch pickle", ORIGINAL),
        ("quantize_config.json", "quantize_config.json says that it is quantized with 'gptq'", ORIGINAL),
        ("quant_config.json", "quant_config.json says that it is quantized with 'awq'", ORIGINAL),
    ],
)
def test_other_formats_are_named(tmp_path, file, named, instead):
    (tmp_path / file).write_bytes(b"{}")
    for with_config in (False, True):
        if with_config:
            write(tmp_path, RAW)
        with pytest.raises(SmolLM3Error, match=named) as error:
            read_config(tmp_path)
        assert instead in str(error.value) and "\n" not in str(error.value)


def test_another_format_beside_safetensors_does_no_harm(tmp_path):
    write(tmp_path, RAW)
    for file in ("model.safetensors", "model.gguf"):
        (tmp_path / file).write_bytes(b"")
    assert read_config(tmp_path) == resolve_config(RAW)
