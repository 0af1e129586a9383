# SPDX-License-Identifier: Apache-2.0
"""The one reader of JSON files. Imports no torch."""

import json
import math
import re
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that stands for half a character


def read_json(path: Path, instead: str = "download it again", any_number: bool = False) -> Any:
    """Returns what a JSON file holds; with `any_number` NaN and infinity, too, as Python writes them.

    Raises SmolLM3Error for a file that cannot be read or is not JSON, which has no NaN and no infinity, and for numbers
    and characters in it that cannot be written again; `instead` says what to do about it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if any_number else parse_json(text)
    except OSError as error:
        raise SmolLM3Error(f"{path}: cannot be read ({error.strerror}); {instead}") from None
    except UnicodeEncodeError:
        raise SmolLM3Error(f"{path}: not valid JSON (half a character is in it), so it is damaged; {instead}") from None
    except UnicodeDecodeError:
        raise SmolLM3Error(f"{path}: not valid JSON (it is not UTF-8), so it is damaged; {instead}") from None
    except RecursionError:
        raise SmolLM3Error(f"{path}: not valid JSON (it is nested too deep), so it is damaged; {instead}") from None
    except ValueError as error:
        raise SmolLM3Error(f"{path}: not valid JSON ({error}), so it is damaged; {instead}") from None


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError as `read_json` says."""
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a half without its other half
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is too large for a number")
    return number


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
