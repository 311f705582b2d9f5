"""A collector of traces on a real socket: it parses OTLP requests, and notes the spans and the raw bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.listening import listening


class Collector:
    """`status`: the response to the next requests; None never responds."""

    def __init__(self) -> None:
        self.url = ""
        self.status: int | None = 200
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.spans: list[SimpleNamespace] = []
        self.resources: list[dict] = []
        self.scopes: list[str] = []
        self._received = asyncio.Event()
        self._stopping = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(body)
        if self.status is None:
            self._received.set()
            await self._stopping.wait()
            return web.Response(status=503)
        if self.status == 200:
            self.keep(ExportTraceServiceRequest.FromString(body))
        self._received.set()
        return web.Response(status=self.status, content_type="application/x-protobuf")

    def keep(self, request: ExportTraceServiceRequest) -> None:
        """Note the spans of a request."""
        for resource in request.resource_spans:
            self.resources.append(_attributes(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.scopes.append(scope.scope.name)
                self.spans += map(_span, scope.spans)

    async def wait_for_request(self) -> None:
        """Return once a request has arrived."""
        async with asyncio.timeout(50):
            await self._received.wait()

    def named(self, name: str) -> list[SimpleNamespace]:
        """Return the spans with a name, by start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start)

    def one(self, name: str) -> SimpleNamespace:
        """Return the only span with a name."""
        (span,) = self.named(name)
        return span


def _span(span) -> SimpleNamespace:
    return SimpleNamespace(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        status=span.status.code,
        description=span.status.message,
    )


def _attributes(found) -> dict:
    return {pair.key: _value(pair.value) for pair in found}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Run a collector that speaks OTLP over HTTP."""
    collector = Collector()
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/traces", collector.handle)
    async with listening(app) as collector.url:
        try:
            yield collector
        finally:
            collector._stopping.set()
