"""What the commands share: arguments with the same meaning, errors as one line."""

import argparse
import sys
from pathlib import Path

try:
    from smollm3_neuron.errors import SmolLM3Error
except ModuleNotFoundError:
    sys.exit("smollm3_neuron is not installed: run `pip install -e .` in the checkout (on a Neuron machine with --no-deps)")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="neuron, cpu, or auto: the device where the Neuron SDK is installed (default: auto)"
    )


def check_outputs(*paths: Path | None) -> None:
    """Before the work: SmolLM3Error for a file that could not be written after it."""
    for path in paths:
        if path and not path.absolute().parent.is_dir():
            raise SmolLM3Error(f"{path}: no such folder; name a file in one that exists")


def run(main) -> None:
    """Runs a command; a mistake of the user's is one line and exit code 2."""
    try:
        main()
    except SmolLM3Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
