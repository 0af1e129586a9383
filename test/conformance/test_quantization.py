"""Quantized weights: what shard_writer.py writes, against the checkpoint's values and, with --nxd-source, byte for byte
against the library, which quantizes the checkpoint by its own tools and shards that. The forward: see test/hlo, for
CPU mode has none.
"""

import pytest
import torch
from safetensors.torch import load_file

from nxd_sources import model_jobs
from nxd_sources.release import run_real

TENSOR, CHANNEL = "per_tensor_symmetric", "per_channel_symmetric"
HEAD = ["lm_head"]
# checkpoint, tp_degree, fused_qkv, quantization_type, quantization_dtype, modules_to_not_convert
CASES = [
    ("plain", 1, False, TENSOR, "int8", None), ("plain", 2, False, TENSOR, "int8", None),
    ("plain", 2, False, TENSOR, "f8e4m3", None), ("plain", 8, False, TENSOR, "f8e4m3", None),
    ("plain", 2, False, CHANNEL, "int8", None), ("plain", 2, True, CHANNEL, "int8", None),
    ("plain", 2, False, CHANNEL, "f8e4m3", None), ("plain", 8, True, CHANNEL, "f8e4m3", None),
    ("plain", 3, False, CHANNEL, "int8", HEAD), ("plain", 3, True, CHANNEL, "f8e4m3", HEAD),
    ("plain", 12, True, CHANNEL, "int8", HEAD), ("untied", 2, False, CHANNEL, "int8", ["o_proj", "down_proj"]),
    ("untied", 2, False, TENSOR, "int8", None), ("odd-vocabulary", 2, False, CHANNEL, "int8", HEAD),
    ("9-heads-3-kv", 2, False, CHANNEL, "int8", None), ("odd-intermediate", 2, False, CHANNEL, "f8e4m3", None),
]  # fmt: skip


def job(checkpoints, checkpoint, tp, fused, quantization_type, quantization_dtype, left_out):
    return {
        "name": "-".join(map(str, (checkpoint, tp, fused, quantization_type, quantization_dtype, *(left_out or [])))),
        "kind": "shard",
        "checkpoint": checkpoints[checkpoint],
        "keep": True,
        "neuron": {
            "tp_degree": tp,
            "batch_size": 1,
            "seq_len": 64,
            "fused_qkv": fused,
            "torch_dtype": "bfloat16",
            "quantized": True,
            "quantized_checkpoints_path": "set where it is needed",
            "quantization_type": quantization_type,
            "quantization_dtype": quantization_dtype,
            "modules_to_not_convert": left_out,
        },
    }


def written(job, folder):
    """Our shard files by rank."""
    from smollm3_neuron.machine.runtime import ensure_neuronx

    if ensure_neuronx() != "cpu":
        pytest.skip("the Neuron SDK is installed here: nxd_cpu is not used")
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
    from smollm3_neuron.weights.shard_writer import write_shards

    config = model_jobs.build_config(NeuronSmolLM3ForCausalLM, job)
    write_shards(job["checkpoint"], config.checkpoint_config, config.neuron_config, folder)
    return files(folder, job)


def files(folder, job):
    return [folder / f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(job["neuron"]["tp_degree"])]


@pytest.fixture(scope="session")
def of_library(request, random_checkpoints, tmp_path_factory):
    """Folder of the library's shard files, of (release, job)."""
    folders = {}

    def get(release, wanted):
        if release not in folders:
            folder = tmp_path_factory.mktemp(release.version)
            results = run_real(release, [job(random_checkpoints, *case) for case in CASES], folder)
            errors = [result["error"] for result in results.values() if "error" in result]
            assert not errors, errors[0]
            folders[release] = folder
        return folders[release] / wanted["name"]

    return get


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:5])))
def test_shards_equal_the_librarys(case, of_library, nxd_releases, random_checkpoints, tmp_path):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC")
    wanted = job(random_checkpoints, *case)
    ours = written(wanted, tmp_path)
    for release in nxd_releases:
        theirs = files(of_library(release, wanted), wanted)
        assert [a.name for a, b in zip(ours, theirs, strict=True) if a.read_bytes() != b.read_bytes()] == [], (
            release.version
        )


@pytest.mark.parametrize("dtype", ["int8", "f8e4m3"])
@pytest.mark.parametrize("quantization_type", [TENSOR, CHANNEL])
def test_values_are_the_checkpoints(quantization_type, dtype, random_checkpoints, tmp_path):
    """Within half a step of the quantized type at TP 2, the tied head among them; the scales' names and shapes."""
    wanted = job(random_checkpoints, "plain", 2, False, quantization_type, dtype, None)
    ranks = [load_file(file) for file in written(wanted, tmp_path)]
    checkpoint = load_file(f"{random_checkpoints['plain']}/model.safetensors")
    checkpoint["model.lm_head.weight"] = checkpoint["model.embed_tokens.weight"]
    scales = {name for name in ranks[0] if name.endswith(".scale")}
    assert len(scales) == 1 + 5 * 7 and scales == {
        name.replace("weight", "scale") for name in ranks[0] if is_linear(name)
    }
    for name in scales:
        weight = name.removesuffix("scale") + "weight"
        is_row_parallel = "o_proj" in name or "down_proj" in name
        source = weight.replace("qkv_proj.", "").replace("o_proj.o_proj", "o_proj")
        largest = torch.cat([shard[weight].float().abs() for shard in ranks], dim=int(is_row_parallel)).amax(1)
        largest = largest.min() if quantization_type == CHANNEL else largest.max()
        assert largest in ((127, 128) if dtype == "int8" else (240,))  # the whole range is used
        for rank, shard in enumerate(ranks):
            expected = checkpoint[f"model.{source}"].chunk(2, dim=int(is_row_parallel))[rank]
            assert shard[name].dtype == torch.float32 and shard[weight].dtype.itemsize == 1
            assert shard[name].shape == ((len(expected), 1) if quantization_type == CHANNEL else (1,))
            step = shard[name] if dtype == "int8" else torch.maximum(expected.abs() / 8, shard[name] / 2**9)
            assert ((shard[weight].float() * shard[name] - expected).abs() <= step * 0.5001).all()
    assert all(
        len(shard["lm_head.weight"].float().unique()) > 50 for shard in ranks
    )  # the known fault made it all zeros


def is_linear(name):
    return "proj" in name or name.startswith("lm_head")


def test_an_adapter_is_merged_before(random_checkpoints, tmp_path):
    """As if the merged checkpoint had been quantized."""
    from peft import LoraConfig, get_peft_model
    from transformers import SmolLM3ForCausalLM

    from smollm3_neuron.model.config import read_config
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
    from smollm3_neuron.weights.adapter import Adapter
    from smollm3_neuron.weights.shard_writer import write_shards

    base = SmolLM3ForCausalLM.from_pretrained(random_checkpoints["plain"])
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    wanted = job({"merged": str(tmp_path / "merged")}, "merged", 2, False, CHANNEL, "int8", None)
    expected = [load_file(file) for file in written(wanted, tmp_path / "expected")]
    config = model_jobs.build_config(NeuronSmolLM3ForCausalLM, wanted)
    adapter = Adapter(tmp_path / "adapter", read_config(random_checkpoints["plain"]))
    write_shards(
        random_checkpoints["plain"], config.checkpoint_config, config.neuron_config, tmp_path / "found", adapter=adapter
    )
    for file, shard in zip(files(tmp_path / "found", wanted), expected):
        for name, tensor in load_file(file).items():
            off = (tensor.float() - shard[name].float()).abs()
            assert off.max() <= (1 if name.endswith("weight") and is_linear(name) else 1e-6) and off.mean() < 1e-3, name
