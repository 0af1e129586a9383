# SPDX-License-Identifier: Apache-2.0
"""The releases of NxD Inference that this package was checked against. Imports no torch."""

import importlib.metadata

from ..errors import SmolLM3Error

CHECKED = ("0.7", "0.8", "0.9")  # SDK 2.27, 2.28 and 2.29, on their public sources
BY_INTERFACES = {"0.10": "0.9"}  # SDK 2.31, which has none; what holds for the other holds for it, see interfaces.py
SUPPORTED_NXDI = (*CHECKED, *BY_INTERFACES)


def installed_release() -> str | None:
    """Returns the version of the installed NxD Inference, or None where no package says one."""
    try:
        return importlib.metadata.version("neuronx-distributed-inference")
    except importlib.metadata.PackageNotFoundError:
        return None


def minor(version: str) -> str:
    """Returns the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def check_nxdi(version: str) -> None:
    """Raises SmolLM3Error for a version of NxD Inference that this package does not support."""
    if minor(version) not in SUPPORTED_NXDI:
        raise SmolLM3Error(
            f"NxD Inference {version} is installed, supported are {', '.join(SUPPORTED_NXDI)}: use SDK 2.31 or 2.28 on "
            "trn1 and inf2"
        )
