# SPDX-License-Identifier: Apache-2.0
"""Exported programs read as data.

torch.export.load would unpickle members of the archive, open shared libraries in it, evaluate the text of symbolic
sizes and call whatever function a node names. So the archive is checked and written anew with what was checked: the
program's JSON, which may call operators only, and plain tensors.
"""

import functools
import io
import json
import re
import threading
import typing
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._export.serde import schema
from torch.export import ExportedProgram

_MEMBERS = re.compile(
    r"archive/(archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|models/model\.json"
    r"|data/(weights/model_weights_config\.json|constants/model_constants_config\.json|constants/tensor_\d+"
    r"|sample_inputs/model\.pt))"
)
_PROGRAM, _EXAMPLES = "archive/models/model.json", "archive/data/sample_inputs/model.pt"
_CONFIGS = ("archive/data/weights/model_weights_config.json", "archive/data/constants/model_constants_config.json")
# a name like __class__ is Python's, but for the few that ATen has, such as a mask's __and__
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|nxd_cpu)\.((?!__)\w+|__(and|or|xor|lshift|rshift)__)\.(?!__)\w+|_operator\.getitem"
)
_REFUSED_OPERATORS = ("torch.ops.aten.from_file.",)  # it opens, and may make, the file that it is given
_NAME = re.compile(r"([A-Za-z_][\w.]*)?")  # torch writes names into the code that runs the graph
_PATTERNS = {"torch_version": re.compile(r"[\w.+-]+"), "as_float": re.compile(r"NaN|-?Infinity")}
_KINDS = {
    "as_bool", "as_bools", "as_device", "as_float", "as_floats", "as_int", "as_ints", "as_layout", "as_memory_format",
    "as_none", "as_optional_tensor", "as_optional_tensors", "as_scalar_type", "as_string", "as_tensor", "as_tensors",
}  # fmt: skip
_EMPTY = ("metadata", "guards_code", "range_constraints", "treespec_namedtuple_fields")  # torch imports what they name
_LOADING = threading.Lock()
_SPECS, _SPEC_TYPES = ("in_spec", "out_spec"), (None, "builtins.tuple", "builtins.list", "builtins.dict")


def load_program(archive: bytes) -> ExportedProgram:
    """The program that `torch.export.save` wrote. ValueError if it holds more than operators and plain tensors."""
    safe = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(safe, "w") as checked:
            names = given.namelist()
            _check(len(set(names)) == len(names), "two members of one name")
            for name in names:
                _check(_MEMBERS.fullmatch(name), f"a member {name!r}")
                checked.writestr(name, _checked_member(name, given.read(name)))
    except (zipfile.BadZipFile, NotImplementedError, RecursionError) as error:
        raise ValueError(f"its archive is damaged: {error}") from error
    safe.seek(0)
    with _LOADING, _hints_read_once():
        return torch.export.load(safe)


@contextmanager
def _hints_read_once() -> Iterator[None]:
    """Keeps the type hints of torch's schema: torch's loader reads them again for every node, half of its time."""
    read = typing.get_type_hints
    of_schema = functools.cache(lambda cls: read(cls, globalns=vars(schema)))

    def get_type_hints(obj: Any, globalns: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if globalns is vars(schema) and not args and not kwargs:
            return of_schema(obj)
        return read(obj, globalns, *args, **kwargs)

    typing.get_type_hints = get_type_hints
    try:
        yield
    finally:
        typing.get_type_hints = read


def _checked_member(name: str, content: bytes) -> bytes:
    if name == _EXAMPLES:
        _check(not content, "example inputs, which torch would unpickle")
    if name == _PROGRAM or name in _CONFIGS:
        value = json.loads(content)
        _check_program(value) if name == _PROGRAM else _check_config(value)
        return json.dumps(value).encode()
    return content


def _check_config(config: Any) -> None:
    """Payloads are plain tensors."""
    for payload in config["config"].values():
        _check(payload.get("use_pickle") is False, "a tensor that torch would unpickle")
        _check(re.fullmatch(r"tensor_\d+", payload["path_name"]), f"a payload {payload['path_name']!r}")
        _check_program(payload)


def _check_program(value: Any, key: str = "") -> None:
    """Walks the JSON of a program, in which `value` stands under `key`."""
    if key in _EMPTY:
        _check(not value, f"{key} {value!r}")
    elif key in _SPECS:
        _check_spec(json.loads(value)[1])
    elif isinstance(value, dict):
        if key == "nodes":
            called = str(value["target"])
            _check(_OPERATOR.fullmatch(called) and not called.startswith(_REFUSED_OPERATORS), f"a call of {called}")
        for name, inner in value.items():
            _check(_NAME.fullmatch(name), f"a name {name!r}")
            _check(not name.startswith("as_") or name in _KINDS, f"an argument {name}")
            _check_program(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_program(inner, key)
    elif isinstance(value, str):
        _check(_PATTERNS.get(key, _NAME).fullmatch(value), f"a name {value!r}")


def _check_spec(spec: dict) -> None:
    """Which containers arguments come in: torch would import the types that others name."""
    _check(spec["type"] in _SPEC_TYPES and spec["context"] in (None, "null", "[]"), f"a container {spec}")
    for inner in spec["children_spec"]:
        _check_spec(inner)


def _check(good: Any, what: str) -> None:
    if not good:
        raise ValueError(f"it holds {what[:200]}, which the CPU runtime never writes and does not run")
