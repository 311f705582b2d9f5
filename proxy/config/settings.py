"""Settings from the command line, environment variables (`TOKENTAPE_STORE__URL=…`) and a YAML file.

The command line has precedence over the environment, and the environment over the file. Only this module reads the
environment.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import orjson
from pydantic import AfterValidator, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from proxy.config.addresses import is_loopback, split_listen
from proxy.config.engines import EnginesSettings, PolicyTable, RescoreSettings
from proxy.config.sections import (
    AgentsSettings,
    ArchiveSettings,
    AtroposSettings,
    AuditSettings,
    ContinuationSettings,
    ControlSettings,
    DialectSettings,
    GroupSettings,
    HostPattern,
    Listen,
    ListenTlsSettings,
    LogSettings,
    MismatchSettings,
    OsmosisSettings,
    RecordSettings,
    SamplingSettings,
    Section,
    StoreSettings,
    TapeSettings,
    ThreadSettings,
    described,
)

ENVIRONMENT_PREFIX = "TOKENTAPE_"


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

    endpoint: Annotated[str, AfterValidator(_collector_url)] | None = described(
        "URL of an OTLP collector (docs/tracing.md). "
        "Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT."
    )
    protocol: Literal["http/protobuf", "grpc"] = described(
        "Protocol of the collector; grpc requires opentelemetry-exporter-otlp-proto-grpc. Default: "
        "OTEL_EXPORTER_OTLP_PROTOCOL, or http/protobuf.",
        "http/protobuf",
    )
    content: bool = described(
        "Export messages, responses and tools; otherwise names, numbers and times only.", default=False
    )


class _StandardVariables(BaseSettings):
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


class _StandardSource(PydanticBaseSettingsSource):
    """OpenTelemetry's environment variables, as defaults of `tracing`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # `__call__` returns the values

    def __call__(self) -> dict[str, Any]:
        found = _StandardVariables().tracing()
        return {"tracing": found} if found else {}


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: Listen = described("HOST:PORT to listen on.", "127.0.0.1:8400")
    listen_tls: ListenTlsSettings = ListenTlsSettings()
    allowed_hosts: list[HostPattern] = described(
        "Names of a listener without API keys, besides localhost, IP addresses and agents.url: "
        "*.example.com, or * for any (docs/security.md).",
        [],
    )
    insecure: bool = described(
        "Allow a non-loopback address, or the control API beside agents' keys, without keys.", default=False
    )
    workers: int = described("Processes that share the port and the store (docs/operations.md).", 1, ge=1)
    shutdown_delay_s: float = described("How long calls are accepted after SIGTERM, while /ready returns 503.", 0, ge=0)
    ready_requires_engine: bool = described(
        "Whether /ready returns 503 while no engine passes a health check.",
        default=False,
    )
    drain_timeout_s: float = described("On shutdown, calls in flight are aborted after this time.", 60, ge=0)
    engines: EnginesSettings = EnginesSettings()
    models: dict[str, str] = described(
        'Model names: requested name -> name at the engine; "claude-*" is a prefix, "*" any other.', {}
    )
    policies: PolicyTable = described("Policies by name (docs/policies.md).", {})
    threads: ThreadSettings = ThreadSettings()
    sampling: SamplingSettings = SamplingSettings()
    agents: AgentsSettings = AgentsSettings()
    dialects: DialectSettings = DialectSettings()
    control: ControlSettings = ControlSettings()
    groups: GroupSettings = GroupSettings()
    store: StoreSettings = StoreSettings()
    record: RecordSettings = RecordSettings()
    continuation: ContinuationSettings = ContinuationSettings()
    osmosis: OsmosisSettings = OsmosisSettings()
    atropos: AtroposSettings = AtroposSettings()
    audit: AuditSettings = AuditSettings()
    mismatch: MismatchSettings = MismatchSettings()
    rescore: RescoreSettings = RescoreSettings()
    tracing: TracingSettings = TracingSettings()
    archive: ArchiveSettings = ArchiveSettings()
    tape: TapeSettings = TapeSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        for section, listen, keys in (
            ("agents", self.listen, self.agents.api_keys),
            ("control", self.control.listen or self.listen, self.control.api_keys),
        ):
            host, _ = split_listen(listen)
            if not keys and not self.insecure and not is_loopback(host):
                setting = f"{section}.api_keys"
                sentence = (
                    f"{listen} is not a loopback address, and {setting} is empty. Set {setting}, listen on 127.0.0.1, or "
                    "pass --insecure if the network is closed"
                )
                raise PydanticCustomError("no_keys", "{sentence}", {"sentence": sentence, "setting": setting})
        if self.agents.api_keys and not self.control.api_keys and self.control.listen is None and not self.insecure:
            sentence = (
                "agents.api_keys is set and control.api_keys is empty: an agent that omits its key could set its reward and "
                "read and delete all rollouts. Set control.api_keys, give the control API an address that agents cannot "
                "reach (control.listen), or pass --insecure"
            )
            raise PydanticCustomError("no_keys", "{sentence}", {"sentence": sentence, "setting": "control.api_keys"})
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in the order of precedence: command line, environment, file, OpenTelemetry's variables."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls), _StandardSource(settings_cls)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON, including secrets. Send it to child processes by a pipe, and nowhere else.

        `Settings(**json)` is equal in a process with the same environment.
        """
        payload: dict[str, Any] = orjson.loads(orjson.dumps(self.model_dump(), default=_reveal))
        return payload


def _reveal(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)  # else a path


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Return the settings from a file (if any), the environment and `overrides`, which have precedence.

    Raises:
        ValueError: A setting is invalid (pydantic's ValidationError, which names each of them).
        OSError: The file cannot be read.
    """
    if config is None:
        return Settings(**overrides)
    config.read_bytes()  # YamlConfigSettingsSource ignores a file that does not exist

    class FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=config)

    return FromFile(**overrides)
