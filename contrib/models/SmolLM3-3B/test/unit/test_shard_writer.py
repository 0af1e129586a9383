"""What is written beside the tensors, which the library's own sharder judges elsewhere: entries, counts, headers."""

import hashlib
import json
import zlib

import pytest
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from safetensors.torch import load_file, save_file

from smollm3_neuron.model.config import resolve_config
from smollm3_neuron.weights import shard_writer
from smollm3_neuron.weights.projections import expected_shapes
from smollm3_neuron.weights.shard_writer import safetensors_header, shard_bytes, write_shards

CONFIG = resolve_config(
    dict(
        hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=51, max_position_embeddings=64, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e4, mlp_bias=True,
    )
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {f"model.{n}": torch.randn(s, generator=generator) for n, s in expected_shapes(CONFIG).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_and_counts_are_the_files(dtype, chunk, checkpoint, tmp_path, monkeypatch):
    """Whatever the size of the pieces; the folder may be there already, and is made where it is not."""
    monkeypatch.setattr(shard_writer, "CHUNK", chunk)
    neuron_config, output, counts = NeuronConfig(tp_degree=3, torch_dtype=dtype), tmp_path / "made/weights", []
    entries = write_shards(checkpoint, CONFIG, neuron_config, output, counts.append)
    assert entries == write_shards(str(checkpoint), CONFIG, neuron_config, str(output))
    assert list(entries) == [f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(3)]
    sizes, headers = [], []
    for rank, (name, entry) in enumerate(entries.items()):
        content = (tmp_path / "made" / name).read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        sizes.append(len(content))
        headers.append(len(header))
        assert entry == {
            "size": len(content), "crc32": zlib.crc32(content),
            "header": {"size": len(header), "sha256": hashlib.sha256(header).hexdigest()},
        }  # fmt: skip
        shard = load_file(tmp_path / "made" / name)
        assert shard["rank_util.rank"].tolist() == [rank] and shard["rank_util.rank"].dtype == torch.int32
        assert torch.equal(
            shard["norm.weight"], load_file(checkpoint / "model.safetensors")["model.norm.weight"].to(dtype)
        )
    assert sum(counts) == sum(sizes) and shard_bytes(CONFIG, neuron_config) == sum(sizes) - sum(headers)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("letters", range(8))
def test_a_header_is_padded_to_a_multiple_of_8(letters, metadata):
    shapes = [("a" * (1 + letters), torch.float32, (2, 3)), ("b", torch.int8, ())]
    header = safetensors_header(shapes, metadata)
    length, text = int.from_bytes(header[:8], "little"), header[8:]
    assert len(text) == length and length % 8 == 0 and len(text) - len(text.rstrip(b" ")) < 8
    assert json.loads(text) == {
        **({"__metadata__": metadata} if metadata else {}),
        "a" * (1 + letters): {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I8", "shape": [], "data_offsets": [24, 25]},
    }
    assert b": " not in text and b", " not in text
