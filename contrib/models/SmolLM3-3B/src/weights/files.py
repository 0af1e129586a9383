"""Names of the files that hold weights, and what tensors of a checkpoint are prefixed with. Imports no torch."""

INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint: which file holds which tensor
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"  # of a rank, as NxD Inference names it
PREFIX = "model."  # of a checkpoint's names, but for lm_head.weight
