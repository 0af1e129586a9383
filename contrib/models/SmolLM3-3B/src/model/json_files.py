# SPDX-License-Identifier: Apache-2.0
"""The one reader of JSON files. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error


def read_json(path: Path, instead: str = "download it again") -> Any:
    """Returns what a JSON file holds.

    Raises SmolLM3Error for a file that cannot be read or is not JSON, which has no NaN and no infinity; `instead` says
    what to do about it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise SmolLM3Error(f"{path}: cannot be read ({error.strerror}); {instead}") from None
    except UnicodeDecodeError:
        raise SmolLM3Error(f"{path}: not valid JSON (it is not UTF-8), so it is damaged; {instead}") from None
    except RecursionError:
        raise SmolLM3Error(f"{path}: not valid JSON (it is nested too deep), so it is damaged; {instead}") from None
    except ValueError as error:
        raise SmolLM3Error(f"{path}: not valid JSON ({error}), so it is damaged; {instead}") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
