# SPDX-License-Identifier: Apache-2.0
"""SmolLM3-3B on AWS Trainium 1 and Inferentia 2 with NxD Inference. Importing this package imports no torch."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["NeuronSmolLM3ForCausalLM", "SmolLM3InferenceConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the model file when one of its classes is asked for: torch and NxD Inference come with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import modeling_smollm3_3b

    return getattr(modeling_smollm3_3b, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
