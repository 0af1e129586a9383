"""NaN and infinity: in weights they are told with the tensor's name, and nothing is written; at run time in a line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import Random
from places import ROOT
from reference import make_adapter
from safetensors.torch import load_file, save_file

from smollm3_neuron.artifact.build import build_config, compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.adapter import WEIGHTS, Adapter
from smollm3_neuron.weights.finite import is_finite
from smollm3_neuron.weights.shard_writer import write_shards

NAME = "model.layers.2.mlp.down_proj.weight"
QUANTIZED = dict(quantized=True, quantization_dtype="int8")


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_told_from_what_is_none(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert [is_finite(number) for number in numbers.split(1)] == numbers.isfinite().tolist()
    assert is_finite(numbers[numbers.isfinite()]) and not is_finite(numbers)


def test_numbers_of_32_bits_are_told_from_what_are_none():
    upper = torch.cat([torch.arange(0x7F00, 0x8000), torch.arange(-0x100, 0x100)]).to(torch.int32) << 16
    numbers = torch.cat([upper, upper | 1, upper | 0xFFFF]).view(torch.float32)
    assert [is_finite(number) for number in numbers.split(1)] == numbers.isfinite().tolist()


def test_what_cannot_be_none_is_a_number():
    assert is_finite(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)) and is_finite(torch.zeros(0))


def changed(checkpoint, folder, dtype, value, name=NAME):
    shutil.copytree(checkpoint, folder)
    weights = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
    weights[name].flatten()[-1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def shards(folder, output, adapter=None, **settings):
    config = build_config(folder, Settings(**{"tp_degree": 2, "seq_len": 32, "torch_dtype": "float32", **settings}))
    adapter = adapter and Adapter(adapter, config.checkpoint_config)
    return write_shards(folder, config.checkpoint_config, config.neuron_config, output, adapter=adapter)


@pytest.mark.parametrize("settings", [{}, {"fused_qkv": True, "torch_dtype": "bfloat16"}, QUANTIZED])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_none_is_named(value, settings, random_checkpoints, tmp_path):
    folder = changed(random_checkpoints["plain"], tmp_path / "checkpoint", torch.bfloat16, value)
    with pytest.raises(SmolLM3Error, match=f"model.safetensors: {NAME} has NaN or infinity among its values"):
        shards(folder, tmp_path / "weights", **settings)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_every_tensor_is_looked_at(name, random_checkpoints, tmp_path):
    folder = changed(random_checkpoints["untied"], tmp_path / "checkpoint", torch.float32, float("nan"), name)
    with pytest.raises(SmolLM3Error, match=f"{name} has NaN"):
        shards(folder, tmp_path / "weights")


def test_a_weight_too_large_for_the_dtype_is_named(random_checkpoints, tmp_path):
    folder = changed(random_checkpoints["plain"], tmp_path / "checkpoint", torch.bfloat16, 1e5)
    with pytest.raises(SmolLM3Error, match=f"{NAME} has values that are too large for float16; take another --dtype"):
        shards(folder, tmp_path / "weights", torch_dtype="float16")
    shards(folder, tmp_path / "weights", torch_dtype="bfloat16")


def test_an_adapter_that_makes_none_of_a_weight_is_named(random_checkpoints, tmp_path):
    adapter = make_adapter(random_checkpoints["plain"], tmp_path / "adapter", target_modules=["down_proj"])
    tensors = load_file(adapter / WEIGHTS)
    tensors[next(name for name in tensors if "layers.2" in name)][0, 0] = float("nan")
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(SmolLM3Error, match=f"adapter: merged into {NAME} it gives NaN or infinity"):
        shards(random_checkpoints["plain"], tmp_path / "weights", adapter)


def test_a_compile_leaves_nothing_of_it(random_checkpoints, tmp_path, monkeypatch):
    from smollm3_neuron.artifact import build

    monkeypatch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")
    folder = changed(random_checkpoints["plain"], tmp_path / "checkpoint", torch.float32, float("nan"))
    with pytest.raises(SmolLM3Error, match=NAME):
        compile_artifact(folder, tmp_path / "output", Settings(1, 1, 32, torch_dtype="float32"), "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("alpha", ["NaN", "1e400", "-Infinity", "1" + "0" * 400])
def test_an_alpha_that_is_none_is_named(alpha, random_checkpoints, tmp_path):
    adapter = make_adapter(random_checkpoints["plain"], tmp_path / "adapter", target_modules=["q_proj"], lora_alpha=77)
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 77', f'"lora_alpha": {alpha}'))
    with pytest.raises(SmolLM3Error, match="adapter_config.json: ") as error:
        Adapter(adapter, read_config(random_checkpoints["plain"]))
    assert alpha[:20] in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("theta", ["NaN", "1e400", "Infinity", "1", "0.5", "0"])
def test_a_rope_theta_that_is_none_is_named(theta, random_checkpoints, tmp_path):
    config = json.loads(Path(random_checkpoints["plain"], "config.json").read_text()) | {"rope_theta": 77}
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"rope_theta": 77', f'"rope_theta": {theta}'))
    with pytest.raises(SmolLM3Error, match="config.json: .*" + theta):
        read_config(tmp_path)


def test_at_run_time_it_is_one_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import common

    model = Random(11, lambda logits: logits.fill_(float("nan")))
    with pytest.raises(SystemExit) as ended:
        common.run(lambda: generate(model, [[1, 2]], 3))
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: the model returned logits that are not numbers: weights are damaged, or too large for its dtype"
    ]
