"""The CPU runtime's graphs compiled ahead of time: whether they are, why not, and loading them.

The compiler is the CPU runtime's own (`nxd_cpu_compiler`), which is importable once `ensure_neuronx` has chosen that runtime.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error


def reason_to_keep_exported(tp_degree: int, weight_bytes: int) -> str | None:
    """Why the exported graphs are not to be compiled ahead of time; None: they can be.

    Raises SmolLM3Error where torch cannot make its cache.
    """
    from nxd_cpu_compiler import build

    try:
        return build.obstacle(tp_degree, weight_bytes)
    except OSError as error:
        raise SmolLM3Error(
            f"{error.filename}: cannot write torch's cache there ({error.strerror}); set TORCHINDUCTOR_CACHE_DIR to another "
            "folder"
        ) from None


def compile_graphs(graphs: Sequence[Any], folder: Path, on_part: Callable[[int, int], None]) -> str | None:
    """Compiles the exported `graphs` into `folder`; returns why that failed, or None where it did not."""
    from nxd_cpu_compiler import build

    try:
        build.compile_ahead(graphs, str(folder), on_part)
    except RuntimeError as error:
        return str(error)
    return None


def load_graphs(folder: Path) -> list[Any] | None:
    """The compiled graphs of an artifact's folder; None where there are none.

    Raises SmolLM3Error if they were compiled for a CPU that can do more than this one, or are damaged.
    """
    from nxd_cpu_compiler import run

    try:
        return run.load(str(folder))
    except ValueError as error:
        raise SmolLM3Error(str(error)) from None
