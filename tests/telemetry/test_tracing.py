"""The export of spans: batches, outages of the collector, and the end of the process."""

import asyncio
import logging
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from tests.support.collector import Collector, collecting

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import make_metrics
from proxy.telemetry.tracing import MAX_PENDING_SPANS, Tracing, start_tracing


class Gate(SpanExporter):
    """An exporter that waits until the test lets it continue."""

    def __init__(self):
        self.entered, self.proceed = threading.Event(), threading.Event()
        self.names: list[str] = []

    def export(self, spans):
        self.entered.set()
        self.proceed.wait(50)
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.proceed.set()


def dropped(metrics, reason):
    return metrics.dropped_spans.labels(reason)._value.get()


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Export each batch at once, and give up after a second."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(LOG, "propagate", True)
    monkeypatch.setattr("proxy.telemetry.tracing._FLUSH_TIMEOUT_S", 20)


async def test_spans_that_are_left_are_exported_before_the_end(metrics):
    async with collecting() as collector:
        tracing = start_tracing(collector.url, "http/protobuf", metrics, content=False)
        for number in range(600):
            tracing.tracer.start_span(f"span {number}").end()
        await tracing.close()

    assert {f"span {number}" for number in range(600)} == {span.name for span in collector.spans}
    assert len(collector.spans) == 600


async def test_a_path_of_the_endpoint_is_used_unchanged(metrics):
    async with collecting() as collector:
        tracing = start_tracing(f"{collector.url}/v1/traces", "http/protobuf", metrics, content=False)
        tracing.tracer.start_span("one").end()
        await tracing.close()

    assert collector.one("one")


async def test_standard_variables_set_names_headers_and_sampler(metrics, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "train")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    async with collecting() as collector:
        tracing = start_tracing(collector.url, "http/protobuf", metrics, content=False)
        for _ in range(200):
            tracing.tracer.start_span("span").end()
        await tracing.close()

    assert 0 < len(collector.spans) < 200
    assert collector.headers[0]["authorization"] == "Basic abc"
    assert {"service.name": "train", "deployment.environment.name": "lab"}.items() <= collector.resources[0].items()


async def test_an_outage_is_logged_once_and_its_spans_are_counted(metrics, caplog):
    caplog.set_level(logging.INFO, LOG.name)
    async with collecting() as collector:
        collector.status = 400
        tracing = start_tracing(collector.url, "http/protobuf", metrics, content=False)
        for count in (1, 2, 3):
            tracing.tracer.start_span("lost").end()
            async with asyncio.timeout(50):
                while dropped(metrics, "export_failed") < count:
                    await asyncio.sleep(0.01)
        collector.status = 200
        tracing.tracer.start_span("kept").end()
        await tracing.close()

    assert [span.name for span in collector.spans] == ["kept"]
    messages = [record.message for record in caplog.records if record.name == LOG.name]
    assert len(messages) == 2, messages
    assert "Traces are not exported; calls are not affected" in messages[0]
    assert "400" in messages[0]
    assert messages[1] == "Traces are exported again"


async def test_a_collector_that_is_unreachable_is_logged_once_and_does_not_delay_the_end(metrics, caplog):
    tracing = start_tracing("http://127.0.0.1:1", "http/protobuf", metrics, content=False)
    tracing.tracer.start_span("lost").end()
    async with asyncio.timeout(50):
        await tracing.close()

    assert sum("Traces are not exported" in record.message for record in caplog.records) == 1
    assert [
        record for record in caplog.records if record.name.startswith("opentelemetry") and record.name == "root"
    ] == []


async def test_the_end_does_not_wait_for_a_collector_that_does_not_respond(metrics, caplog, monkeypatch):
    monkeypatch.setattr("proxy.telemetry.tracing._FLUSH_TIMEOUT_S", 0.2)
    gate = Gate()
    tracing = Tracing(gate, metrics, content=False)
    tracing.tracer.start_span("lost").end()
    async with asyncio.timeout(50):
        await tracing.close()

    assert "1 spans were not exported before the end of the process" in caplog.text
    gate.proceed.set()


@pytest.mark.parametrize(("content", "limit"), [(False, MAX_PENDING_SPANS), (True, 512)])
async def test_spans_beyond_the_limit_are_dropped_and_counted(metrics, content, limit):
    """Each one is either exported or counted."""
    gate = Gate()
    tracing = Tracing(gate, metrics, content=content)
    tracing.tracer.start_span("span").end()
    await asyncio.to_thread(gate.entered.wait, 50)
    for _ in range(limit + 9):
        tracing.tracer.start_span("span").end()
    gate.proceed.set()
    await tracing.close()

    assert dropped(metrics, "queue_full") == 10
    assert limit == len(gate.names)


async def test_spans_are_exported_over_grpc(metrics):
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802
            collector.keep(request)
            return ExportTraceServiceResponse()

    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        tracing = start_tracing(f"http://127.0.0.1:{port}", "grpc", metrics, content=False)
        tracing.tracer.start_span("one").end()
        await tracing.close()
        server.stop(None)

    assert collector.one("one")


def test_a_process_without_traces_does_not_import_this_module():
    program = "import sys, proxy.cli.main, proxy.server.app; print([name for name in sys.modules if 'trac' in name])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert "proxy.telemetry.tracing" not in found
    assert "proxy.api.model.call_trace" not in found
