"""All feeders by name: the written ones, and one for each public function that has a maker for each parameter."""

import ast
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any

from tests.support import fed_calls
from tests.support.fed_rollouts import growing, listed, one
from tests.support.feeding import (
    FACTS_OF_ROLLOUT,
    FEEDERS,
    FEW,
    FRAGMENTS,
    OPTIONS,
    PURE,
    ROOT,
    Work,
    many,
    text,
)
from tests.support.forests import make_choice
from tests.support.threaded import user

from proxy.protocols.dialects.base import CallIdentity, ResolvedReferences
from proxy.protocols.engines.base import StripRules
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step
from proxy.trajectory.tree import grow

# Public functions, by the types of their parameters


@cache
def _message(fragment: str, size: int) -> dict[str, Any]:
    """Return what a function may take for a message, a choice, a part or a body, with many fields and entries."""
    count = len(many(fragment, size, 512))
    calls = [{"id": fragment, "function": {"name": fragment, "arguments": fragment}}] * count
    parts = [{"type": "text", "text": fragment}] * count
    return {
        "role": "assistant", "type": "text", "content": parts, "text": text(fragment, size), "tool_calls": calls,
        "reasoning": text(fragment, size), "messages": [{"role": "user", "content": parts}] * 4, "prompt": [1] * count,
        "tools": calls, "choices": [{"index": at, "message": {"content": fragment}} for at in range(count)], "index": 0,
        "logprobs": {"content": [{"token": fragment, "logprob": -1.0}] * count}, "model": fragment, "id": fragment,
    }  # fmt: skip


def _steps(fragment: str, size: int) -> list[Step]:
    return [*one(fragment, size), *listed(fragment, size)]


_BODY = _message
MAKERS: dict[str, Callable[[str, int], Any]] = {
    "str": text,
    "str | None": text,
    "bytes": lambda fragment, size: text(fragment, size).encode(),
    "Any": _message,
    **dict.fromkeys(("Mapping[str, Any]", "Json", "Message", "dict[str, Any]", "Mapping[str, Any] | None"), _BODY),
    "Step": lambda fragment, size: listed(fragment, size)[0],
    **dict.fromkeys(("Sequence[Step]", "Iterable[Step]"), _steps),
    **dict.fromkeys(("Ids", "Prompt"), lambda _, size: array("i", [1]) * size),
    "'Prompt | Logprobs'": lambda _, size: array("i", [1]) * size,
    **dict.fromkeys(("Logprobs", "Sequence[float]", "list[float]"), lambda _, size: array("f", [-1.0]) * size),
    **dict.fromkeys(("Sequence[int]", "list[int]", "Sequence[float | None]"), lambda _, size: [1] * size),
    "Sequence[Sequence[int]]": lambda _, size: [[1]] * (size // 4),
    **dict.fromkeys(("list[Any]", "Sequence[Any]", "list[T]", "list[Json]", "Sequence[Message]"),
                    lambda fragment, size: [user(fragment)] * (size // 64)),
    **dict.fromkeys(("Sequence[str]", "Iterable[str]"), lambda fragment, size: [fragment] * (size // len(fragment))),
    "Choice": lambda _, size: make_choice(0, [1] * size),
    "Iterable[Choice]": lambda _, size: [make_choice(0, [1] * size)],
    "Returns": lambda _, size: [[float(at)] for at in range(size // 8)],
    "Tree": lambda fragment, size: grow(growing(fragment, size)),
    "int": lambda *_: 1,
    "bool": lambda *_: True,
    "DialectName": lambda *_: "chat",
    "TranslationOptions": lambda *_: OPTIONS,
    "ResolvedReferences": lambda *_: ResolvedReferences(),
    "CallIdentity": lambda *_: CallIdentity("s", 1, "m"),
    "StripRules": lambda *_: StripRules(token_ids=True, logprobs=True),
    "Container[bytes]": lambda *_: frozenset(),
    "Sequence[ThreadRule]": lambda *_: (),
    "RolloutFacts": lambda *_: FACTS_OF_ROLLOUT,
    "Options": lambda *_: Options(),
    "Mapping[str, Json]": lambda *_: {},
}  # fmt: skip
CONSTANT = {
    "path": "a",
    "kind": "vllm",
    "dialect": "chat",
    "engine": "vllm",
    "step_id": "s",
    "word": "Quartz",
    "prefix": "toolu",
    "byteorder": "little",
}


def public_functions() -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yield each public function and method of the pure packages that takes an argument: its name, itself, its annotations."""
    for package in PURE:
        for file in sorted((ROOT / "proxy" / package).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            module = import_module(name)
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    yield from _public(name, module, node)
                elif isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not _is_protocol(node):
                    owner = getattr(module, node.name)
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef):
                            yield from _public(f"{name}.{node.name}", owner, method)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def _public(owner: str, holder: Any, node: ast.FunctionDef) -> Iterator[tuple[str, Any, dict[str, str]]]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    arguments = [
        argument for argument in (*node.args.args, *node.args.kwonlyargs) if argument.arg not in ("self", "cls")
    ]
    if node.name.startswith("_") or not arguments or decorators & {"abstractmethod", "property"}:
        return
    types = {argument.arg: ast.unparse(argument.annotation) for argument in arguments if argument.annotation}
    yield f"{owner}.{node.name}", getattr(holder, node.name), types


def _fed_by_types() -> None:
    for name, function, types in public_functions():
        is_known = all(argument in CONSTANT or kind in MAKERS for argument, kind in types.items())
        if (
            isinstance(getattr(sys.modules.get(name.rpartition(".")[0]), function.__name__, None), type(lambda: 0))
            and is_known
        ):
            FEEDERS[name.removeprefix("proxy.")] = partial(_feed_by_types, function, types), _fragments_for(types)


def _fragments_for(types: dict[str, str]) -> tuple[str, ...]:
    fed = {kind for argument, kind in types.items() if argument not in CONSTANT}
    return FRAGMENTS if fed & {"str", "str | None", "bytes"} else FEW[:2]


def _feed_by_types(function: Callable[..., Any], types: dict[str, str], fragment: str, size: int) -> Work:
    given = {
        argument: CONSTANT[argument] if argument in CONSTANT else MAKERS[kind](fragment, size)
        for argument, kind in types.items()
    }

    def work() -> None:
        with suppress(Exception):
            made = function(**given)
            if isinstance(made, Iterator):
                for _ in made:
                    pass

    return work


_fed_by_types()
__all__ = ["FEEDERS", "fed_calls", "public_functions"]
