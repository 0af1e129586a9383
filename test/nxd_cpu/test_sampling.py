"""On-device sampling on the CPU: what may be drawn, and how often, against transformers' warpers."""

from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
from neuronx_distributed_inference.modules.generation.sampling import Sampler
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

DRAWS = 20_000
LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2


def sampler(**options):
    return Sampler(SimpleNamespace(on_device_sampling_config=OnDeviceSamplingConfig(**options)))


@pytest.mark.parametrize(
    "params", [(5, 1.0, 1.0), (40, 0.7, 1.3), (8, 0.5, 0.6), (3, 0.01, 2.0), (0, 0.9, 1.0), (-1, 1.0, 5.0)]
)
def test_draws_are_those_of_transformers(params):
    top_k, top_p, temperature = params
    torch.manual_seed(1)
    tokens = sampler(do_sample=True)(LOGITS.expand(DRAWS, -1), torch.tensor([params]).expand(DRAWS, 3))
    logits = TemperatureLogitsWarper(temperature)(None, LOGITS[None])
    if top_k > 0:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    expected, drawn = logits.softmax(-1)[0], tokens.bincount(minlength=40) / DRAWS
    assert tokens.dtype == torch.int32 and not drawn[expected == 0].any()
    assert (drawn - expected).abs().max() < 0.012


def test_a_seed_repeats_the_draws_and_rows_have_their_own_parameters():
    params = torch.tensor([[40, 1.0, 3.0], [1, 1.0, 3.0], [40, 1.0, 0.0]])

    def draws():
        torch.manual_seed(7)
        return torch.stack([sampler(dynamic=True)(LOGITS.expand(3, -1), params) for _ in range(50)], 1)

    first, best = draws(), LOGITS.argmax()
    assert torch.equal(first, draws()) and len(set(first[0].tolist())) > 5
    assert set(first[1:].flatten().tolist()) == {int(best)}


def test_greedy_and_deterministic():
    params = torch.tensor([[40, 1.0, 1.0]])
    assert sampler()(LOGITS[None], params) == LOGITS.argmax()
    assert len({int(sampler(do_sample=True, deterministic=True)(LOGITS[None], params)) for _ in range(9)}) == 1
