"""Base class of the sections of the settings, and the sections of the store, recording and dialects."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, SecretStr


class Section(BaseModel):
    """A section of the settings. Unknown names are rejected, so that a typo does not go unnoticed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    keep_alive_interval_s: float = Field(
        10, gt=0, description="Seconds between SSE comments to a client that waits for a replayed call."
    )


class DialectSettings(Section):
    """Dialects that are translated to chat completions (docs/dialects.md)."""

    thinking: dict[str, Any] = Field(
        {}, description="Chat fields for calls that enable reasoning: {chat_template_kwargs: {…}}."
    )
    not_thinking: dict[str, Any] = Field({}, description="Chat fields for calls that disable reasoning.")
    ignore_hosted_tools: bool = Field(
        default=False,
        description="Remove tools that run on OpenAI's or Anthropic's servers; otherwise such calls are rejected.",
    )
