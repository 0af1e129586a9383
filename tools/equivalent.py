"""The mutants that no test can notice (mutate.py), by file, function and change, and why."""

EQUIVALENT: dict[str, str] = {
    "check/validation.py: _lead_noise: -1 -> 1": "Every tensor there is [positions, tokens]: dimension 1 is the last.",
    "check/validation.py: _lead_noise: -1 -> 1 (2)": (
        "Every tensor there is [positions, tokens]: dimension 1 is the last."
    ),
    "check/validation.py: the module: 32 -> 33": (
        "ROWS is how many positions are measured at a time; every measure is of one position, and they are put "
        "together in their order: it changes the memory that this takes, and of a number float64's last bit at most."
    ),
    "generate/generation.py: _Chooser._choose: -1 -> 1 (2)": (
        "The scores are those of one row, [1, vocab_size]: dimension 1 is the last."
    ),
    "check/validation.py: _lead: -1 -> 1": "The logits are [positions, tokens]: dimension 1 is the last.",
    "weights/shard_writer.py: the module: 20 -> 21": (
        "CHUNK is how many bytes are converted at a time: the bytes and their order stay."
    ),
    (
        "weights/shard_writer.py: write_shards: min(os.cpu_count() or 1, neuron_config.tp_degree) -> "
        "max(os.cpu_count() or 1, neuron_config.tp_degree)"
    ): "How many ranks are written at once: each has a file of its own, and the entries are in the ranks' order.",
    "weights/shard_writer.py: _chunks: 1 -> 2": (
        "At least two rows at a time instead of one, where a row is longer than CHUNK: the bytes and their order stay."
    ),
    (
        "weights/shard_writer.py: _chunks: columns[0] if len(columns) == 1 else torch.cat(columns, 1) -> "
        "torch.cat(columns, 1)"
    ): "Of one tensor torch.cat makes a copy with the same values.",
    "modeling_smollm3_3b.py: SmolLM3InferenceConfig.add_derived_config: 0 -> 1 (2)": (
        "A pad_token_id of 0 is then taken for one that the vocabulary has not, and 0 takes its place."
    ),
}
