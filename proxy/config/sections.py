"""Base class of the sections of the settings, and the sections of the store, recording and dialects."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

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


class Section(BaseModel):
    """A section of the settings. Unknown names are rejected, so that a typo does not go unnoticed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_listen(listen: str) -> str:
    split_listen(listen)
    return listen


Listen: TypeAlias = Annotated[str, AfterValidator(_check_listen)]
HostPattern: TypeAlias = Annotated[str, AfterValidator(host_pattern)]


def _check_caps(cap: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if a field other than the maximum number of tokens has the cap `auto`."""
    for name, bound in cap.items():
        if bound == "auto" and name not in {"max_tokens", "max_completion_tokens"}:
            raise ValueError(
                f"invalid cap 'auto' for {name}: only max_tokens and max_completion_tokens accept it; use a number"
            )
    return cap


Caps: TypeAlias = Annotated[dict[str, FiniteFloat | Literal["auto"]], AfterValidator(_check_caps)]


class StoreSettings(Section):
    """The store of rollouts and steps."""

    url: str = Field(
        "embedded:./data",
        description="URL of the store: embedded:PATH, redis://, rediss://, redis+cluster:// or rediss+cluster://.",
    )
    username: str | None = Field(None, description="ACL user of the store. Set it by environment variable.")
    password: SecretStr | None = Field(None, description="Password of the store. Set it by environment variable.")
    ca_file: Path | None = Field(None, description="CA certificates for rediss://. Default: the system's.")
    prefix: str = Field("tt", min_length=1, description="Prefix of every key.")
    ttl_s: int | None = Field(None, gt=0, description="Seconds after which idle rollouts expire. Default: never.")
    durability: Literal["acknowledged", "fsync", "replicated"] = Field(
        "acknowledged",
        description="When a step counts as stored: acknowledged by the store, fsync to disk, or on replicas.",
    )
    replicas: int = Field(1, ge=1, description="Number of replicas that must have a step, with durability: replicated.")
    timeout_s: float = Field(10, gt=0, description="Timeout of store requests in seconds.")
    max_connections: int = Field(64, gt=0, description="Maximum concurrent connections to the store; more calls wait.")
    on_failure: Literal["fail", "spool"] = Field(
        "fail",
        description="If a step cannot be stored: fail the call, or spool the step to a journal on disk until the store "
        "is reachable (docs/reliability.md).",
    )
    spool_path: Path = Field(Path("spool/steps"), description="Journal of this process, with on_failure: spool.")


class RecordSettings(Section):
    """What is recorded."""

    include_reasoning: Literal["override", "as_requested"] = Field(
        "override",
        description="vLLM returns no token ids with include_reasoning: false. override: request the reasoning and remove "
        "it from the response; as_requested: send the field unchanged and flag the step.",
    )
    logprobs: Literal["full", "sampled", "off"] = Field(
        "full",
        description="Logprobs to request if the client requests none: full (of each sampled token), sampled (in the "
        "cheapest form) or off. Token ids are always requested (docs/exactness.md).",
    )
    streaming: Literal["auto", "live", "replay"] = Field(
        "auto",
        description="How streamed calls are sent: live (streamed), replay (unstreamed, and streamed to the client) or "
        "auto (by what the engine loses in streams; docs/exactness.md).",
    )
    sampling_masks: bool = Field(
        default=False,
        description="Whether to request the tokens that top-k, top-p and min-p kept, and logprobs over these, from SGLang. It "
        "returns them for unstreamed chat calls with a top_k (docs/exactness.md).",
    )
    routed_experts: bool = Field(
        default=False,
        description="Whether to request the experts to which a mixture-of-experts model routed each token, from SGLang for "
        "chat calls. They are large (docs/exactness.md).",
    )
    keep_alive_interval_s: float = Field(
        10,
        gt=0,
        description="Seconds between SSE comments to a client that waits for a replayed call, or for what follows a tool call.",
    )


def _mode(value: Any) -> Any:
    """Return `off` for false, as YAML 1.1 parses it."""
    return "off" if value is False else value


ContinuationMode = Annotated[Literal["off", "faithful", "append"], BeforeValidator(_mode)]


class ContinuationSettings(Section):
    """The continuation of earlier steps by their token ids (docs/continuation.md)."""

    mode: ContinuationMode = Field(
        "faithful",
        description="off: the engine renders each call; faithful: token ids are kept where the chat template keeps the turn; "
        "append: token ids are always kept, with reasoning.",
    )
    timeout_s: float = Field(
        60,
        gt=0,
        description="Seconds for the engine's renderings of a call, which is then sent unchanged. After three such calls in a "
        "row, an engine is not asked for a minute.",
    )


class DialectSettings(Section):
    """Dialects that are translated to chat completions (docs/dialects.md)."""

    thinking: dict[str, Any] = Field(
        {}, description="Chat fields for calls that enable reasoning: {chat_template_kwargs: {…}}."
    )
    not_thinking: dict[str, Any] = Field({}, description="Chat fields for calls that disable reasoning.")
    ignore_hosted_tools: bool = Field(
        default=False,
        description="Remove tools that run on OpenAI's, Anthropic's or Google's servers; otherwise such calls are rejected.",
    )


BaseUrl = Annotated[str, AfterValidator(base_url)]


def _check_header_value(value: SecretStr, what: str) -> SecretStr:
    text = value.get_secret_value()
    if not text.strip() or text != text.strip() or not (text.isascii() and text.isprintable()):
        raise ValueError(f"invalid {what}: it must be printable ASCII, not empty, and without spaces around it")
    return value


Key = Annotated[SecretStr, AfterValidator(lambda key: _check_header_value(key, "API key"))]

# They frame a message, or are set for each request.
_RESERVED_HEADERS = frozenset(
    {"host", "connection", "content-length", "content-type", "content-encoding", "transfer-encoding", "accept-encoding",
     "expect", "te", "trailer", "upgrade", "keep-alive", "proxy-connection"}
)  # fmt: skip


def _check_header_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}", name):  # a token (RFC 9110, 5.6.2)
        raise ValueError(f"invalid header name {name!r}: use letters, digits and -")
    if name.lower() in _RESERVED_HEADERS:
        raise ValueError(f"the header {name} is set for each request; use another one")
    return name


HeaderName = Annotated[str, AfterValidator(_check_header_name)]
HeaderValue = Annotated[SecretStr, AfterValidator(lambda value: _check_header_value(value, "header value"))]

# Read in the routers' documentation or source, and not run:
# - SGLang Model Gateway (formerly sgl-router), policies consistent_hashing and manual: its docs/configuration/routing.md.
# - vLLM Router 0.1.16, policy consistent_hash: docs/load_balancing/README.md, where it has precedence over X-User-ID.
# - vLLM's production stack, --routing-logic session: --session-key names the header and has no default.
# - llm-d router, session-affinity-scorer or -filter with algorithm session_id_header (llm-d/llm-d-router#2238): headerName.
# - LiteLLM 1.91, optional_pre_call_checks: [session_affinity] (BerriAI/litellm-docs#1121); also metadata.session_id.
_ROUTER_HEADERS: Final = {
    "sgl-router": "X-SMG-Routing-Key",
    "vllm-router": "X-Session-ID",
    "production-stack": "X-Session-ID",
    "llm-d": "X-Session-Token",
    "litellm": "X-LiteLLM-Session-ID",
}


class SessionSettings(Section):
    """How calls name their session to a router in front of engines (docs/fleet.md)."""

    router: Literal["sgl-router", "vllm-router", "production-stack", "llm-d", "litellm"] | None = Field(
        None, description="The router, which determines the header."
    )
    header: HeaderName | None = Field(None, description="The header, for any other router.")
    field: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$",
        description="A field of the body instead, at the top level or in an object: session_params.session_id.",
    )
    of: Literal["rollout", "thread"] = Field(
        "rollout",
        description="What a session is: a rollout; or a thread of it, by X-Agent-Name or else by the messages up to the first "
        "one of the user.",
    )

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if sum(place is not None for place in (self.router, self.header, self.field)) != 1:
            raise ValueError("session requires one of router, header and field")
        return self

    @property
    def header_name(self) -> str | None:
        """The header with the session, if it is not in the body."""
        return self.header if self.router is None else _ROUTER_HEADERS[self.router]


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
    image_tokens: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="Ids of the tokens that its prompts repeat for an image; [] if a model splits images. Default: looked up.",
    )
    headers: dict[HeaderName, HeaderValue] = Field(
        {}, description="Headers of every request to this engine, such as those of a gateway in front of it."
    )
    session: SessionSettings | None = Field(
        None,
        description="How calls name their session to a router in front of engines, which then sends all of them to one engine: "
        "{router: sgl-router}, {header: X-Session} or {field: user} (docs/fleet.md).",
    )
    version: str | None = Field(None, description="Engine version to record. Default: as the engine reports.")
    models: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Names of the models that it serves, with `*` for any characters, such as qwen-*. Calls of other models "
        "are sent to other endpoints. Default: as the engine lists them.",
    )

    @model_validator(mode="after")
    def _has_one_authorization(self) -> Self:
        if self.api_key is not None and any(name.lower() == "authorization" for name in self.headers):
            raise ValueError("api_key is sent in the header Authorization; set only one of them")
        return self

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
    max_response_bytes: int = Field(
        2**28,
        gt=0,
        description="Maximum bytes of a response of an engine, decompressed. Parsed, it may take four times as much memory.",
    )
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
    cut_surplus_calls: bool = Field(
        default=True,
        description="Whether calls in flight of rollouts that their over-sampled group does not need are stopped at the "
        "engine, within about a second.",
    )
    max_paused: int = Field(
        10_000,
        ge=0,
        description="Maximum number of calls of a policy that wait during its pause in one process; more return 429.",
    )
    pause_timeout_s: float = Field(
        600, gt=0, description="Maximum seconds that a call waits during a pause; then it returns 429."
    )
    rollout_cache_bytes: int = Field(
        2**29,
        ge=0,
        description="Memory of a process for the rollouts of its calls: newest bodies, prompts and turns. What is forgotten is "
        "read from the store again.",
    )
    probes: ProbeSettings = Field(ProbeSettings(), description="Health probes, which are forwarded and not recorded.")


class GroupSettings(Section):
    """Groups that `POST /groups` opens: the limits of their rollouts, and rewards that are set late (docs/training-loop.md)."""

    idle_s: float | None = Field(
        3600,
        gt=0,
        description="`idle_s` of rollouts of groups that set none: seconds without a call after which a rollout that had one "
        "is aborted. null: none.",
    )
    start_s: float = Field(
        1800,
        gt=0,
        description="`start_s` of rollouts with `idle_s` that set none: seconds until the first call, after which a rollout "
        "without one is aborted.",
    )
    reward_s: float = Field(
        600,
        ge=0,
        description="Seconds after a group is complete in which claims wait for the rewards of rollouts that were finished "
        "without one. 0: claims do not wait.",
    )
    earlier_epochs: Literal["drop", "take"] = Field(
        "drop",
        description="What claims do with groups of an earlier epoch of the policy, unless they choose. `take`: only claims "
        "without `max_staleness` take them.",
    )


class ControlSettings(Section):
    """The control API."""

    api_keys: list[Key] = Field([], description="API keys for the control API. Without any, it requires no key.")
    listen: Listen | None = Field(
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
