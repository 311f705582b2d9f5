"""The settings: what they are, what they default to, what they mean.

Holds the models of the configuration and reads it: a YAML file, then the environment (`TOKENTAPE_STORE__URL=…`), then
what the command line said. It is the only reader of the environment. It must not start, open or connect anything.
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


def _can_be_sent(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text.strip() or text != text.strip() or not (text.isascii() and text.isprintable()):
        raise ValueError("a key is printable ASCII and not empty: it is sent in a header")
    return key


Key = Annotated[SecretStr, AfterValidator(_can_be_sent)]


class ListenTlsSettings(Section):
    """TLS for listening, on both faces."""

    cert_file: Path | None = Field(None, description="Certificate chain (PEM) to listen with TLS; plain HTTP if none.")
    key_file: Path | None = Field(None, description="Private key (PEM, no password) of that certificate.")

    @model_validator(mode="after")
    def _is_a_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("listen_tls needs both cert_file and key_file, or neither")
        return self


SamplingDefault = Literal[
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
]


class EndpointSettings(Section):
    """One engine that serves the policy."""

    url: BaseUrl = Field(description="Base URL of the engine, without /v1: http://127.0.0.1:8000.")
    name: str = Field("", description="Name in records and metrics; the host and port if empty.")
    kind: Literal["auto", "vllm", "sglang", "llamacpp", "plain"] = Field(
        "auto", description="What the engine is; auto finds out. plain: any OpenAI-compatible one, recorded as text."
    )
    api_key: Key | None = Field(None, description="Key that the engine wants; agents' keys never reach it.")
    logprobs_mode: (
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits", "after_temperature_logprobs"]
        | None
    ) = Field(
        None,
        description="What its logprobs are of (vLLM: its --logprobs-mode): no answer says it, so it is recorded from "
        "here; the engine's default if none.",
    )
    sampling_defaults: dict[SamplingDefault, int | FiniteFloat] = Field(
        {},
        description="What it samples with where a request leaves a field out (temperature, top_p, top_k, min_p, penalties), "
        "recorded with each step; read from vLLM with --enable-scale-out and from llama.cpp, unknown elsewhere.",
    )
    streaming: Literal["auto", "live", "replay"] | None = Field(
        None, description="How its streams are asked for; record.streaming if none."
    )
    tokenizer: str | None = Field(
        None,
        description="Folder or hub name of its tokenizer: for text in reports, include=retokenized, X-Reply-Tokens.",
    )
    max_in_flight: int | None = Field(
        None, ge=1, description="Calls of one process that it has at once; more wait, each rollout for its turn."
    )
    version: str | None = Field(None, description="Engine version to record; asked of the engine if not given.")

    @property
    def label(self) -> str:
        """Its name, or the host and port of its URL."""
        return self.name or urlsplit(self.url).netloc

    @property
    def public_label(self) -> str:
        """What agents may know it by: its name, and nothing of its URL."""
        return f"the engine {self.name}" if self.name else "the engine"


def _distinct(endpoints: list[EndpointSettings]) -> list[EndpointSettings]:
    for what, all_of_them in (("URL", [one.url for one in endpoints]), ("name", [one.label for one in endpoints])):
        twice = sorted({each for each in all_of_them if all_of_them.count(each) > 1})
        if twice:
            raise ValueError(f"each endpoint has a {what} of its own; {', '.join(twice)} is there twice")
    return endpoints


EndpointList = Annotated[list[EndpointSettings], AfterValidator(_distinct)]


class EnginesSettings(Section):
    """The engines, and how they are reached."""

    endpoints: EndpointList = Field([], description="The engines; none: `serve` starts the simulator.")
    connect_timeout_s: float = Field(10, gt=0, description="Time to connect to an engine.")
    read_timeout_s: float | None = Field(
        None, gt=0, description="Longest silence of an engine within an answer; none by default."
    )
    ca_file: Path | None = Field(None, description="Certificate authority for https:// engines; the system's if none.")
    max_connections: int = Field(0, ge=0, description="Connections to engines at once; 0 is no limit.")
    attempts: int = Field(2, ge=1, description="Endpoints a call is tried at, in turn, while nothing of it was shown.")
    health_s: float = Field(5, gt=0, description="Time between two checks of an endpoint (GET /health), about.")
    eject_after: int = Field(3, ge=1, description="Faults in a row after which an endpoint is passed over.")
    eject_s: float = Field(1, gt=0, description="For how long at first; each time in a row twice as long.")
    longest_ejection_s: float = Field(30, gt=0, description="And at the most; then a good check brings it back.")
    most_queued: int = Field(10_000, ge=0, description="Calls that may wait for an endpoint of max_in_flight.")
    longest_queue_s: float = Field(600, gt=0, description="Longest wait of such a call; then it gets 429.")
    max_event_bytes: int = Field(2**26, gt=0, description="Longest event in the stream of an engine.")
    passthrough: list[str] = Field(
        ["/v1/embeddings", "/tokenize", "/detokenize"],
        description="Paths passed on untouched and unrecorded; any other path is 404.",
    )


class ProbeSettings(Section):
    """Health probes, which are passed on and not recorded. A call that names a rollout is none."""

    known: bool = Field(
        default=True, description="Calls that are exactly a health check of Atropos, verifiers or LiteLLM are probes."
    )
    user_agents: list[str] = Field([], description="Calls whose User-Agent holds one of these are probes: kube-probe.")
    one_token: bool = Field(
        default=False, description="Calls that ask a tiny prompt for one token are probes, whoever makes them."
    )


class AgentsSettings(Section):
    """The model face: who may call, and which rollout a call belongs to."""

    url: BaseUrl | None = Field(
        None,
        description="Base URL at which agents reach us, which rollouts are told; where a request was sent to if none.",
    )
    api_keys: list[Key] = Field([], description="Keys that may call models; none: anybody who reaches us.")
    unkeyed: Literal["new", "reject", "pass"] = Field(
        "new", description="A call that names no rollout: gets a new one, is refused, or passes unrecorded."
    )
    max_body_bytes: int = Field(
        32 * 2**20,
        gt=0,
        description="Longest request body, inflated; over it 413. Raise it for agents that send many images.",
    )
    body_timeout_s: float = Field(120, gt=0, description="Longest time for a request's body to arrive; over it 408.")
    idle_s: float = Field(
        75, gt=0, description="A connection is closed when the head of a request takes longer, the first or the next."
    )
    max_bytes_in_flight: int = Field(
        2**30, gt=0, description="Bytes that calls in flight may hold, bodies and answers; over it new calls get 429."
    )
    stall_s: float = Field(
        120, gt=0, description="A client that reads nothing of what waits for it for so long is cut."
    )
    most_paused: int = Field(10_000, ge=0, description="Calls that may wait at once in a paused process.")
    longest_pause_s: float = Field(600, gt=0, description="Longest wait of a paused call; then it gets 429.")
    probes: ProbeSettings = Field(
        ProbeSettings(), description="Health probes that name no rollout, which are passed on and not recorded."
    )


class ControlSettings(Section):
    """The control face."""

    api_keys: list[Key] = Field([], description="Keys that may do everything on the control face.")
    listen: str | None = Field(None, description="HOST:PORT of its own; the same port as the model face if none.")


class SamplingSettings(Section):
    """Rules on what agents ask of sampling; a rollout's own rules go on top."""

    override: dict[str, Any] = Field({}, description="Body fields that win over the client's.")
    default: dict[str, Any] = Field({}, description="Body fields for clients that do not say.")
    cap: Caps = Field({}, description="Upper bounds of numeric fields; max_tokens: auto.")


class RolloutServerSettings(Section):
    """One of Osmosis' rollout servers."""

    url: BaseUrl = Field(description="Base URL of the rollout server: http://127.0.0.1:9000.")
    api_key: Key | None = Field(None, description="Key that the rollout server wants, if it wants one.")


class OsmosisSettings(Section):
    """Osmosis' rollout servers, which run rollouts and call back for their tokens."""

    servers: dict[str, RolloutServerSettings] = Field(
        {}, description="Rollout servers by name; POST /rollouts/{id}/dispatch can name these and no others."
    )
    server_url: BaseUrl | None = Field(
        None, description="Our base URL as rollout servers reach it; agents.url if none."
    )
    timeout_s: float = Field(600, gt=0, description="Longest time of a rollout that a server answers when it is over.")


class AtroposSettings(Section):
    """The routes of Atropos' proxy, for clients whose ATROPOS_PROXY_URL names us."""

    enabled: bool = Field(
        default=False, description="Serve /setup, /servers, /sessions and /{uuid}/v1; else they are 404."
    )
    keep_sessions: bool = Field(
        default=True,
        description="A session that its client deletes stays as a finished rollout; else its steps are deleted.",
    )


class AuditSettings(Section):
    """What the server scores again by itself."""

    sample_rate: float = Field(
        0, ge=0, le=1, description="Share of exact steps that their vLLM or SGLang engine scores again, one at a time."
    )


class LogSettings(Section):
    """What is logged: one line a call, never content or keys."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severity that is logged.")
    format: Literal["text", "json"] = Field("text", description="Lines for people, or one JSON object a line.")


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    listen: str = Field("127.0.0.1:8400", description="HOST:PORT to listen on.")
    listen_tls: ListenTlsSettings = Field(ListenTlsSettings(), description="TLS for listening, on both faces.")
    insecure: bool = Field(default=False, description="Listen beyond loopback although no keys are configured.")
    workers: int = Field(1, ge=1, description="Processes that share the port and the store (docs/workers.md).")
    notice_s: float = Field(
        0,
        ge=0,
        description="Time that calls are still taken when told to stop, while /ready says so: for balancers to learn.",
    )
    drain_s: float = Field(
        60, ge=0, description="Time for calls in flight to end when told to stop; then they are cut."
    )
    engines: EnginesSettings = Field(EnginesSettings(), description="The engines, and how they are reached.")
    models: dict[str, str] = Field(
        {}, description='What agents ask for -> what the engine serves; "claude-*", "*": any other.'
    )
    sampling: SamplingSettings = Field(SamplingSettings(), description="Rules on what agents ask of sampling.")
    agents: AgentsSettings = Field(AgentsSettings(), description="The model face.")
    dialects: DialectSettings = Field(DialectSettings(), description="Dialects by way of chat.")
    control: ControlSettings = Field(ControlSettings(), description="The control face.")
    store: StoreSettings = Field(StoreSettings(), description="Where steps are kept.")
    record: RecordSettings = Field(RecordSettings(), description="What is recorded, and at what cost.")
    osmosis: OsmosisSettings = Field(OsmosisSettings(), description="Osmosis' rollout servers.")
    atropos: AtroposSettings = Field(AtroposSettings(), description="The routes of Atropos' proxy.")
    audit: AuditSettings = Field(AuditSettings(), description="What the server scores again by itself.")
    log: LogSettings = Field(LogSettings(), description="What is logged.")

    @model_validator(mode="after")
    def _is_not_open_to_the_world(self) -> Self:
        for face, listen, keys in (
            ("agents", self.listen, self.agents.api_keys),
            ("control", self.control.listen or self.listen, self.control.api_keys),
        ):
            host, _ = split_listen(listen)
            if not keys and not self.insecure and not is_loopback(host):
                raise ValueError(
                    f"{listen} can be reached from elsewhere, and {face}.api_keys is empty: anybody could use it. "
                    f"Set {face}.api_keys, listen on 127.0.0.1, or give --insecure if the network is closed"
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
        """What the command line said, then the environment, then the file."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


def told(settings: Settings) -> dict[str, Any]:
    """The settings with their secrets, as JSON can carry them: for a process of ours, by a pipe and nowhere else.

    `Settings` of them are the same in a process with our environment: what is said wins over that.
    """
    said: dict[str, Any] = orjson.loads(orjson.dumps(settings.model_dump(), default=_revealed))
    return said


def _revealed(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)  # else a path


def load(config: Path | None = None, **said: Any) -> Settings:
    """The settings of a file (if any), the environment, and what was said on the command line.

    Raises ValueError (pydantic's ValidationError, naming each setting) or OSError for a file that cannot be read.
    """
    if config is None:
        return Settings(**said)
    config.read_bytes()  # a file that was named must be there: the source below would pass over it

    class FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=config)

    return FromFile(**said)
