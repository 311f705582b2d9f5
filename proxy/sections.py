"""Sections of the settings: what they all are, and those of the store and of what is recorded.

Holds models with their defaults and sentences. It must not read anything: `config` does that.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, SecretStr


class Section(BaseModel):
    """A section of the configuration: unknown names are refused, so that a misspelt setting is not a silent one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_caps(cap: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a cap by the window of what is no bound on tokens."""
    for name, bound in cap.items():
        if bound == "auto" and name not in {"max_tokens", "max_completion_tokens"}:
            raise ValueError(
                f"{name} cannot be capped by the window: only max_tokens and max_completion_tokens can be auto"
            )
    return cap


Caps: TypeAlias = Annotated[dict[str, FiniteFloat | Literal["auto"]], AfterValidator(_check_caps)]


class StoreSettings(Section):
    """Where steps are kept."""

    url: str = Field(
        "embedded:./data",
        description="embedded:PATH, redis://, rediss://, redis+cluster:// or rediss+cluster://.",
    )
    username: str | None = Field(None, description="ACL user of the store; give it by environment.")
    password: SecretStr | None = Field(None, description="Password of the store; give it by environment.")
    ca_file: Path | None = Field(None, description="Certificate authority for rediss://; the system's if none.")
    prefix: str = Field("tt", min_length=1, description="First part of every key.")
    ttl_s: int | None = Field(None, gt=0, description="Rollouts idle for so long expire; never if none.")
    durability: Literal["acknowledged", "fsync", "replicated"] = Field(
        "acknowledged", description="When a step counts as stored: at the reply, on disk, or on replicas."
    )
    replicas: int = Field(1, ge=1, description="How many replicas must have it, with durability: replicated.")
    timeout_s: float = Field(10, gt=0, description="Longest wait for the store.")
    max_connections: int = Field(64, gt=0, description="Connections to the store at once; more calls wait.")
    on_failure: Literal["fail", "spool"] = Field(
        "fail",
        description="A step that the store cannot take: its call fails, or it goes to a journal on disk until the store is "
        "back (docs/reliability.md).",
    )
    spool_path: Path = Field(Path("spool/steps"), description="The journal of this process, with on_failure: spool.")


class RecordSettings(Section):
    """What is recorded, and at what cost."""

    include_reasoning: Literal["override", "as_asked"] = Field(
        "override",
        description="A client's include_reasoning: false costs vLLM's ids. override: ask for reasoning, and hide it; "
        "as_asked: leave it, and flag the step.",
    )
    logprobs: Literal["full", "sampled", "off"] = Field(
        "full",
        description="The logprobs that engines are asked for where clients ask none: each sampled token's (full), those in "
        "the cheapest form (sampled), or none (off); ids are always asked for (docs/exactness.md).",
    )
    streaming: Literal["auto", "live", "replay"] = Field(
        "auto",
        description="How streamed calls go upstream: as streams (live), unstreamed and answered as a stream (replay), or "
        "by what the engine is known to lose in streams (auto; docs/exactness.md).",
    )
    keep_alive_s: float = Field(
        10, gt=0, description="A replayed call's client gets an SSE comment so often while it waits."
    )


class DialectSettings(Section):
    """What dialects by way of chat are translated to (docs/dialects.md)."""

    thinking: dict[str, Any] = Field(
        {},
        description="Fields of the chat body for calls that ask for reasoning: {chat_template_kwargs: {…}}.",
    )
    not_thinking: dict[str, Any] = Field({}, description="Fields of the chat body for calls that forbid it.")
    ignore_hosted_tools: bool = Field(
        default=False,
        description="Leave out tools that OpenAI's and Anthropic's servers run; else such calls are refused.",
    )
