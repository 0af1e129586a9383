"""The releases of NxD Inference that this package was checked against. Imports no torch."""

import importlib.metadata

from ..errors import SmolLM3Error

SUPPORTED_NXDI = ("0.7", "0.8", "0.9")  # SDK 2.27, 2.28 (the one to be on with trn1 and inf2), 2.29


def installed_release() -> str | None:
    """Returns the version of the installed NxD Inference, or None where no package says one."""
    try:
        return importlib.metadata.version("neuronx-distributed-inference")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_nxdi(version: str) -> None:
    """Raises SmolLM3Error for a version of NxD Inference that this package was not checked against."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED_NXDI:
        raise SmolLM3Error(
            f"NxD Inference {version} is installed, supported are {', '.join(SUPPORTED_NXDI)}: use SDK 2.28 on trn1 "
            "and inf2"
        )
