"""docs/client-reference.md: every class and method of the Python client, out of its signatures and docstrings."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import tokentape

_OPENING = """`from tokentape import …`, after `pip install 'tokentape[client]'`. How they are used is told in
[client.md](client.md), what the routes behind them take and answer in [api.md](api.md). `AsyncClient` has the methods of
`Client`, awaited; below it stand only those that `Client` has not.
"""


def client_page(made: str) -> str:
    """The page."""
    parts = [f"# The client's classes\n\n{made}{_OPENING}"]
    known: set[str] = set()
    for name in (
        "Client",
        "AsyncClient",
        "Batch",
        "ClientError",
        "ManagedServer",
        "ManagedServerAdapter",
        "SequenceNode",
    ):
        kind = getattr(tokentape, name)
        methods = {inner: member for inner, member in _members(kind) if name != "AsyncClient" or inner not in known}
        if name == "Client":
            known = set(methods)
        lines = [f"## {name}\n", _told(kind), *(_method(inner, member) for inner, member in methods.items())]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)) and inspect.getdoc(member):
            yield name, member


def _method(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"- `{name}`\n  {_told(member, indent='  ')}"
    signature = str(inspect.signature(member)).replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", signature)  # names without their modules
    signature = re.sub(r"'([A-Z]\w+)'", r"\1", signature)
    awaited = "await " if inspect.iscoroutinefunction(member) else ""
    return f"- `{awaited}{name}{signature}`\n  {_told(member, indent='  ')}"


def _told(thing: Any, indent: str = "") -> str:
    """A docstring as a paragraph, line by line."""
    text = inspect.getdoc(thing) or ""
    return (
        "\n".join(f"{indent}{line}" if line and number else line for number, line in enumerate(text.splitlines()))
        + "\n"
    )
