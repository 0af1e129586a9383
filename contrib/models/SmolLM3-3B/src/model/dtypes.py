# SPDX-License-Identifier: Apache-2.0
"""The dtypes of weights by torch's names: their names in safetensors and their sizes. Imports no torch."""

from typing import NamedTuple


class Dtype(NamedTuple):
    safetensors_name: str
    nbytes: int  # of one element


DTYPES = {
    "float32": Dtype("F32", 4),
    "bfloat16": Dtype("BF16", 2),
    "float16": Dtype("F16", 2),
    "int32": Dtype("I32", 4),
    "int8": Dtype("I8", 1),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
}
MODEL_DTYPES = ("bfloat16", "float16", "float32")  # those that a checkpoint may be stored in, and a model computes in
# NeuronConfig's quantization_dtype -> the weights' dtype
QUANTIZATION_DTYPES = {"int8": "int8", "f8e4m3": "float8_e4m3fn"}
