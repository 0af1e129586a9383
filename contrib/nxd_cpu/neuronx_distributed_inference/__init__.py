"""NxD Inference in miniature: compile, load and run a decoder-only model on the CPU."""
