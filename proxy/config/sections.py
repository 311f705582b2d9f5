"""The sections of the settings, except `engines`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    SecretStr,
    model_validator,
)

from proxy.config.addresses import base_url, host_pattern, split_listen
from storage import StoreOptions

_Default = TypeVar("_Default")


class Section(BaseModel):
    """A section of the settings. Unknown names are rejected, so that a typo does not go unnoticed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def described(text: str, default: _Default = None, **bounds: Any) -> _Default:  # type: ignore[assignment]
    """Return a field with this description for the pages; `bounds` are arguments of pydantic's `Field`."""
    field: _Default = Field(default, description=text, **bounds)
    return field


def _check_listen(listen: str) -> str:
    split_listen(listen)
    return listen


Listen: TypeAlias = Annotated[str, AfterValidator(_check_listen)]
HostPattern: TypeAlias = Annotated[str, AfterValidator(host_pattern)]


def _check_caps(cap: dict[str, Any]) -> dict[str, Any]:
    for name, bound in cap.items():
        if bound == "auto" and name not in {"max_tokens", "max_completion_tokens"}:
            raise ValueError(
                f"invalid cap 'auto' for {name}: only max_tokens and max_completion_tokens accept it; use a number"
            )
    return cap


Caps: TypeAlias = Annotated[dict[str, FiniteFloat | Literal["auto"]], AfterValidator(_check_caps)]


class StoreSettings(Section):
    """The store of rollouts and steps."""

    url: str = described(
        "URL of the store: embedded:PATH, redis://, redis+cluster:// or redis+sentinel:// (rediss…: TLS).",
        "embedded:./data",
    )
    username: str | None = described("ACL user.")
    password: SecretStr | None = described("Password; use an environment variable.")
    sentinel_username: str | None = described("ACL user of the sentinels of redis+sentinel://.")
    sentinel_password: SecretStr | None = described("Password of the sentinels; use an environment variable.")
    ca_file: Path | None = described("CA certificates for rediss://. Default: the system's.")
    prefix: str = described("Prefix of every key.", "tt", min_length=1)
    ttl_s: int | None = described("When idle rollouts expire. Default: never.", gt=0)
    durability: Literal["acknowledged", "fsync", "replicated"] = described(
        "When a step counts as stored: acknowledged by the store, fsync to disk, or on replicas.", "acknowledged"
    )
    replicas: int = described("Replicas that must have a step, with durability: replicated.", 1, ge=1)
    timeout_s: float = described("Timeout of store requests.", 10, gt=0)
    max_connections: int = described("Maximum connections to the store; more calls wait.", 64, gt=0)
    buckets: int | None = described(
        "Parts of the store, a power of two from 16 to 1024, chosen at its creation. Default: 16, on a cluster 256.",
    )
    on_failure: Literal["fail", "spool"] = described(
        "If a step cannot be stored: fail the call, or spool the step to a journal on disk (docs/reliability.md).",
        "fail",
    )
    spool_path: Path = described("Journal of this process, with on_failure: spool.", Path("spool/steps"))

    def options(self) -> StoreOptions:
        """Return the options of the storage package."""
        return StoreOptions(
            prefix=self.prefix,
            ttl_s=self.ttl_s,
            durability=self.durability,
            replicas=self.replicas,
            username=self.username,
            password=self.password.get_secret_value() if self.password else None,
            sentinel_username=self.sentinel_username,
            sentinel_password=self.sentinel_password.get_secret_value() if self.sentinel_password else None,
            ca_file=self.ca_file,
            timeout_s=self.timeout_s,
            max_connections=self.max_connections,
            buckets=self.buckets,
        )


class RecordSettings(Section):
    """What is recorded."""

    include_reasoning: Literal["override", "as_requested"] = described(
        "With include_reasoning: false vLLM returns no ids. override: it is requested and "
        "removed; as_requested: the step is flagged.",
        "override",
    )
    logprobs: Literal["full", "sampled", "off"] = described(
        "Logprobs to request if the client requests none: full, sampled or off (docs/exactness.md).",
        "full",
    )
    streaming: Literal["auto", "live", "replay"] = described(
        "How streamed calls are sent: live, replay (unstreamed) or auto (docs/exactness.md).",
        "auto",
    )
    sampling_masks: bool = described(
        "Request sampling masks from SGLang, for unstreamed chat calls with a top_k (docs/exactness.md).",
        default=False,
    )
    routed_experts: bool = described(
        "Request the experts of each token from SGLang, for chat calls (docs/exactness.md).",
        default=False,
    )
    keep_alive_interval_s: float = described(
        "Time between SSE comments to a client that waits.",
        10,
        gt=0,
    )


def _mode(value: Any) -> Any:
    """Return `off` for false, as YAML 1.1 parses it."""
    return "off" if value is False else value


ContinuationMode = Annotated[Literal["off", "faithful", "append"], BeforeValidator(_mode)]


class ContinuationSettings(Section):
    """The continuation of earlier steps by their token ids (docs/continuation.md)."""

    mode: ContinuationMode = described(
        "off, faithful or append (docs/continuation.md).",
        "faithful",
    )
    timeout_s: float = described(
        "Time for renderings of a call, which is otherwise sent unchanged. After three such calls, "
        "an engine renders none for a minute.",
        60,
        gt=0,
    )


class DialectSettings(Section):
    """Dialects that are translated to chat completions (docs/dialects.md)."""

    thinking: dict[str, Any] = described(
        "Chat fields for calls that enable reasoning: {chat_template_kwargs: {…}}.", {}
    )
    not_thinking: dict[str, Any] = described("Chat fields for calls that disable reasoning.", {})
    ignore_hosted_tools: bool = described(
        "Remove tools that the vendor's servers run; otherwise their calls are rejected.",
        default=False,
    )


BaseUrl = Annotated[str, AfterValidator(base_url)]


def check_header_value(value: SecretStr, what: str) -> SecretStr:
    """Raise ValueError for a value that no header can have."""
    text = value.get_secret_value()
    if not text.strip() or text != text.strip() or not (text.isascii() and text.isprintable()):
        raise ValueError(f"invalid {what}: it must be printable ASCII, not empty, and without spaces around it")
    return value


Key = Annotated[SecretStr, AfterValidator(lambda key: check_header_value(key, "API key"))]


class ListenTlsSettings(Section):
    """TLS for the addresses of both APIs."""

    cert_file: Path | None = described("Certificate chain (PEM); enables TLS.")
    key_file: Path | None = described("Its private key (PEM, no password).")

    @model_validator(mode="after")
    def _is_a_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("listen_tls requires both cert_file and key_file, or neither")
        return self


class ProbeSettings(Section):
    """Health probes, which are forwarded and not recorded. A call that names a rollout is never a probe."""

    known: bool = described("Health checks of Atropos, verifiers and LiteLLM are probes.", default=True)
    user_agents: list[str] = described("Calls with one of these in their User-Agent are probes: kube-probe.", [])
    one_token: bool = described("Calls that request one token for a short prompt are probes.", default=False)


class TapeSettings(Section):
    """A tape in place of an engine (docs/playback.md): recorded rollouts answer the calls that name them."""

    file: str | None = described(
        "File of rollouts: JSON lines, the output of `tokentape show --json`, or a path or URL of an archive."
    )
    ignore: list[str] = described("Texts of messages that count as equal; * is any text within a line.", [])
    presets: list[str] = described("Agents whose varying texts count as equal.", [])


class AgentsSettings(Section):
    """The model API: access, rollouts of calls, and limits."""

    url: BaseUrl | None = described("Base URL for agents, in responses to trainers. Default: the request's URL.")
    api_keys: list[Key] = described("API keys for the model API. Without any, it requires no key.", [])
    unnamed_rollouts: Literal["new", "reject", "pass"] = described(
        "For calls that name no rollout: open a new one, reject the call, or pass it through unrecorded.", "new"
    )
    max_body_bytes: int = described(
        "Maximum size of a decompressed request body, else 413. Raise it for many images.",
        32 * 2**20,
        gt=0,
    )
    body_timeout_s: float = described("Time to receive a request body, else 408.", 120, gt=0)
    idle_timeout_s: float = described("Time to receive the headers of a request on a connection.", 75, gt=0)
    max_bytes_in_flight: int = described(
        "Maximum size of all bodies of calls in flight; new calls then get 429.", 2**30, gt=0
    )
    max_connections: int = described(
        "Maximum connections of a process; calls on more get 429, and are closed.", 20_000, gt=0
    )
    client_stall_timeout_s: float = described(
        "A client that reads no pending data for this time is disconnected.", 120, gt=0
    )
    cut_surplus_calls: bool = described(
        "Whether calls of surplus rollouts are stopped at the engine, within about a second.",
        default=True,
    )
    max_paused: int = described("Calls of a process that wait during a policy's pause; more get 429.", 10_000, ge=0)
    pause_timeout_s: float = described("How long a call waits during a pause; then 429.", 600, gt=0)
    resume_timeout_s: float = described(
        "How long a call that its engine ended early waits for the end of a pause, or for an endpoint, to continue.",
        300,
        ge=0,
    )
    max_resumes: int = described(
        "How often a call continues after its engine ended it early; then it ends. 0: it ends at once.", 100, ge=0
    )
    rollout_cache_bytes: int = described(
        "Memory of a process for the newest bodies, prompts and turns; the rest is read from the store.",
        2**29,
        ge=0,
    )
    probes: ProbeSettings = ProbeSettings()


class GroupSettings(Section):
    """Groups that `POST /groups` opens: the limits of their rollouts, and rewards that are set late (docs/training-loop.md)."""

    idle_s: float | None = described(
        "`idle_s` of groups that set none; null: none.",
        3600,
        gt=0,
    )
    start_s: float = described(
        "`start_s` beside an `idle_s`, if none is set.",
        1800,
        gt=0,
    )
    reward_s: float = described("How long claims wait for missing rewards of a complete group.", 600, ge=0)
    earlier_epochs: Literal["drop", "take"] = described(
        "Default of claims' `earlier_epochs`. `take`: only claims without `max_staleness` take such groups.",
        "drop",
    )


class ControlSettings(Section):
    """The control API."""

    api_keys: list[Key] = described("API keys for the control API. Without any, it requires no key.", [])
    listen: Listen | None = described("Separate HOST:PORT of the control API. Default: the port of the model API.")


class SamplingSettings(Section):
    """Rules for the sampling parameters of requests; the rules of a rollout are applied after them."""

    override: dict[str, Any] = described("Request fields that replace the client's values.", {})
    default: dict[str, Any] = described("Request fields that are set when a client omits them.", {})
    cap: Caps = described("Maximum values of request fields; max_tokens: auto caps by the context window.", {})


class RolloutServerSettings(Section):
    """One rollout server of Osmosis."""

    url: BaseUrl = Field(description="Base URL, such as http://127.0.0.1:9000.")
    api_key: Key | None = described("API key, if it requires one.")


class OsmosisSettings(Section):
    """Rollout servers of Osmosis, which run rollouts and report their results."""

    servers: dict[str, RolloutServerSettings] = described(
        "Rollout servers by name, for POST /rollouts/{id}/dispatch.", {}
    )
    server_url: BaseUrl | None = described("Base URL of TokenTape for rollout servers. Default: agents.url.")
    timeout_s: float = described("Maximum duration of a synchronous dispatch.", 600, gt=0)


class AtroposSettings(Section):
    """The routes of the Atropos proxy, for clients with TokenTape's URL as ATROPOS_PROXY_URL."""

    enabled: bool = described(
        "Serve /setup, /servers, /sessions and /{uuid}/v1; otherwise they return 404.", default=False
    )
    keep_sessions: bool = described(
        "Keep deleted sessions as finished rollouts; otherwise their steps are deleted.", default=True
    )


class AuditSettings(Section):
    """Automatic audit of recorded steps."""

    sample_rate: float = described(
        "Share of exact steps that their engine scores again (docs/audit.md).", 0, ge=0, le=1
    )


class MismatchSettings(Section):
    """Thresholds of the verdicts on the logprobs that trainers report (docs/mismatch.md)."""

    min_tokens: int = described("Scored tokens that a verdict requires.", 2000, ge=100)
    numeric: float = described("`numeric`: the mean difference is below this, in nats.", 0.05, gt=0)
    slope: float = described(
        "`temperature`: the slope of the trainer's logprobs on the recorded ones differs by this from 1.", 0.03, gt=0
    )
    endpoint_ratio: float = described("`stale_endpoint`: how many times more an endpoint differs.", 1.5, gt=1)
    boundary_ratio: float = described(
        "`boundaries`: how many times more first tokens or later replies differ.",
        3,
        gt=1,
    )
    lag_ratio: float = described("`lag`: how many times more older versions differ.", 1.5, gt=1)
    tail_share: float = described("`heavy_tail`: this share of the tokens differs by more than 0.5.", 0.001, gt=0, lt=1)


class LogSettings(Section):
    """Logging: one line per call, without content and keys."""

    level: Literal["debug", "info", "warning", "error"] = described("Minimum severity of log messages.", "info")
    format: Literal["text", "json"] = described(
        "Log format: text for people, or json with one object per line.", "text"
    )
    sample: float = described(
        "Share of rollouts with logged successful calls, all or none of each; failed and slow calls always are.",
        1,
        ge=0,
        le=1,
    )
    slow_s: float = described("Duration from which a call is slow, with log.sample.", 30, gt=0)


def _check_pattern(pattern: str) -> str:
    if not pattern.replace("*", "").strip():
        raise ValueError(f"invalid pattern {pattern!r}: use text, with * for any characters")
    return pattern


Kind: TypeAlias = Literal["main", "sub-agent", "compaction", "auxiliary"]
Preset: TypeAlias = Literal[
    "agno", "aider", "autogen", "claude-code", "cline", "codex", "crewai", "gemini-cli", "google-adk", "langchain",
    "mini-swe-agent", "openclaw", "opencode", "pi", "qwen-code", "smolagents", "strands",
]  # fmt: skip
Pattern: TypeAlias = Annotated[str, Field(max_length=1000), AfterValidator(_check_pattern)]


class ThreadRuleSettings(Section):
    """A rule: the kind of calls that match all its patterns, in which `*` is any characters."""

    kind: Kind = Field(description="The kind of the thread.")
    model: Pattern | None = described("Pattern of the requested model.")
    system: Pattern | None = described("Pattern of the whole system prompt.")
    user: Pattern | None = described("Pattern of the last user message.")
    tools: Pattern | None = described("Pattern of the sorted names of the tools.")
    agent: Pattern | None = described("Pattern of the header X-Agent-Name.")

    @model_validator(mode="after")
    def _has_a_pattern(self) -> Self:
        if all(each is None for each in (self.model, self.system, self.user, self.tools, self.agent)):
            raise ValueError("a rule requires model, system, user, tools or agent")
        return self


class ThreadSettings(Section):
    """The threads of rollouts (docs/threads.md)."""

    export: Literal["all", "agents", "main"] | None = described(
        "`threads` of exports and claims that set none: `main`, `agents` or `all` (docs/threads.md). "
        "Default: `agents` with presets, else `all`."
    )
    presets: list[Preset] = described("Agents to recognize (docs/threads.md).", [])
    rules: list[ThreadRuleSettings] = described(
        "Rules for kinds of threads; the first match applies.", [], max_length=100
    )

    @property
    def default(self) -> Literal["all", "agents", "main"] | None:
        """Which threads are exported if a request does not choose; None for all of them, if nothing is configured."""
        return self.export or ("agents" if self.presets else None)


class ArchiveSettings(Section):
    """The archive: finished rollouts as Parquet files (docs/datasets.md). It requires the extra `archive`."""

    url: str | None = described(
        "Path or URL to which `serve` archives rollouts (docs/datasets.md), such as s3://bucket/rollouts."
    )
    when: Literal["acknowledged", "finished"] = described(
        "finished; or acknowledged: members of a group only once its batch is acknowledged or it is dropped.",
        "acknowledged",
    )
    older_than_s: float = described("Time without a change after which such a rollout is archived.", 3600, ge=0)
    delete: bool = described("Whether archived rollouts are deleted from the store.", default=False)
    memory_share: float | None = described(
        "Share of maxmemory of the store's fullest server above which the oldest rollouts leave "
        "before `older_than_s`, with `delete`. Default: only age decides.",
        gt=0,
        lt=1,
    )
    interval_s: float = described("Time between two sweeps; each writes new files.", 3600, gt=0)
    rollouts_per_file: int = described("Maximum rollouts in a file.", 1000, ge=1)
    buffer_bytes: int = described("Memory for a row group. Less makes larger files.", 2**25, gt=0)

    @model_validator(mode="after")
    def _deletes_to_save_memory(self) -> Self:
        if self.memory_share is not None and not self.delete:
            raise ValueError("archive.memory_share requires archive.delete: true, without which no memory is saved")
        return self
