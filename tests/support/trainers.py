"""Trainers' own code, as published, run without the torch, jax or ray that their packages bring.

`make install` puts the packages into .trainers without what they depend on (tests/system/trainers/requirements.txt). Of a
file there, the classes and functions that read our rows are compiled as they stand, and nothing else of it; what they name
is given by the test. Where they make tensors, `torch` below stands in: numpy arrays with the few methods that are called.
"""

import __future__

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

PUBLISHED = Path(__file__).parent.parent.parent / ".trainers"


def load_published(path: str, *names: str, **given: Any) -> ModuleType:
    """A module of these names of a published file, a method as `Class.method`; `given` is what they need beside.

    Skips the test where the package is not installed, and fails where the file has no such name any more.
    """
    file = PUBLISHED / path
    if not file.exists():
        pytest.skip(f"{path} is not there: make install")
    body = list(_wanted(ast.parse(file.read_text()), names))
    module = ModuleType(f"published.{file.stem}")
    vars(module).update(given)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their annotations up there
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, type_ignores=[]), str(file), "exec", flags), vars(module))
    return module


def import_published(name: str, *inner: str, without: Sequence[str]) -> list[ModuleType]:
    """Inner modules of an installed package, imported without its own __init__ files, and `without` what is not there.

    Whatever these name of a module that is not there is a plain namespace. Nothing of it stays importable.
    """
    if not (PUBLISHED / name).exists():
        pytest.skip(f"{name} is not there: make install")
    given = {}
    for absent in without:
        given[absent] = ModuleType(absent)
        given[absent].__getattr__ = lambda _name: SimpleNamespace  # type: ignore[method-assign]
    for package in (name, *(f"{name}.{one}".rpartition(".")[0] for one in inner)):
        given[package] = ModuleType(package)
        given[package].__path__ = [str(PUBLISHED.joinpath(*package.split(".")))]
    with patch.dict(sys.modules, given):
        return [import_module(f"{name}.{one}") for one in inner]


def _wanted(tree: ast.Module, names: Sequence[str]) -> Iterator[ast.stmt]:
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
    """An array with a tensor's spellings."""

    def unsqueeze(self, axis: int) -> "Array":
        return np.expand_dims(self, axis).view(Array)

    def to(self, _device: str) -> "Array":
        return self

    def float(self) -> "Array":
        return self.astype(np.float32)


def _tensor(values: Any, dtype: Any = None) -> Array:
    made = np.asarray(values, dtype=dtype).view(Array)
    return made.astype(np.float32) if dtype is None and made.dtype == np.float64 else made


torch = SimpleNamespace(
    tensor=_tensor,
    ones=lambda count, dtype: np.ones(count, dtype).view(Array),
    zeros_like=lambda like, dtype=None: np.zeros(like.shape, dtype or like.dtype).view(Array),
    where=np.nonzero,
    Tensor=Array,
    long=np.int64,
    int64=np.int64,
    float32=np.float32,
    bool=np.bool_,
)
