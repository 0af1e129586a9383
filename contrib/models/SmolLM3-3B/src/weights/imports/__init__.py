# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in other formats, Flax and GGUF, as a folder of safetensors. The model file does not load this."""
