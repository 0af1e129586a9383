"""The CPU runtime's graphs compiled ahead of time to machine code, by torch's AOTInductor and the C++ compiler.

A graph is cut into parts, one per layer (cut.py), and of parts that are the same one is compiled (build.py): as many as there
are kinds of layers, whatever the depth. Weights and caches stay inputs (run.py), so that all parts share the mapped shard file.
"""

from ..errors import SmolLM3Error


def obstacle(tp_degree: int, weight_bytes: int) -> str | None:
    """Why they are not to be compiled; None: they can be. SmolLM3Error where torch cannot make its cache."""
    from . import build

    try:
        return build.obstacle(tp_degree, weight_bytes)
    except OSError as error:
        raise SmolLM3Error(
            f"{error.filename}: cannot write torch's cache there ({error.strerror}); set TORCHINDUCTOR_CACHE_DIR to another folder"
        ) from None


def check_loads(artifact) -> None:
    """SmolLM3Error if they cannot be loaded here, such as those for a CPU that can do more: they are not to be kept."""
    if artifact.place == "cpu":
        from . import run

        try:
            run.load(str(artifact.path))
        except ValueError as error:
            raise SmolLM3Error(str(error)) from None
