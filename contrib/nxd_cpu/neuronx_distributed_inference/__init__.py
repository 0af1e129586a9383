# SPDX-License-Identifier: Apache-2.0
"""NxD Inference in miniature: compile, load and run a decoder-only model on the CPU."""
