"""Real vLLM's offline engine with real vllm-neuron gives transformers' tokens in float32, in any slots and caches."""

import random

import pytest
import torch
from reference import make_checkpoint, reference_model
from serving import environment, run

pytestmark = pytest.mark.vllm
ENGINE = dict(
    max_num_seqs=4,
    max_model_len=256,
    dtype="float32",
    skip_tokenizer_init=True,
    enable_prefix_caching=False,
    tensor_parallel_size=1,
)
ON_HOST = {"on_device_sampling_config": None}
BLOCK = 32


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Of a random model, whose tokens differ as soon as anything in the computation does."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "plain")


def requests() -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 200 tokens in no order, two of them alike, and how many tokens each gets: more than slots."""
    generator = random.Random(0)
    prompts = [
        [generator.randrange(1, 256) for _ in range(length)] for length in (7, 90, 1, 33, 128, 16, 200, 64, 3, 129, 12)
    ]
    return [*prompts, prompts[3]], [24, 5, 40, 1, 24, 31, 20, 2, 17, 24, 60, 24]


def expected(checkpoint: str, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    tokens = []
    for prompt, length in zip(prompts, lengths, strict=True):
        inputs = torch.tensor([prompt])
        output = reference_model(checkpoint).generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=length
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


def generate(release, vllm_neuron, scratch, checkpoint, prompts, lengths, override, rounds=1, **engine):
    config = {"override_neuron_config": override} if override else {}
    job = {
        "engine": {"model": checkpoint, **ENGINE, "additional_config": config, **engine},
        "prompts": prompts,
        "params": [{"temperature": 0, "max_tokens": n, "ignore_eos": True, "detokenize": False} for n in lengths],
        "rounds": rounds,
    }
    return run(
        "offline.py", job, scratch, environment(release, vllm_neuron, scratch, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    )


@pytest.mark.parametrize(
    "tp, override",
    [(1, ON_HOST), (1, None), (2, ON_HOST), (2, {**ON_HOST, "fused_qkv": True})],
    ids=["host-sampling", "on-device-sampling", "tp2", "tp2-fused-qkv"],
)
def test_more_requests_than_slots(release, vllm_neuron, tmp_path, checkpoint, tp, override):
    prompts, lengths = requests()
    (answers,) = generate(
        release, vllm_neuron, tmp_path, checkpoint, prompts, lengths, override, tensor_parallel_size=tp
    )
    assert [answer["tokens"] for answer in answers] == expected(checkpoint, prompts, lengths)


def test_prefix_cache_hits(release, vllm_neuron, tmp_path, checkpoint):
    generator = random.Random(1)
    start = [generator.randrange(1, 256) for _ in range(2 * BLOCK + 5)]
    prompts = [
        start[:length] + [generator.randrange(1, 256) for _ in range(more)]
        for length, more in ((69, 20), (69, 3), (64, 1), (40, 30), (0, 50), (69, 90))
    ]
    lengths = [24, 30, 9, 24, 12, 24]
    rounds = generate(
        release,
        vllm_neuron,
        tmp_path,
        checkpoint,
        prompts,
        lengths,
        ON_HOST,
        rounds=2,
        enable_prefix_caching=True,
        block_size=BLOCK,
    )
    for answers in rounds:
        assert [answer["tokens"] for answer in answers] == expected(checkpoint, prompts, lengths)
    assert [answer["cached"] for answer in rounds[1]] == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


def test_one_slot(release, vllm_neuron, tmp_path, checkpoint):
    """max_num_seqs 1 is compiled without continuous batching."""
    prompts, lengths = requests()
    (answers,) = generate(release, vllm_neuron, tmp_path, checkpoint, prompts, lengths, ON_HOST, max_num_seqs=1)
    assert [answer["tokens"] for answer in answers] == expected(checkpoint, prompts, lengths)
