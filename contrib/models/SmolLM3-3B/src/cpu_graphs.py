"""What CPU graphs compiled ahead of time need of this machine; nxd_cpu's errors as SmolLM3Error."""

from .errors import SmolLM3Error


def obstacle(tp_degree: int, weight_bytes: int) -> str | None:
    """Why they are not to be compiled; None: they can be. SmolLM3Error where torch cannot make its cache."""
    from nxd_cpu_aot import build

    try:
        return build.obstacle(tp_degree, weight_bytes)
    except OSError as error:
        raise SmolLM3Error(
            f"{error.filename}: cannot write torch's cache there ({error.strerror}); set TORCHINDUCTOR_CACHE_DIR to another folder"
        ) from None


def check_loads(artifact) -> None:
    """SmolLM3Error if they cannot be loaded here, such as those for a CPU that can do more: they are not to be kept."""
    if artifact.place == "cpu":
        from nxd_cpu_aot import run

        try:
            run.load(str(artifact.path))
        except ValueError as error:
            raise SmolLM3Error(str(error)) from None
