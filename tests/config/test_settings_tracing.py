"""The settings of traces, and the standard variables of OpenTelemetry."""

import pytest
from pydantic import ValidationError

from proxy.config.settings import load


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("http://c:4318/v1/traces", "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c/x/"}, ("http://c/x/v1/traces", "http/protobuf")),
        (
            {"EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/in", "EXPORTER_OTLP_ENDPOINT": "http://d"},
            ("http://c/in", "http/protobuf"),
        ),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317", "EXPORTER_OTLP_PROTOCOL": "grpc"}, ("http://c:4317", "grpc")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "SDK_DISABLED": "true"}, (None, "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "TRACES_EXPORTER": "none"}, (None, "http/protobuf")),
    ],
)
def test_traces_are_enabled_by_the_standard_variables_of_opentelemetry(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    settings = load()

    assert expected == (settings.tracing.endpoint, settings.tracing.protocol)
    assert settings == load(**settings.to_json())  # as in a worker


def test_the_file_precedes_the_standard_variables_of_opentelemetry(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("tracing: {endpoint: http://file:4318}\n")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    monkeypatch.setenv("TOKENTAPE_TRACING__CONTENT", "true")

    assert ("http://file:4318", True) == (load(file).tracing.endpoint, load(file).tracing.content)


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [("collector:4317", "http://127.0.0.1:4318"), ("http://u:secret@c", "OTEL_EXPORTER_OTLP_HEADERS")],
)
def test_an_invalid_collector_is_refused_without_its_credentials(endpoint, named):
    with pytest.raises(ValidationError, match=named) as caught:
        load(tracing={"endpoint": endpoint})

    assert "secret" not in str(caught.value.errors()[0]["msg"])
