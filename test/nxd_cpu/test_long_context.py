"""A long prompt's memory grows with its length, never with the square of it."""

import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM, SmolLM3InferenceConfig

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layer_interval=2,
        max_position_embeddings=65536,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = SmolLM3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("long")
    model.save_pretrained(folder)
    return folder


class AnonymousMemory:
    """The most that the process held while this ran, over what it held before, in bytes: `peak`."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)
        self.before, self.most, self.stop = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *failure):
        self.stop.set()
        self.thread.join()
        self.peak = self.most - self.before

    def watch(self):
        while not self.stop.wait(0.002):
            self.most = max(self.most, self.now())

    @staticmethod
    def now() -> int:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def run(folder, length: int, compiled: Path) -> tuple[list[int], int]:
    """Greedy tokens after a prompt of `length`, and the memory that loading and answering took."""
    neuron_config = NeuronConfig(
        seq_len=length + NEW_TOKENS, max_context_length=length, torch_dtype=torch.float32, save_sharded_checkpoint=True
    )
    config = SmolLM3InferenceConfig(neuron_config, load_config=load_pretrained_config(folder))
    NeuronSmolLM3ForCausalLM(str(folder), config).compile(str(compiled))
    model, ids = NeuronSmolLM3ForCausalLM(str(compiled)), prompt(length)
    with torch.no_grad(), AnonymousMemory() as memory:
        model.load(str(compiled))
        tokens = [int(model(ids, position_ids=torch.arange(length)[None]).logits.argmax())]
        for position in range(length, length + NEW_TOKENS - 1):
            logits = model(torch.tensor([tokens[-1:]]), position_ids=torch.tensor([[position]])).logits
            tokens.append(int(logits.argmax()))
    return tokens, memory.peak


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(length))


def peaks(folder, lengths, compiled: Path, capsys) -> list[int]:
    found = [run(folder, length, compiled / str(length))[1] for length in lengths]
    with capsys.disabled():
        print(
            "\n ", ", ".join(f"{length:,} tokens: {peak / 1e6:.0f} MB" for length, peak in zip(lengths, found)), end=" "
        )
    return found


def test_four_times_the_tokens_take_four_times_the_memory(long_checkpoint, tmp_path, capsys):
    short, long = peaks(long_checkpoint, (4096, 16384), tmp_path, capsys)
    assert long < 6 * short  # a square would be 16, a mask of one byte alone 9


@pytest.mark.slow
def test_up_to_65532_tokens(long_checkpoint, tmp_path, capsys):
    found = peaks(long_checkpoint, (8191, 16383, 32766, 65532), tmp_path, capsys)
    assert found[-1] < 12 * found[0]  # a square would be 64


def test_4096_tokens_are_transformers(long_checkpoint, tmp_path):
    tokens, _ = run(long_checkpoint, 4096, tmp_path)
    reference = SmolLM3ForCausalLM.from_pretrained(long_checkpoint, dtype=torch.float32).eval()
    ids = prompt(4096)
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
    )
    assert tokens == expected[0, 4096:].tolist()
