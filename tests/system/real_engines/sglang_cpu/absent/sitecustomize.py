"""Modules in place of two packages that SGLang 0.5.23 imports, and that only its GPU and image code uses.

Python runs this file at its start if PYTHONPATH has the file's folder, in SGLang's child processes too. Any attribute of
these modules is a class that can be derived from, called and used as a decorator. SGLang itself is unchanged.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ABSENT = ("sgl_kernel", "torchvision")


def unknown(name):
    # Python looks up __wrapped__ and the like to learn what an object is.
    if name.startswith("__"):
        raise AttributeError(name)
    return Unknown


class _Attributes(type):
    def __getattr__(cls, name):
        return unknown(name)


class Unknown(metaclass=_Attributes):
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return unknown(name)

    def __call__(self, *args, **kwargs):
        """Return the function that this decorates."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class AbsentModule(ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        return unknown(name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
