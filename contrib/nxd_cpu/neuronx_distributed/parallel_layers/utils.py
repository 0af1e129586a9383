# SPDX-License-Identifier: Apache-2.0
import torch


def divide(numerator: int, denominator: int) -> int:
    """The quotient. AssertionError if there is a remainder."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """What to add to `numerator` to make it a multiple of `denominator`."""
    return -numerator % denominator


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int, num_partitions: int = -1
) -> None:
    """Write on a parameter how the sharder cuts it."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
    tensor.num_partitions = num_partitions
