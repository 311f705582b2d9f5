"""The section of the threads: rules for their kinds, and which threads are exported by default."""

from typing import Annotated, Final, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, Field, model_validator

from proxy.config.sections import Section


def _check_pattern(pattern: str) -> str:
    if not pattern.replace("*", "").strip():
        raise ValueError(f"invalid pattern {pattern!r}: use text, with * for any characters")
    return pattern


Kind: TypeAlias = Literal["main", "sub-agent", "compaction", "auxiliary"]
Preset: TypeAlias = Literal[
    "agno", "aider", "autogen", "claude-code", "cline", "codex", "crewai", "gemini-cli", "google-adk", "langchain",
    "openclaw", "opencode", "pi", "qwen-code", "smolagents", "strands",
]  # fmt: skip
_PRESETS: Final = ", ".join(get_args(Preset))
Pattern: TypeAlias = Annotated[str, Field(max_length=1000), AfterValidator(_check_pattern)]


class ThreadRuleSettings(Section):
    """A rule: the kind of calls that match all its patterns, in which `*` is any characters."""

    kind: Kind = Field(description="The kind of the thread.")
    model: Pattern | None = Field(None, description="Pattern of the model that the call names.")
    system: Pattern | None = Field(None, description="Pattern of the whole system prompt.")
    user: Pattern | None = Field(None, description="Pattern of the whole text of the last user message.")
    tools: Pattern | None = Field(
        None, description="Pattern of the sorted names of the call's tools, with spaces between."
    )
    agent: Pattern | None = Field(None, description="Pattern of the header X-Agent-Name.")

    @model_validator(mode="after")
    def _has_a_pattern(self) -> Self:
        if all(each is None for each in (self.model, self.system, self.user, self.tools, self.agent)):
            raise ValueError("a rule requires model, system, user, tools or agent")
        return self


class ThreadSettings(Section):
    """The threads of rollouts (docs/threads.md)."""

    export: Literal["all", "agents", "main"] | None = Field(
        None,
        description="Which threads exports and claims have by default: `main`, `agents` (all but auxiliary calls) or `all`. "
        "Default: `agents` with presets, else `all`.",
    )
    presets: list[Preset] = Field(
        [], description=f"Agents whose auxiliary calls and compactions are recognized: {_PRESETS}."
    )
    rules: list[ThreadRuleSettings] = Field(
        [], max_length=100, description="Rules for the kinds of threads. The first rule that a call matches applies."
    )

    @property
    def default(self) -> Literal["all", "agents", "main"] | None:
        """Which threads are exported if a request does not choose; None for all of them, if nothing is configured."""
        return self.export or ("agents" if self.presets else None)
