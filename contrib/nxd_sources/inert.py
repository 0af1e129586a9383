# SPDX-License-Identifier: Apache-2.0
"""Importable stand-ins for what is imported but never called on the compile path.

Their attributes are inert classes, good for subclassing, annotations and decorating; calling one raises, so that a path
that needs the closed part fails loudly.
"""

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

Modules = dict[str, dict[str, Any]]  # attributes by module name


class Inert(type):
    __iter__ = None  # or Python would ask __getitem__ for ever

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(f"{cls.__name__}.{name}")

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def inert(name: str) -> type:
    def new(cls, *args, **kwargs):
        bare_decorator = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type)
        return args[0] if bare_decorator else object.__new__(cls)

    def call(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator with arguments, made by new
        raise RuntimeError(f"{name} belongs to the closed Neuron SDK, and nothing stands in for it here")

    def attribute(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return inert(f"{name}.{attribute}")

    return Inert(
        name,
        (),
        {
            "__new__": new,
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": call,
            "__getattr__": attribute,
            "__getitem__": lambda self, item: inert(f"{name}[]"),
            "__iter__": None,
        },
    )


class Module(types.ModuleType):
    __version__ = "2.9.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if self.__spec__.loader.stands_for(full_name):  # `from package import module` asks here before it imports
            return importlib.import_module(full_name)
        value = inert(full_name)
        setattr(self, name, value)
        return value


class Finder:
    """Imports every module below `roots`: with the attributes that `modules` has for it, inert ones for the rest.

    `modules` may be a function that returns them, which is called when the first module is imported.
    """

    def __init__(self, roots: Iterable[str], modules: Modules | Callable[[], Modules]):
        self.roots, self._modules = tuple(roots), modules

    @functools.cached_property
    def modules(self) -> Modules:
        return self._modules() if callable(self._modules) else self._modules

    def stands_for(self, name: str) -> bool:
        """Whether this is a module that is stood in for, or a package that has one."""
        return any(module == name or module.startswith(f"{name}.") for module in self.modules)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        module.__dict__.update(self.modules.get(module.__name__, {}))


def install(roots: tuple[str, ...], modules: Modules) -> list[str]:
    """Makes those of `roots` importable that are not installed; returns them."""
    missing = [name for name in roots if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder(missing, modules))
    return missing
