"""Exported graphs compiled ahead of time to machine code for this CPU, by torch's AOTInductor and the C++ compiler.

Not a part of the libraries that nxd_cpu stands for, but what their compiler is to them. A graph is cut into parts, one
per layer (cut.py), and of parts that are the same one is compiled (build.py): as many as there are kinds of layers,
whatever the depth. Weights and caches stay inputs (run.py), so that all parts share the mapped shard file.
"""
