"""The export of OpenTelemetry spans to a collector: in batches, by a thread, without a delay of calls.

It is imported only if traces are exported, since its packages are optional.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, Tracer

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics

NAME: Final = "tokentape"  # of the service and of the instrumentation
MAX_PENDING_SPANS: Final = 8192  # 2 to 3 kB each without content
_MAX_BATCH_WITH_CONTENT: Final = 16  # at most 2 MB: a gRPC server accepts 4 MiB by default
_MAX_PENDING_WITH_CONTENT: Final = 512
_FLUSH_TIMEOUT_S: Final = 5
_SDK_LOG: Final = logging.getLogger("opentelemetry")


class Tracing:
    """The export of spans. Call `close` at the end, after the last call."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics, *, content: bool) -> None:
        self._log = _OutageLog()
        self._log.attach()
        exports = _Exports(exporter, metrics, self._log)
        self._spans = _PendingSpans(exports, metrics, content=content)
        # The OTEL_* variables set the sampler and the limits of spans.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._spans)
        self.tracer: Tracer = self._provider.get_tracer(NAME, version(NAME))

    def root(self, name: str, key: str) -> SpanContext:
        """Return the span above all calls with this key: the same in every process, with the sampler's decision."""
        digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=24).digest()
        trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        decision = self._provider.sampler.should_sample(Context(), trace_id, name).decision
        flags = TraceFlags.SAMPLED if decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))

    def end_root(
        self, name: str, key: str, start_ms: int, end_ms: int, attributes: dict[str, Any], error: str | None
    ) -> None:
        """Export the span of `root`, if it is sampled. Call it once for each key."""
        self._spans.on_end(
            ReadableSpan(
                name,
                self.root(name, key),
                resource=self._provider.resource,
                attributes=attributes,
                status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR, error),
                start_time=1_000_000 * start_ms,
                end_time=1_000_000 * end_ms,
                instrumentation_scope=InstrumentationScope(NAME, version(NAME)),
            )
        )

    async def close(self) -> None:
        """Export the spans that are left, within five seconds."""
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: this took too long
                loop.call_soon_threadsafe(is_done.set)

        # A daemon: the process ends even if the collector does not respond.
        threading.Thread(target=shut_down, name="export of spans", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await is_done.wait()
        self._log.detach()
        if left := self._spans.pending:
            LOG.warning("%d spans were not exported before the end of the process", left)


def start_tracing(endpoint: str, protocol: str, metrics: Metrics, *, content: bool) -> Tracing:
    """Start the export to a collector.

    The OTEL_EXPORTER_OTLP_* variables set headers, timeout, compression and certificates. Raises ImportError if the package
    of the protocol is not installed.
    """
    return Tracing(_exporter(endpoint, protocol), metrics, content=content)


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        return Grpc(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    path = urlsplit(endpoint).path
    return Http(endpoint=endpoint if path not in {"", "/"} else f"{endpoint.rstrip('/')}/v1/traces")


def _resource() -> Resource:
    """Return the description of this process, which OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override."""
    own: dict[str, Any] = {"service.name": NAME, "service.version": version(NAME)}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


class _OutageLog(logging.Handler):
    """Logs the first error of the SDK in each outage, and drops the following ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_out = False

    def attach(self) -> None:
        """Receive the SDK's log instead of standard error."""
        _SDK_LOG.addHandler(self)
        _SDK_LOG.propagate = False

    def detach(self) -> None:
        """Leave the SDK's log as it was."""
        _SDK_LOG.removeHandler(self)
        _SDK_LOG.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record if it is the first one of an outage."""
        self.failed(record.getMessage())

    def failed(self, reason: str) -> None:
        """Log that spans are not exported, unless that is logged."""
        if not self._is_out:
            self._is_out = True
            LOG.warning("Traces are not exported; calls are not affected: %s", reason)

    def succeeded(self) -> None:
        """Log the end of an outage."""
        if self._is_out:
            self._is_out = False
            LOG.info("Traces are exported again")


class _Exports(SpanExporter):
    """Passes batches to an exporter, and counts the spans of those that fail. It runs in the processor's thread."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics, log: _OutageLog) -> None:
        self.taken = 0
        self._exporter = exporter
        self._dropped = metrics.dropped_spans.labels("export_failed")
        self._log = log

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; return whether the collector accepted it."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
            if result is SpanExportResult.SUCCESS:
                self._log.succeeded()
            else:
                self._dropped.inc(len(spans))
                self._log.failed("the collector did not accept them")
        return result

    def shutdown(self) -> None:
        """Stop the exporter; an export in progress is cancelled."""
        self._exporter.shutdown()


class _PendingSpans(BatchSpanProcessor):
    """Keeps a limited number of spans until they are exported, and counts those beyond it."""

    def __init__(self, exports: _Exports, metrics: Metrics, *, content: bool) -> None:
        self._exports = exports
        self._dropped = metrics.dropped_spans.labels("queue_full")
        self._ended = 0
        self._limit = _MAX_PENDING_WITH_CONTENT if content else MAX_PENDING_SPANS
        batch = _MAX_BATCH_WITH_CONTENT if content else None
        super().__init__(exports, max_queue_size=self._limit, max_export_batch_size=batch)

    @property
    def pending(self) -> int:
        """The number of spans that are not exported yet. The event loop counts one term, the exporting thread the other."""
        return self._ended - self._exports.taken

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span that has ended, if it is sampled."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self.pending >= self._limit:
            self._dropped.inc()
            return
        self._ended += 1
        super().on_end(span)
