# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime's graphs compiled ahead of time: whether they are, why not, and loading them.

The compiler is the CPU runtime's own (`nxd_cpu_compiler`), which is importable once `ensure_neuronx` has chosen that
runtime; it knows when compiling pays and is possible. A device's graphs are compiled by the library itself.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error


def reason_to_keep_exported(place: str, tp_degree: int, weight_bytes: int) -> str | None:
    """Returns why the graphs for `place` are to run as they were exported, or None where they are not.

    `weight_bytes` are those of the whole checkpoint. Raises SmolLM3Error where torch cannot make its cache.
    """
    if place != "cpu":
        return None
    from nxd_cpu_compiler import build

    try:
        return build.obstacle(tp_degree, weight_bytes)
    except OSError as error:
        raise SmolLM3Error(
            f"{error.filename}: cannot write torch's cache there ({error.strerror}); set TORCHINDUCTOR_CACHE_DIR to "
            "another folder"
        ) from None


def compile_graphs(graphs: Sequence[Any], folder: Path, on_part: Callable[[int, int], None]) -> str | None:
    """Compiles the exported `graphs` into `folder`; returns why that failed, so that they are kept, or None.

    `on_part` is called with how many parts were just compiled, and of how many.
    """
    from nxd_cpu_compiler import build

    try:
        build.compile_ahead(graphs, str(folder), on_part)
    except RuntimeError as error:
        return str(error)
    return None


def note_on_products(dtype: str) -> str | None:
    """Returns a line where this CPU has no instructions for products of `dtype`, which it then computes otherwise."""
    from nxd_cpu_compiler import run

    computed_in = run.product_dtypes([dtype])[dtype]
    if computed_in == dtype:
        return None
    return f"products of {dtype} are computed in {computed_in}: this CPU has no instructions for them"


def load_graphs(folder: Path) -> list[Any] | None:
    """Returns the compiled graphs of an artifact's folder, or None where it has none.

    They are machine code: only for an artifact that this user compiled, see signature.py. Raises SmolLM3Error if they
    were compiled for a CPU that can do more than this one, or are damaged.
    """
    from nxd_cpu_compiler import run

    try:
        return run.load(str(folder))
    except ValueError as error:
        raise SmolLM3Error(str(error)) from None


def check_graphs(folder: Path) -> None:
    """Raises SmolLM3Error where `load_graphs` would for this CPU; it opens no machine code."""
    from nxd_cpu_compiler import run

    try:
        run.read_plan(str(folder))
    except ValueError as error:
        raise SmolLM3Error(str(error)) from None
