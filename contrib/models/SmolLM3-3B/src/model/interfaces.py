# SPDX-License-Identifier: Apache-2.0
"""Compares what the model uses of NxD Inference with a release that has no public sources. Imports no torch.

interfaces.json records it of a release that was checked; tools/extract_interfaces.py writes that file.
"""

import functools
import importlib
import inspect
import json
import logging
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from .releases import BY_INTERFACES, installed_release, minor

RECORD = Path(__file__).with_name("interfaces.json")
logger = logging.getLogger("Neuron")


@functools.cache
def check_installed() -> None:
    """Compares the installed release with the record, where it is one that could be checked in no other way.

    Logs that once. Raises SmolLM3Error that names the first difference that matters.
    """
    release = installed_release()
    if release is None or minor(release) not in BY_INTERFACES:
        return
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, use in record["names"].items():
        difference = _difference(name, use)
        if difference:
            raise SmolLM3Error(
                f"NxD Inference {release} is installed, and {difference}, unlike in {record['release']}: this "
                "version of smollm3-neuron cannot run on it; use SDK 2.28, or a newer version"
            )
    logger.warning(
        "NxD Inference %s has no public sources: smollm3-neuron was checked against its interfaces only, which are "
        "those of %s as far as they are used",
        release,
        record["release"],
    )


def _difference(name: str, use: dict[str, Any] | None) -> str | None:
    """Returns what `use`, an entry of the record, cannot rely on, or None where it can on everything."""
    module, _, path = name.partition(":")
    try:
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return f"{module} has no {path}"
    if use is None:
        return None
    names = [parameter.name for parameter in _parameters(function)]
    missing = [given for given in use["given"] if given not in names]
    if missing:
        return f"{path} takes no {missing[0]}"
    overridden = [parameter.lstrip("*") for parameter in use.get("overridden", ())]
    if not overridden:
        return None
    if [parameter for parameter in names if parameter in overridden] != overridden:
        return f"{path} takes {', '.join(names)} in place of {', '.join(overridden)}"
    added = [parameter for parameter in names if parameter not in overridden]
    return f"{path} takes {added[0]}, too" if added and not use["open"] else None


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Lists the parameters of a function, of a method (the first one too) or of a class's __init__."""
    return list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
