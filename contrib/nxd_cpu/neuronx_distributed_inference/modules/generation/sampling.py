# SPDX-License-Identifier: Apache-2.0
import torch
from torch import Tensor, nn


class Sampler(nn.Module):
    """Each row's next token: the best, or one drawn (by torch's generator) as transformers' warpers would let it."""

    def __init__(self, neuron_config, do_sample=None):
        super().__init__()
        self.config = neuron_config.on_device_sampling_config
        self.do_sample = self.config.do_sample if do_sample is None else do_sample

    def forward(self, token_logits: Tensor, sampling_params: Tensor, return_values=False, rank_id=None) -> Tensor:
        """(B, vocabulary); top_k (below 1: global_topk), top_p, temperature (0: greedy) (B, 3) -> int32 (B,)."""
        if not (self.do_sample or self.config.dynamic):
            return token_logits.argmax(-1).int()
        top_k, top_p, temperature = sampling_params.float().split(1, dim=1)
        logits, tokens = token_logits.topk(min(self.config.global_topk, token_logits.shape[1]))
        top_k = torch.where(temperature == 0, 1, torch.where(top_k < 1, logits.shape[1], top_k))
        logits = logits / torch.where(temperature == 0, 1, temperature)
        probabilities = logits.masked_fill(torch.arange(logits.shape[1]) >= top_k, -torch.inf).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill((before >= top_p) & (before > 0), 0)
        sums = probabilities.cumsum(-1)
        drawn = torch.full_like(top_p, 0.5) if self.config.deterministic else torch.rand_like(top_p)
        place = (sums <= drawn * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
        return tokens.gather(1, place).flatten().int()
