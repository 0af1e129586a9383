"""Stand-ins for the closed parts of the Neuron SDK, so that the open NxD and NxDI sources can be imported.

What each stands for:

    torch_xla      the XLA device and its operations          torch_neuronx  tracing, and the runtime's tensors
    neuronxcc      the compiler, and NKI inside it            nki, nkilib    the kernel language and its library
    libneuronxla   the compiler's driver                      torchvision    image models; only where it is missing

The library's CPU mode calls none of them: they only have to import. Their attributes are inert classes, good for
subclassing, annotations and decorating. An instance of one can be made (module bodies do that), but calling it
raises, so a path that needs the device fails loudly instead of returning nonsense.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

CLOSED = ("torch_neuronx", "torch_xla", "neuronxcc", "nki", "nkilib", "libneuronxla", "torchvision")


class _Inert(type):
    def __getattr__(cls, name):
        return _inert(f"{cls.__name__}.{name}", name)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def _new(cls, *args, **kwargs):
    bare_decorator = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type)
    return args[0] if bare_decorator else object.__new__(cls)


def _call(self, *args, **kwargs):
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]  # a decorator with arguments, made by _new
    raise RuntimeError(f"{type(self).__name__} belongs to the closed Neuron SDK: CPU mode must not call it")


def _inert(full_name, attribute):
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Inert(full_name, (), {
        "__new__": _new,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": _call,
        "__getattr__": lambda self, name: _inert(f"{full_name}.{name}", name),
        "__getitem__": lambda self, item: _inert(f"{full_name}[]", ""),
    })


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "2.9.0"  # the sources compare torch_xla's

    def __getattr__(self, name):
        value = _inert(f"{self.__name__}.{name}", name)
        setattr(self, name, value)
        return value


class _Finder:
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        if module.__name__ in ("torch_neuronx.utils", "torch_neuronx.utils.utils"):
            module.get_platform_target = lambda: "trn1"  # the sources ask while they are imported


class _TorchClasses:
    def __getattr__(self, name):
        return type(name, (), {})


def install():
    """Make the closed modules importable, except those that are installed, and put NxD in CPU mode."""
    os.environ["NXD_CPU_MODE"] = "1"
    sys.meta_path.append(_Finder({name for name in CLOSED if importlib.util.find_spec(name) is None}))

    import torch

    torch.classes.neuron = _TorchClasses()
