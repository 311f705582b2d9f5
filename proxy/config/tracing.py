"""The section of traces, and the environment variables of OpenTelemetry that have a counterpart in it."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.config.sections import Section


def _collector_url(url: str) -> str:
    """Return the URL of a collector. Raises ValueError for another scheme, and for a URL with credentials."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("invalid collector: expected an http or https URL, such as http://127.0.0.1:4318")
    if parts.username or parts.password:
        raise ValueError("invalid collector: set credentials with OTEL_EXPORTER_OTLP_HEADERS")
    return url


class TracingSettings(Section):
    """Export of OpenTelemetry traces (docs/tracing.md), which requires tokentape[otel]."""

    endpoint: Annotated[str, AfterValidator(_collector_url)] | None = Field(
        None,
        description="URL of an OTLP collector, such as http://127.0.0.1:4318; without a path, /v1/traces is appended. Enables "
        "traces. Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    protocol: Literal["http/protobuf", "grpc"] = Field(
        "http/protobuf",
        description="Protocol of the collector; grpc requires opentelemetry-exporter-otlp-proto-grpc. Default: "
        "OTEL_EXPORTER_OTLP_PROTOCOL, or http/protobuf.",
    )
    content: bool = Field(
        default=False, description="Export messages, responses and tools; otherwise names, numbers and times only."
    )


class StandardVariables(BaseSettings):
    """The environment variables of OpenTelemetry that have a counterpart in the settings; its SDK reads the others."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", extra="ignore")

    sdk_disabled: str = ""
    traces_exporter: str = "otlp"
    exporter_otlp_endpoint: str = ""
    exporter_otlp_protocol: str = ""
    exporter_otlp_traces_endpoint: str = ""
    exporter_otlp_traces_protocol: str = ""

    def tracing(self) -> dict[str, str]:
        """Return the fields of `TracingSettings` that are set."""
        if self.sdk_disabled.lower() == "true" or self.traces_exporter != "otlp":
            return {}
        protocol = self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol
        endpoint, base = self.exporter_otlp_traces_endpoint, self.exporter_otlp_endpoint
        if base and not endpoint:
            endpoint = base if protocol == "grpc" else f"{base.rstrip('/')}/v1/traces"
        fields = {"endpoint": endpoint, "protocol": protocol}
        return {name: value for name, value in fields.items() if value}
