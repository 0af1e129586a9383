# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime's graphs compiled ahead of time to machine code, by torch's AOTInductor and the C++ compiler.

A graph is cut into parts, one per layer (cut.py), and of parts that are the same one is compiled (build.py): as many as
there are kinds of layers, whatever the depth. Weights and caches stay inputs (run.py), so that all parts share the
mapped shard file. eager_ranks.py runs the same ranks uncompiled, so that values inside the model can be looked at.
"""
