"""Settings from the command line, environment variables (`TOKENTAPE_STORE__URL=…`) and a YAML file.

The command line has precedence over the environment, and the environment over the file. Only this module reads the
environment.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import orjson
from pydantic import AfterValidator, Field, FiniteFloat, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from proxy.addresses import base_url, is_loopback, split_listen
from proxy.sections import Caps, DialectSettings, RecordSettings, Section, StoreSettings

ENVIRONMENT_PREFIX = "TOKENTAPE_"

BaseUrl = Annotated[str, AfterValidator(base_url)]


def _is_header_value(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text.strip() or text != text.strip() or not (text.isascii() and text.isprintable()):
        raise ValueError("invalid API key: it must be printable ASCII, not empty, and without spaces around it")
    return key


Key = Annotated[SecretStr, AfterValidator(_is_header_value)]


class ListenTlsSettings(Section):
    """TLS for the addresses of both APIs."""

    cert_file: Path | None = Field(None, description="Certificate chain in PEM format; enables TLS.")
    key_file: Path | None = Field(
        None, description="Private key of the certificate, in PEM format and without a password."
    )

    @model_validator(mode="after")
    def _is_a_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("listen_tls requires both cert_file and key_file, or neither")
        return self


SamplingDefault = Literal[
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
]


class EndpointSettings(Section):
    """One engine endpoint that serves the policy."""

    url: BaseUrl = Field(description="Base URL of the engine without /v1, such as http://127.0.0.1:8000.")
    name: str = Field("", description="Name of the engine in records and metrics. Default: its host and port.")
    kind: Literal["auto", "vllm", "sglang", "llamacpp", "plain"] = Field(
        "auto", description="Engine type; auto detects it. plain: any other OpenAI-compatible engine, recorded as text."
    )
    api_key: Key | None = Field(None, description="API key of the engine. Clients' keys are never forwarded.")
    logprobs_mode: (
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits", "after_temperature_logprobs"]
        | None
    ) = Field(
        None,
        description="What the engine computes logprobs from (vLLM: --logprobs-mode). Responses do not contain it, so "
        "steps record this value. Default: the default of the engine type.",
    )
    sampling_defaults: dict[SamplingDefault, int | FiniteFloat] = Field(
        {},
        description="Sampling parameters that the engine uses where a request has none, recorded with each step. Read "
        "from vLLM with --enable-scale-out and from llama.cpp; unknown for other engines.",
    )
    streaming: Literal["auto", "live", "replay"] | None = Field(
        None, description="How streamed calls are sent to this engine. Default: record.streaming."
    )
    tokenizer: str | None = Field(
        None,
        description="Path or Hugging Face name of its tokenizer, for reports, include=retokenized and X-Reply-Tokens.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum concurrent calls from one process. Others wait in a queue that is fair between rollouts.",
    )
    version: str | None = Field(None, description="Engine version to record. Default: as the engine reports.")

    @property
    def label(self) -> str:
        """The name, or the host and port of the URL."""
        return self.name or urlsplit(self.url).netloc

    @property
    def public_label(self) -> str:
        """The name for agents, which contains nothing of the URL."""
        return f"the engine {self.name}" if self.name else "the engine"


def _distinct(endpoints: list[EndpointSettings]) -> list[EndpointSettings]:
    for what, values in (("URL", [e.url for e in endpoints]), ("name", [e.label for e in endpoints])):
        duplicates = sorted({value for value in values if values.count(value) > 1})
        if duplicates:
            raise ValueError(f"duplicate endpoint {what}: {', '.join(duplicates)}; each {what} must be unique")
    return endpoints


EndpointList = Annotated[list[EndpointSettings], AfterValidator(_distinct)]


class EnginesSettings(Section):
    """The engines and their limits."""

    endpoints: EndpointList = Field([], description="Engine endpoints. Without any, `serve` starts the simulator.")
    connect_timeout_s: float = Field(10, gt=0, description="Timeout for connecting to an engine in seconds.")
    read_timeout_s: float | None = Field(
        None, gt=0, description="Maximum seconds between two reads of a response. Default: unlimited."
    )
    ca_file: Path | None = Field(None, description="CA certificates for https:// engines. Default: the system's.")
    max_connections: int = Field(0, ge=0, description="Maximum concurrent connections to engines; 0 is unlimited.")
    max_attempts: int = Field(
        2, ge=1, description="Maximum number of endpoints to try until the client receives a response."
    )
    health_interval_s: float = Field(
        5, gt=0, description="Approximate seconds between health checks (GET /health) of an endpoint."
    )
    eject_after: int = Field(3, ge=1, description="Number of consecutive failures after which an endpoint is ejected.")
    base_ejection_s: float = Field(
        1, gt=0, description="Duration in seconds of the first ejection; it doubles each time."
    )
    max_ejection_s: float = Field(
        30, gt=0, description="Maximum duration in seconds; then a successful check ends the ejection."
    )
    max_queued: int = Field(
        10_000, ge=0, description="Maximum number of calls that wait for max_in_flight; more return 429."
    )
    queue_timeout_s: float = Field(
        600, gt=0, description="Maximum seconds that such a call waits; then it returns 429."
    )
    max_event_bytes: int = Field(2**26, gt=0, description="Maximum bytes of one event in an engine's stream.")
    passthrough: list[str] = Field(
        ["/v1/embeddings", "/tokenize", "/detokenize"],
        description="Paths that are forwarded unchanged and not recorded. Other unknown paths return 404.",
    )


class ProbeSettings(Section):
    """Health probes, which are forwarded and not recorded. A call that names a rollout is never a probe."""

    known: bool = Field(default=True, description="Treat health checks of Atropos, verifiers and LiteLLM as probes.")
    user_agents: list[str] = Field(
        [], description="Treat calls whose User-Agent contains one of these as probes: kube-probe."
    )
    one_token: bool = Field(
        default=False, description="Treat calls from any client as probes if they request one token for a short prompt."
    )


class AgentsSettings(Section):
    """The model API: access, rollouts of calls, and limits."""

    url: BaseUrl | None = Field(
        None,
        description="Base URL of the model API for agents, returned with new rollouts. Default: the request's URL.",
    )
    api_keys: list[Key] = Field([], description="API keys for the model API. Without any, it requires no key.")
    unnamed_rollouts: Literal["new", "reject", "pass"] = Field(
        "new",
        description="For calls that name no rollout: open a new one, reject the call, or pass it through unrecorded.",
    )
    max_body_bytes: int = Field(
        32 * 2**20,
        gt=0,
        description="Maximum bytes of a decompressed request body; more return 413. Raise it for agents that send many "
        "images.",
    )
    body_timeout_s: float = Field(120, gt=0, description="Maximum seconds for receiving a request body; then 408.")
    idle_timeout_s: float = Field(
        75,
        gt=0,
        description="Maximum seconds for receiving the headers of the first or the next request on a connection.",
    )
    max_bytes_in_flight: int = Field(
        2**30,
        gt=0,
        description="Maximum bytes of all request and response bodies of calls in flight; then new calls return 429.",
    )
    client_stall_timeout_s: float = Field(
        120, gt=0, description="Maximum seconds that a client reads none of the pending data; then it is disconnected."
    )
    max_paused: int = Field(
        10_000, ge=0, description="Maximum number of calls that wait during a pause in one process; more return 429."
    )
    pause_timeout_s: float = Field(
        600, gt=0, description="Maximum seconds that a call waits during a pause; then it returns 429."
    )
    probes: ProbeSettings = Field(ProbeSettings(), description="Health probes, which are forwarded and not recorded.")


class ControlSettings(Section):
    """The control API."""

    api_keys: list[Key] = Field([], description="API keys for the control API. Without any, it requires no key.")
    listen: str | None = Field(
        None, description="Separate HOST:PORT of the control API. Default: the port of the model API."
    )


class SamplingSettings(Section):
    """Rules for the sampling parameters of requests; the rules of a rollout are applied after them."""

    override: dict[str, Any] = Field({}, description="Request fields that replace the client's values.")
    default: dict[str, Any] = Field({}, description="Request fields that are set when a client omits them.")
    cap: Caps = Field({}, description="Maximum values of request fields; max_tokens: auto caps by the context window.")


class RolloutServerSettings(Section):
    """One rollout server of Osmosis."""

    url: BaseUrl = Field(description="Base URL of the rollout server, such as http://127.0.0.1:9000.")
    api_key: Key | None = Field(None, description="API key of the rollout server, if it requires one.")


class OsmosisSettings(Section):
    """Rollout servers of Osmosis, which run rollouts and report their results."""

    servers: dict[str, RolloutServerSettings] = Field(
        {}, description="Rollout servers by name, which POST /rollouts/{id}/dispatch can use."
    )
    server_url: BaseUrl | None = Field(
        None, description="Base URL of TokenTape for rollout servers. Default: agents.url."
    )
    timeout_s: float = Field(
        600, gt=0, description="Maximum seconds of a rollout at a server that responds when it has finished."
    )


class AtroposSettings(Section):
    """The routes of the Atropos proxy, for clients whose ATROPOS_PROXY_URL is the URL of TokenTape."""

    enabled: bool = Field(
        default=False, description="Serve /setup, /servers, /sessions and /{uuid}/v1; otherwise they return 404."
    )
    keep_sessions: bool = Field(
        default=True, description="Keep deleted sessions as finished rollouts; otherwise their steps are deleted."
    )


class AuditSettings(Section):
    """Automatic audit of recorded steps."""

    sample_rate: float = Field(
        0,
        ge=0,
        le=1,
        description="Fraction of exact steps that are scored again by their vLLM or SGLang engine, one at a time.",
    )


class LogSettings(Section):
    """Logging: one line per call, without content and keys."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum severity of log messages.")
    format: Literal["text", "json"] = Field(
        "text", description="Log format: text for people, or json with one object per line."
    )


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: str = Field("127.0.0.1:8400", description="Address to listen on, as HOST:PORT.")
    listen_tls: ListenTlsSettings = Field(ListenTlsSettings(), description="TLS for the addresses of both APIs.")
    insecure: bool = Field(default=False, description="Allow a non-loopback address without API keys.")
    workers: int = Field(
        1, ge=1, description="Number of processes that share the port and the store (docs/workers.md)."
    )
    shutdown_delay_s: float = Field(
        0,
        ge=0,
        description="Seconds after SIGTERM in which calls are still accepted and /ready returns 503, for load balancers.",
    )
    drain_timeout_s: float = Field(
        60, ge=0, description="Maximum seconds for calls in flight to finish on shutdown; then they are aborted."
    )
    engines: EnginesSettings = Field(EnginesSettings(), description="The engines and their limits.")
    models: dict[str, str] = Field(
        {}, description='Model names: requested name -> name at the engine; "claude-*" is a prefix, "*" any other.'
    )
    sampling: SamplingSettings = Field(SamplingSettings(), description="Rules for the sampling parameters of requests.")
    agents: AgentsSettings = Field(AgentsSettings(), description="The model API.")
    dialects: DialectSettings = Field(
        DialectSettings(), description="Dialects that are translated to chat completions."
    )
    control: ControlSettings = Field(ControlSettings(), description="The control API.")
    store: StoreSettings = Field(StoreSettings(), description="The store of rollouts and steps.")
    record: RecordSettings = Field(RecordSettings(), description="What is recorded.")
    osmosis: OsmosisSettings = Field(OsmosisSettings(), description="Rollout servers of Osmosis.")
    atropos: AtroposSettings = Field(AtroposSettings(), description="Routes of the Atropos proxy.")
    audit: AuditSettings = Field(AuditSettings(), description="Automatic audit of recorded steps.")
    log: LogSettings = Field(LogSettings(), description="Logging.")

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        for section, listen, keys in (
            ("agents", self.listen, self.agents.api_keys),
            ("control", self.control.listen or self.listen, self.control.api_keys),
        ):
            host, _ = split_listen(listen)
            if not keys and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"{listen} is not a loopback address, and {section}.api_keys is empty. Set {section}.api_keys, "
                    "listen on 127.0.0.1, or pass --insecure if the network is closed"
                )
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
        """Return the sources in the order of precedence: command line, environment, file."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)

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
