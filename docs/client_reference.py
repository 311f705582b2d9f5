"""docs/client-reference.md: the classes and methods of the Python client, from their signatures and docstrings."""

import inspect
from collections.abc import Iterator
from typing import Any

import tokentape

_OPENING = """Install the client with `pip install '.[client]'` in a clone; import each class from `tokentape`. The guide is
[The Python client](client.md); [the HTTP API](http-api.md) documents requests and responses. `AsyncClient` has every method
of `Client` as a coroutine or an async iterator; its own section lists only the methods that `Client` does not have. The
`BlockingBatch` of `Client` has the attributes of `Batch`, and `ack` and `release` without `await`.
`help(Client.batches)` shows the types and all of a method's documentation.
"""


def client_page(made: str) -> str:
    """Return docs/client-reference.md; `made` is the comment on how the page is generated."""
    parts = [f"# The client's classes\n\n{made}{_OPENING}"]
    known: set[str] = set()
    for name in (
        "Client",
        "AsyncClient",
        "Batch",
        "ClientError",
        "ManagedServer",
        "InexactStep",
        "ManagedServerAdapter",
        "SequenceNode",
    ):
        kind = getattr(tokentape, name)
        methods = {inner: member for inner, member in _members(kind) if name != "AsyncClient" or inner not in known}
        if name == "Client":
            known = set(methods)
        listed = [_method(inner, member) for inner, member in methods.items()]
        parts.append(
            "\n".join(
                [f"## {name}\n", f"`{name}{_signature(kind)}`\n", _docstring(kind), *listed, *([""] if listed else [])]
            )
        )
    return "\n".join(parts)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)) and inspect.getdoc(member):
            yield name, member


def _method(name: str, member: Any) -> str:
    first = " ".join((inspect.getdoc(member) or "").partition("\n\n")[0].split())
    if isinstance(member, property):
        return f"- `{name}`: {first}"
    awaited = "await " if inspect.iscoroutinefunction(member) else ""
    return f"- `{awaited}{name}{_signature(member)}`: {first}"


def _signature(function: Any) -> str:
    """Return the arguments with their defaults, without `self` and types."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _docstring(thing: Any, indent: str = "") -> str:
    """Return a docstring with all lines but the first indented."""
    text = inspect.getdoc(thing) or ""
    return (
        "\n".join(f"{indent}{line}" if line and number else line for number, line in enumerate(text.splitlines()))
        + "\n"
    )
