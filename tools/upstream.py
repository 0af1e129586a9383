"""Copies the part of the model's folder that a pull request to NxD Inference's contrib folder would carry.

    python tools/upstream.py NXDI_CHECKOUT/contrib/models/SmolLM3-3B

The part works alone: with nothing else of this repository, in a checkout of NxD Inference. What it leaves out is what
this project puts around the model: artifacts, machines, chat, vLLM, the streaming sharder and the deeper checks.
"""

import argparse
import shutil
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "contrib" / "models" / "SmolLM3-3B"
PART = (
    "README.md",
    "src/__init__.py",
    "src/errors.py",
    "src/modeling_smollm3_3b.py",
    "src/model",
    "src/weights/__init__.py",
    "src/weights/checkpoint.py",
    "src/weights/files.py",
    "src/weights/padding.py",
    "src/weights/projections.py",
    "src/weights/rank_layout.py",
    "src/weights/quantization.py",
    # a `lora_config` is checked by them
    "src/weights/adapter.py",
    "src/weights/digests.py",
    "src/weights/lazy_rows.py",
    "src/generate/__init__.py",
    "src/generate/blocks.py",
    "src/generate/generation.py",
    "src/generate/sampling.py",
    "src/generate/speculation.py",
    "src/generate/turns.py",
    "src/check/__init__.py",
    "src/check/altered_reference.py",
    "src/check/drift.py",
    "src/check/prompts.py",
    "src/check/reference.py",
    "src/check/streamed_reference.py",
    "src/check/validation.py",
    "test/conftest.py",
    "test/integration",
    "test/tiny",
    "test/unit/test_checkpoint.py",
    "test/unit/test_generation.py",
    "test/unit/test_model_config.py",
    "test/unit/test_rank_layout.py",
    "test/unit/test_rope.py",
    "test/unit/test_switches.py",
)

# the contrib models' tests are packages; here that would give two modules the name `test.conftest`
EMPTY = ("test/__init__.py", "test/integration/__init__.py", "test/unit/__init__.py")


def copy_part(folder: Path) -> None:
    """Writes the part to `folder`, which must not exist yet."""
    for name in PART:
        source, target = MODEL / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    for name in EMPTY:
        (folder / name).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the part is written")
    folder = parser.parse_args().folder
    if folder.exists():
        sys.exit(f"error: {folder} is there already: name a folder that does not exist yet")
    copy_part(folder)
    print(f"{folder}: {sum(path.is_file() for path in folder.rglob('*'))} files")


if __name__ == "__main__":
    main()
