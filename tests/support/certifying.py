"""A suite of `tokentape certify` in front of an engine, for single shapes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.cli.certify.access import access_to
from proxy.cli.certify.certificate import Cell
from proxy.cli.certify.shapes import SHAPES
from proxy.cli.certify.suite import Suite, make_suite
from proxy.config.settings import load

LIMIT_S = 100.0


@asynccontextmanager
async def suite_of(url: str, *, model: str | None = None, limit_s: float = LIMIT_S) -> AsyncIterator[Suite]:
    """Yield a suite, with its proxy and an engine that has been identified."""
    async with access_to(load(), url, None, limit_s) as access:
        yield await make_suite(access, model, tolerance=0.01)


async def run_shape(suite: Suite, name: str, *, stream: bool = False) -> Cell:
    """Run the shape with this name."""
    kind = suite.kind
    (shape,) = (shape for shape in SHAPES if shape.name == name and shape.is_for(kind))
    return await suite.result(suite.run(shape, stream=stream))


def results_of(certificate: dict[str, Any]) -> list[str]:
    """Return the results in the JSON of a certificate as lines, without dates, times and differences of logprobs."""
    return [
        f"{row['topic']}, {row['name']}, {mode}: {' '.join([row[mode]['verdict'], *row[mode]['problems']])}"
        for row in certificate["rows"]
        for mode in ("whole", "streamed")
        if row[mode] is not None
    ]
