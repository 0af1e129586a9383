"""The mutants that no test can notice (mutate.py), by file, function and change, and why."""

EQUIVALENT: dict[str, str] = {}
