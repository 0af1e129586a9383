"""The names of the files that hold weights, and the prefix of the names in them. Imports no torch."""

INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint; says which file holds which tensor
SINGLE_FILE = "model.safetensors"  # of a checkpoint without an index
SHARD_FILE = "tp{rank}_sharded_checkpoint.safetensors"  # of a rank, as NxD Inference names it
PREFIX = "model."  # of every tensor's name in a checkpoint but lm_head.weight's
