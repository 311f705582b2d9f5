"""docs/formats.md: every export format with the fields of its rows and their types, out of the formats themselves."""

import sys
from collections.abc import Iterator

from proxy.export import FORMATS, Format
from proxy.export.base import Batched, Column, Fill
from proxy.export.containers import CONTAINERS

_OPENING = """`GET /rollouts/{id}/export?format=…` gives the rows of one rollout in any of these formats. All are views of
`sequences`, the canonical row, or of `steps`: nothing is re-tokenized, padded or filled but where a format says so. What a
format cannot say is refused with 409 and the reason, or, among many rollouts, left out and told in the report; it is never
bent. A field that is not there, or null, was not known.

A *batch* is an object of lists with one entry a row: a group is one such object. Of other formats, a group is the list of
its rows, unless it says otherwise.
"""


def formats_page(made: str) -> str:
    """The page."""
    sections = "\n".join("\n".join(_format(form)) for form in FORMATS.values())
    return f"# Export formats\n\n{made}{_OPENING}\n{sections}\n" + "\n".join(_containers()) + "\n"


def _format(form: Format) -> Iterator[str]:
    kind = type(form)
    about = (sys.modules[kind.__module__].__doc__ or "").strip()
    yield f"## `{form.name}`\n"
    yield f"{about}\n"
    yield f"{_text(kind.__doc__)}{' A batch.' if isinstance(form, Batched) else ''}\n"
    yield "| field | type |\n|---|---|"
    for name, column in form.columns.items():
        yield f"| `{name}` | {_type(column)} |"
    yield ""


def _containers() -> Iterator[str]:
    yield "## Containers\n"
    yield "By `container=`, or by `Accept`. In the columns of `parquet` and `arrow`, fields of type json are JSON text.\n"
    yield "| container | content type | what it is |\n|---|---|---|"
    for name, container in CONTAINERS.items():
        yield f"| `{name}` | `{container.content_type}` | {_text(type(container).__doc__)} |"
    yield f"\n## Fills\n\n{_text((Fill.__doc__ or '').partition(' `decode`')[0])}"


def _text(doc: str | None) -> str:
    return " ".join((doc or "").split())


def _type(column: Column) -> str:
    if isinstance(column, list):
        return f"[{_type(column[0])}]"
    if isinstance(column, dict):
        return "{" + ", ".join(f"{name}: {_type(inner)}" for name, inner in column.items()) + "}"
    return column
