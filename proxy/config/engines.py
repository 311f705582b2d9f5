"""The sections of the engines: endpoints, policies and scorers."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, FiniteFloat, SecretStr, model_validator

from proxy.config.sections import BaseUrl, Key, Section, check_header_value, described

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
HeaderValue = Annotated[SecretStr, AfterValidator(lambda value: check_header_value(value, "header value"))]

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
    """How calls name their session to a router in front of engines (docs/operations.md)."""

    router: Literal["sgl-router", "vllm-router", "production-stack", "llm-d", "litellm"] | None = described(
        "The router: sgl-router."
    )
    header: HeaderName | None = described("The header of any other router.")
    field: str | None = described(
        "A field of the body instead: user, or session_params.session_id.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$",
    )
    of: Literal["rollout", "thread"] = described(
        "A session is a rollout, or a thread of it (by X-Agent-Name, else by the messages up to the user's first).",
        "rollout",
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


SamplingDefault = Literal[
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
]


class EndpointSettings(Section):
    """One engine endpoint that serves the policy."""

    url: BaseUrl = Field(description="Base URL without /v1, such as http://127.0.0.1:8000.")
    name: str = described("Name in records and metrics. Default: host and port.", "")
    kind: Literal["auto", "vllm", "sglang", "llamacpp", "plain"] = described(
        "Type; auto detects it. plain: any other OpenAI-compatible engine, recorded as text.", "auto"
    )
    api_key: Key | None = described("Its API key; clients' keys are not forwarded.")
    logprobs_mode: (
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits", "after_temperature_logprobs"]
        | None
    ) = described("What it computes logprobs from (vLLM: --logprobs-mode). Default: by type.")
    sampling_defaults: dict[SamplingDefault, int | FiniteFloat] = described(
        "Its defaults of sampling parameters, for steps. Read from vLLM with --enable-scale-out and from llama.cpp.",
        {},
    )
    streaming: Literal["auto", "live", "replay"] | None = described(
        "How streamed calls are sent to it. Default: record.streaming."
    )
    tokenizer: str | None = described(
        "Path or Hugging Face name of its tokenizer, for reports, include=retokenized and X-Reply-Tokens."
    )
    max_in_flight: int | None = described(
        "Maximum concurrent calls of a process; others queue, fair between rollouts.", ge=1
    )
    image_tokens: list[Annotated[int, Field(ge=0)]] | None = described(
        "Ids that its prompts repeat for an image; [] if a model splits images (docs/images.md). Default: looked up."
    )
    headers: dict[HeaderName, HeaderValue] = described("Headers of every request to it.", {})
    session: SessionSettings | None = described(
        "How calls name their session to a router, which then sends all of them to one engine (docs/operations.md)."
    )
    version: str | None = described("Version to record. Default: as reported.")
    models: list[Annotated[str, Field(min_length=1)]] = described(
        "Models that it serves, with `*` for any characters. Default: as it lists them.",
        [],
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

    endpoints: EndpointList = described("Engine endpoints. Without any, `serve` starts the simulator.", [])
    connect_timeout_s: float = described("Timeout for connecting to an engine.", 10, gt=0)
    read_timeout_s: float | None = described("Maximum time between two reads of a response. Default: unlimited.", gt=0)
    ca_file: Path | None = described("CA certificates for https:// engines. Default: the system's.")
    max_connections: int = described("Maximum concurrent connections to engines; 0 is unlimited.", 0, ge=0)
    max_attempts: int = described("Endpoints that a call tries at most.", 2, ge=1)
    health_interval_s: float = described("Approximate time between health checks (GET /health).", 5, gt=0)
    eject_after: int = described("Consecutive failures that eject an endpoint.", 3, ge=1)
    base_ejection_s: float = described("Duration of the first ejection; it doubles each time.", 1, gt=0)
    max_ejection_s: float = described("Maximum duration; then a successful check ends the ejection.", 30, gt=0)
    max_queued: int = described("Calls that wait for max_in_flight; more get 429.", 10_000, ge=0)
    queue_timeout_s: float = described("How long a queued call waits; then 429.", 600, gt=0)
    max_event_bytes: int = described("Maximum size of one event in an engine's stream.", 2**26, gt=0)
    max_response_bytes: int = described(
        "Maximum size of a decompressed response. Parsed, it may take four times as much memory.",
        2**28,
        gt=0,
    )
    plan_cache_bytes: int = described("Memory of a process for the prepared calls of each endpoint.", 2**23, ge=0)
    text_cache_bytes: int = described(
        "Memory of a process for texts of tokens: two large vocabularies.",
        2**26,
        ge=0,
    )
    passthrough: list[str] = described(
        "Paths that are forwarded and not recorded; other unknown paths return 404.",
        ["/v1/embeddings", "/tokenize", "/detokenize"],
    )


_DEFAULT: Final = "default"
_MAX_POLICIES: Final = 32  # each heartbeat of a process has all of them
POLICY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PolicySettings(Section):
    """One policy."""

    models: list[Annotated[str, Field(min_length=1)]] = described(
        "Its models at the engines, with `*` for any characters. The first policy that lists a model has it, "
        "else `default`.",
        [],
    )
    train: bool = described("Whether its steps are exported by default, and can be claimed.", default=True)


def _check_policies(policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
    if len(policies) > _MAX_POLICIES:
        raise ValueError(f"{len(policies)} policies are configured; at most {_MAX_POLICIES} are supported")
    listed: dict[str, str] = {}
    for name, policy in policies.items():
        if not POLICY_NAME.fullmatch(name):
            raise ValueError(
                f"invalid policy name {name!r}: use up to 64 letters, digits, '.', '_' and '-', and no sign first"
            )
        if (name == _DEFAULT) == bool(policy.models):
            raise ValueError(
                "policies.default accepts no models: it has the models of no other policy"
                if policy.models
                else f"policies.{name}.models is required"
            )
        for model in policy.models:
            if listed.setdefault(model, name) != name:
                raise ValueError(f"the model {model!r} is listed by the policies {listed[model]!r} and {name!r}")
    return policies


PolicyTable: TypeAlias = Annotated[dict[str, PolicySettings], AfterValidator(_check_policies)]


def with_default(policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
    """Return the policies with the default one, which is trained if no other policy is configured."""
    return policies if _DEFAULT in policies else {**policies, _DEFAULT: PolicySettings(train=not policies)}


_POLICY: Final = "policy"  # the name of the policy's own engines


class ScorerSettings(Section):
    """One scorer, for example a teacher. It receives no calls of agents."""

    endpoints: Annotated[EndpointList, Field(min_length=1)] = Field(
        description="Its engines (vLLM or SGLang, the same weights): the fields of engines.endpoints."
    )
    model: Annotated[str, Field(min_length=1)] | None = described(
        "Its model at the engines. Default: the first that one lists."
    )
    version: Annotated[str, Field(min_length=1)] | None = described(
        "Version of its weights, by which scores are cached: change it with them."
    )


def _check_scorers(scorers: dict[str, ScorerSettings]) -> dict[str, ScorerSettings]:
    for name in scorers:
        if name == _POLICY or not POLICY_NAME.fullmatch(name):
            raise ValueError(
                f"invalid scorer name {name!r}: use up to 64 letters, digits, '.', '_' and '-', no sign first, and not "
                f"{_POLICY!r}, which is the name of the policy's own engines"
            )
    return scorers


ScorerTable: TypeAlias = Annotated[dict[str, ScorerSettings], AfterValidator(_check_scorers)]


class RescoreSettings(Section):
    """Logprobs of recorded token ids by an engine now, in exports and claims with `rescore`."""

    scorers: ScorerTable = described("Engines that only score, by name.", {})
    timeout_s: float = described("Maximum time of a scoring request, also in the engine's queue.", 300, gt=0)
    max_in_flight: int | None = described(
        "Rows that each scorer scores for a process at a time. Default: 8, and 1 at each engine that "
        "lists LoRA adapters.",
        ge=1,
    )
    cache_s: int = described("How long the store keeps scores.", 86_400, ge=1)
    cache_bytes: int = described("Maximum size of all scores in the store; the oldest are removed.", 2**29, ge=0)
