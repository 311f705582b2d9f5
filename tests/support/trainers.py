"""Trainers' published code, run without the torch, jax or ray that their packages depend on.

`make install` installs the packages into .trainers without dependencies (tests/system/trainers/requirements.txt). Only
the classes and functions that read our rows are compiled; the test supplies the names that they use. `torch` below
makes numpy arrays with the few tensor methods that they call.
"""

import __future__

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

PUBLISHED = Path(__file__).parent.parent.parent / ".trainers"


def load_published(path: str, *names: str, **names_used: Any) -> ModuleType:
    """Return a module with these names of a published file, a method as `Class.method`; `names_used` are those that they
    use.

    Skips the test if the package is not installed; fails if the file does not define a name any more.
    """
    file = PUBLISHED / path
    if not file.exists():
        _skip(path)
    body = list(_definitions(ast.parse(file.read_text()), names))
    module = ModuleType(f"published.{file.stem}")
    vars(module).update(names_used)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up their annotations there
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, type_ignores=[]), str(file), "exec", flags), vars(module))
    return module


def import_published(name: str, *inner: str, without: Sequence[str]) -> list[ModuleType]:
    """Import modules of an installed package without its __init__ files, and without the modules in `without`.

    Missing modules are replaced by plain namespaces. Nothing stays importable.
    """
    if not (PUBLISHED / name).exists():
        _skip(name)
    modules = {}
    for absent in without:
        modules[absent] = ModuleType(absent)
        modules[absent].__getattr__ = lambda _name: SimpleNamespace  # type: ignore[method-assign]
    for package in (name, *(f"{name}.{module}".rpartition(".")[0] for module in inner)):
        modules[package] = ModuleType(package)
        modules[package].__path__ = [str(PUBLISHED.joinpath(*package.split(".")))]
    with patch.dict(sys.modules, modules):
        return [import_module(f"{name}.{module}") for module in inner]


def _skip(name: str) -> None:
    import pytest  # the trainers' own Python does not have it

    pytest.skip(f"{name} does not exist: run make install")


def _definitions(tree: ast.Module, names: Sequence[str]) -> Iterator[ast.stmt]:
    for name in names:
        scope: Any = tree
        for part in name.split("."):
            scope = next(node for node in scope.body if part in _names(node))
        yield scope


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else set()


class Array(np.ndarray):
    """An array with a tensor's interface."""

    def unsqueeze(self, axis: int) -> "Array":
        return np.expand_dims(self, axis).view(Array)

    def to(self, _device: str) -> "Array":
        return self

    def float(self) -> "Array":
        return self.astype(np.float32)

    def sum(self, axis: Any = None, *, dim: Any = None, **options: Any) -> Any:
        return super().sum(axis if dim is None else dim, **options)

    def size(self, axis: int) -> int:  # type: ignore[override]
        return self.shape[axis]

    def tile(self, counts: Sequence[int]) -> "Array":
        return np.tile(self, counts).view(Array)

    def bool(self) -> "Array":
        return self.astype(np.bool_)

    @property
    def device(self) -> str:
        return "cpu"


def _tensor(values: Any, dtype: Any = None) -> Array:
    made = np.asarray(values, dtype=dtype).view(Array)
    return made.astype(np.float32) if dtype is None and made.dtype == np.float64 else made


class _NoGradients(nullcontext, ContextDecorator):
    """`torch.no_grad()`, as a context manager and as a decorator."""


torch = SimpleNamespace(
    tensor=_tensor,
    ones=lambda count, dtype: np.ones(count, dtype).view(Array),
    zeros_like=lambda like, dtype=None: np.zeros(like.shape, dtype or like.dtype).view(Array),
    where=np.where,
    no_grad=_NoGradients,
    zeros=lambda count, device: np.zeros(count).view(Array),
    stack=lambda tensors: np.stack(tensors).view(Array),
    mean=lambda tensor: np.mean(np.asarray(tensor)),
    std=lambda tensor: np.std(np.asarray(tensor), ddof=1),
    rsqrt=lambda value: 1 / np.sqrt(value),
    Tensor=Array,
    long=np.int64,
    int64=np.int64,
    float32=np.float32,
    bool=np.bool_,
)
