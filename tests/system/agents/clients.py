"""The programs of docs/clients.md (`PAGE`) and the tool loops of programs/ (`LOOPS`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

WHOLE, STREAMED = "whole", "streamed"
BOTH = (WHOLE, STREAMED)


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the page: heading, runtime of its program, and the package of its version."""

    heading: str
    runs: str
    package: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A tool loop of programs/: its client and package, its runtime and file, and its dialect.

    `drift` is the known kind of drift without continuation, by framing (whole or streamed), and `reflecting` the same
    where the model reasons; docs/clients.md gives the reasons. A loop without an entry must be linear. `refused` is the
    reason why a loop that rewrites its history is more than one sequence in mode `append`; the others must be one.
    `conversations` is their number in the successful calls. `aside` is a text in the request of the one call beside
    the main conversation.
    """

    client: str
    package: str
    runs: str
    file: str
    dialect: str
    ways: tuple[str, ...] = BOTH
    task: str = "Where is it dry?"
    answer: str = "In Tromsø, for four days."
    calls: tuple[tuple[str, float], ...] = (("Bergen", 2.5), ("Oslo", 1), ("Tromsø", 4))
    drift: Mapping[str, str] = field(  # from vLLM, which passes arguments to its template as objects
        default_factory=lambda: {WHOLE: "tool_call_rewritten", STREAMED: "tool_call_rewritten"}
    )
    reflecting: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    conversations: int = 1
    aside: str | None = None

    @property
    def name(self) -> str:
        """The test's ID."""
        return f"{self.client}, {self.dialect}"


PAGE = (
    Client("OpenAI, Python", "main", "openai"),
    Client("Anthropic, Python", "main", "anthropic"),
    Client("Google Gen AI, Python", "main", "google-genai"),
    Client("curl", "bash", "curl"),
    Client("LiteLLM", "litellm", "litellm"),
    Client("Vercel AI SDK", "node", "ai"),
)

_FIXED = "one\ntwö\n"
_STRIPPED = dict.fromkeys(BOTH, "reasoning_stripped")
_REDUCED = dict.fromkeys(BOTH, "edited, reasoning_stripped")
_EDITED = dict.fromkeys(BOTH, "edited")

LOOPS = (
    Loop("OpenAI, Python", "openai", "main", "openai_sdk.py", "chat"),
    Loop("OpenAI, Python", "openai", "main", "openai_sdk.py", "responses"),
    Loop("OpenAI, JavaScript", "openai", "node", "openai_sdk.mjs", "chat", reflecting=_STRIPPED),
    Loop("OpenAI, JavaScript", "openai", "node", "openai_sdk.mjs", "responses"),
    Loop("Anthropic, Python", "anthropic", "main", "anthropic_sdk.py", "messages"),
    Loop("Anthropic, JavaScript", "@anthropic-ai/sdk", "node", "anthropic_sdk.mjs", "messages"),
    Loop("Google Gen AI, Python", "google-genai", "main", "google_sdk.py", "gemini"),
    Loop("Google Gen AI, JavaScript", "@google/genai", "node", "google_sdk.mjs", "gemini"),
    Loop("OpenAI Agents SDK", "openai-agents", "main", "openai_agents.py", "chat"),
    Loop("OpenAI Agents SDK", "openai-agents", "main", "openai_agents.py", "responses"),
    Loop("OpenAI Agents SDK", "openai-agents", "main", "openai_agents.py", "responses, chained"),
    Loop("pydantic-ai", "pydantic-ai-slim", "main", "pydantic_agent.py", "chat"),
    Loop("pydantic-ai", "pydantic-ai-slim", "main", "pydantic_agent.py", "responses"),
    Loop("pydantic-ai", "pydantic-ai-slim", "main", "pydantic_agent.py", "messages"),
    Loop("LangChain", "langchain-openai", "main", "langchain_agent.py", "chat", reflecting=_STRIPPED),
    Loop("LangChain", "langchain-openai", "main", "langchain_agent.py", "responses", reflecting=_STRIPPED),
    Loop("LangChain", "langchain-anthropic", "main", "langchain_agent.py", "messages"),
    Loop(
        "smolagents", "smolagents", "main", "smol_agent.py", "chat",
        drift=_EDITED, reflecting=_EDITED, refused="edited",
    ),
    Loop("Strands", "strands-agents", "litellm", "strands_agent.py", "chat", ways=(STREAMED,), reflecting=_STRIPPED),
    Loop("AutoGen", "autogen-agentchat", "litellm", "autogen_agent.py", "chat", reflecting=_STRIPPED),
    Loop("Google ADK", "google-adk", "litellm", "adk_agent.py", "chat"),
    Loop("Agno", "agno", "litellm", "agno_agent.py", "chat", reflecting=_STRIPPED),
    Loop(
        "Agno", "agno", "litellm", "agno_agent.py", "responses", refused="edited",
        drift=dict.fromkeys(BOTH, "edited, tool_call_rewritten"), reflecting=_REDUCED,
    ),
    Loop(
        "DSPy", "dspy", "litellm", "dspy_agent.py", "chat", ways=(WHOLE,), calls=(("Tromsø", 4),), conversations=3,
    ),
    Loop(
        "CrewAI", "crewai", "crewai", "crew_agent.py", "chat", refused="edited",
        drift=dict.fromkeys(BOTH, "edited, tool_call_rewritten"), reflecting=_REDUCED,
    ),
    Loop(
        "mini-swe-agent", "mini-swe-agent", "litellm", "swe_agent.py", "chat",
        ways=(WHOLE,), task="Fix the file.", answer=_FIXED, calls=(),
    ),
    Loop(
        "aider", "aider-chat", "aider", "aider_chat.py", "chat", ways=(STREAMED,), refused="edited",
        task="Repair the file with aider.", answer=_FIXED, calls=(),
    ),
    Loop(
        "Codex", "@openai/codex", "cli", "codex.sh", "responses",
        ways=(STREAMED,), task="Repair the file.", answer=_FIXED, calls=(),
    ),
    Loop(
        "Codex, default model", "@openai/codex", "cli", "codex_default.sh", "responses",
        ways=(STREAMED,), task="Repair the file.", answer=_FIXED, calls=(),
    ),
    Loop(
        "Claude Code", "@anthropic-ai/claude-code", "cli", "claude_code.sh", "messages",
        ways=(STREAMED,), task="Repair the file.", answer=_FIXED, calls=(),
    ),
    Loop(
        "Gemini CLI", "@google/gemini-cli", "cli", "gemini_cli.sh", "gemini", ways=(STREAMED,),
        task="Repair the file with run_shell_command.", answer=_FIXED, calls=(),
    ),
    Loop(
        "opencode", "opencode-ai", "cli", "opencode.sh", "chat", ways=(STREAMED,),
        task="Repair the file with bash.", answer=_FIXED, calls=(), aside="Generate a title for this conversation:",
    ),
    Loop(
        "Qwen Code", "@qwen-code/qwen-code", "cli", "qwen_code.sh", "chat", ways=(STREAMED,),
        task="Repair the file with run_shell_command.", answer=_FIXED, calls=(),
    ),
    Loop(
        "pi", "@mariozechner/pi-coding-agent", "cli", "pi.sh", "chat", ways=(STREAMED,),
        task="Repair the file with bash.", answer=_FIXED, calls=(),
    ),
    Loop(
        "Cline", "cline", "cli", "cline.sh", "chat", ways=(STREAMED,),
        task="Repair the file with run_commands.", answer=_FIXED, calls=(),
    ),
    Loop(
        "OpenClaw", "openclaw", "cli", "openclaw.sh", "chat", ways=(STREAMED,), refused="edited",
        task="Repair the file with exec.", answer=_FIXED, calls=(),
    ),
)  # fmt: skip
