"""Writes a Flax or GGUF checkpoint as safetensors, which compile.py reads.

    python scripts/import_checkpoint.py SmolLM3-3B-Q8_0.gguf SmolLM3-3B-imported

It is read and written a few tensors at a time, so that a large checkpoint need not fit into memory.
"""

import argparse
import shlex
import time
from pathlib import Path

import common
from tqdm import tqdm

from smollm3_neuron.weights.imports.convert import import_checkpoint


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, "SOURCE FOLDER")
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a .gguf file, or a folder with a Flax or GGUF checkpoint"
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the checkpoint folder to write, which must not exist"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    began = time.perf_counter()
    with tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def on_bytes(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        done = import_checkpoint(args.source, args.folder, on_bytes)
    print(
        f"{args.folder}: {done.parameters:,} parameters in {done.tensors} tensors, {done.size / 1e9:.2f} GB, "
        f"from {done.format_name} in {time.perf_counter() - began:.1f} s"
    )
    for note in done.notes:
        print(f"note: {note}")
    print(f"\nCompile it: python scripts/compile.py --model {shlex.quote(str(args.folder))}")


if __name__ == "__main__":
    common.run(main)
