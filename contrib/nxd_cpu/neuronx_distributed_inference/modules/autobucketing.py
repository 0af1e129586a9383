# SPDX-License-Identifier: Apache-2.0
from math import log2


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """Powers of two from `min_length` up, and `max_length` in the place of the last."""
    if min_length == max_length:
        return [max_length]
    return [2**i for i in range(int(log2(min_length)), round(log2(max_length)))] + [max_length]


def generate_buckets_for_cte(inference_config) -> list[int]:
    """Prompt lengths that context encoding is compiled for."""
    config, longest = inference_config.neuron_config, inference_config.neuron_config.max_context_length
    given = config.context_encoding_buckets or generate_buckets(128, longest)
    return given if config.enable_bucketing else [longest]


def generate_buckets_for_tkg(inference_config) -> list[int]:
    """Cache lengths that token generation is compiled for."""
    config, longest = inference_config.neuron_config, inference_config.neuron_config.max_length
    given = config.token_generation_buckets or generate_buckets(128, longest)
    return given if config.enable_bucketing else [longest]


def generate_buckets_for_speculation(inference_config) -> list[int]:
    """Cache lengths that verifying tokens is compiled for."""
    return generate_buckets_for_tkg(inference_config)
