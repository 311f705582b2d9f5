"""What clients and operators name: the agent of a call, rules for the kinds of threads, and presets for known agents.

A rule has patterns of a call's model, system prompt, last user message, tools and agent. A pattern has `*` for any characters.
It is matched part by part; the time is linear in the text for any pattern.

A preset matches an agent's calls that the general rules do not recognize in every rollout, and calls with a certain text, in
the agent's version that was read. Sub-agents need no rule, because a tool calls them with their text. It also has the texts
that are different in each run of the agent: dates, times, random ids, and files that are named by them. A tape ignores them.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from proxy.trajectory.json_bytes import parse_text

AGENT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of the header `X-Agent-Name`
SUB_AGENT: Final = "sub-agent:"  # precedes the name of a task, which no header can


def agent_of(extra: Mapping[str, Any], request: Mapping[str, Any]) -> str | None:
    """Return the name of the agent that made a call, from its `extra` and its client's body; None if the client names none."""
    named = extra.get("agent")
    return named if isinstance(named, str) and named else _codex_agent(request)


def _codex_agent(request: Mapping[str, Any]) -> str | None:
    """Return the task of a sub-agent of Codex 0.169, `sub-agent:root.count` for `/root/count`.

    The sub-agents of its default model begin with the history of their caller, so that no text distinguishes them. The model
    invents the task names: rewards are compared among all sub-agents, not among tasks with the same name.
    """
    metadata = request.get("client_metadata")
    turn = metadata.get("x-codex-turn-metadata") if isinstance(metadata, dict) else None
    if not isinstance(turn, str):
        return None
    try:
        fields = parse_text(turn)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("subagent_kind") != "thread_spawn":
        return None
    path = fields.get("agent_name")
    name = path.strip("/").replace("/", ".") if isinstance(path, str) else ""
    return f"{SUB_AGENT}{name}" if AGENT_NAME.fullmatch(name) else None


ThreadKind: TypeAlias = Literal["main", "sub-agent", "compaction", "auxiliary"]
Wanted: TypeAlias = Literal["all", "agents", "main"]

KINDS_OF: Final[Mapping[Wanted, frozenset[ThreadKind]]] = {
    "all": frozenset({"main", "sub-agent", "compaction", "auxiliary"}),
    "agents": frozenset({"main", "sub-agent", "compaction"}),
    "main": frozenset({"main"}),
}


@dataclass(frozen=True, slots=True)
class ThreadRule:
    """The kind of the calls that match all its patterns; a pattern that is None matches any call."""

    kind: ThreadKind
    model: str | None = None
    system: str | None = None
    user: str | None = None
    tools: str | None = None  # of their sorted names, with spaces between them
    agent: str | None = None

    def has(self, *, model: str | None, system: str, user: str | None, tools: str, agent: str | None) -> bool:
        """Return whether a call matches. `user` is None if any user message may."""
        return (
            (self.model is None or matches(self.model, model or ""))
            and (self.agent is None or matches(self.agent, agent or ""))
            and (self.tools is None or matches(self.tools, tools))
            and (self.system is None or matches(self.system, system))
            and (self.user is None or user is None or matches(self.user, user))
        )


class RuleSearch:
    """Finds the first rule that a call matches. Patterns are compared once with each different prompt."""

    def __init__(self, rules: Sequence[ThreadRule]) -> None:
        self._rules = rules
        self._candidates: dict[Hashable, tuple[int, ...]] = {}

    def first(
        self, model: str | None, system: str, tools: frozenset[str], agent: str | None, user: Callable[[], str]
    ) -> int | None:
        """Return the index of the rule. `user` returns the last user message; it is called if a rule has a pattern of it."""
        if not self._rules:
            return None
        key = model, system, tools, agent
        if key not in self._candidates:
            names = " ".join(sorted(tools))
            self._candidates[key] = tuple(
                number
                for number, rule in enumerate(self._rules)
                if rule.has(model=model, system=system, user=None, tools=names, agent=agent)
            )
        text: str | None = None
        for number in self._candidates[key]:
            pattern = self._rules[number].user
            if pattern is None:
                return number
            text = user() if text is None else text
            if matches(pattern, text):
                return number
        return None


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches the whole text."""
    first, *middle = pattern.split("*")
    if not middle:
        return text == pattern
    last = middle.pop()
    if not text.startswith(first):
        return False
    position, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return position <= end and text.endswith(last)


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """The rules of a proxy, and which threads are exported by default; None: all of them, and rows do not name them."""

    rules: tuple[ThreadRule, ...] = ()
    default: Wanted | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """The rules for an agent, and its package and version on PyPI or npm, in which the texts were read.

    `ignore` are patterns with `*` for any characters within a line. Working directories are not among them: recorded replies
    contain their paths, so a playback in another directory would act on files that do not exist.
    """

    package: str
    version: str
    rules: tuple[ThreadRule, ...]
    ignore: tuple[str, ...]


def _by(kind: ThreadKind, system: Iterable[str], user: Iterable[str]) -> tuple[ThreadRule, ...]:
    return (*(ThreadRule(kind, system=each) for each in system), *(ThreadRule(kind, user=each) for each in user))


def _preset(
    package: str,
    version: str,
    *,
    compaction: Iterable[str] = (),
    compaction_user: Iterable[str] = (),
    others: Iterable[ThreadRule] = (),
    auxiliary: Iterable[str] = (),
    auxiliary_user: Iterable[str] = (),
    ignore: tuple[str, ...] = (),
) -> Preset:
    before = _by("compaction", compaction, compaction_user)
    return Preset(package, version, (*before, *others, *_by("auxiliary", auxiliary, auxiliary_user)), ignore)


PRESETS: Final[Mapping[str, Preset]] = {
    "agno": _preset(
        "agno", "3.1.10",
        auxiliary=(
            "Analyze the following conversation between a user and an assistant, and extract *",
            "You are a Memory Manager *",
            "You are a memory compression assistant.*",
            "You are a Learning Extractor.*",
            "You are a Session Context Manager.*",
        ),
    ),
    "aider": _preset(
        "aider-chat", "0.86.2",
        compaction=("*Briefly* summarize this partial conversation about programming.*",),
        auxiliary=("You are an expert software engineer that generates *Git commit messages *",),
        ignore=("Current date: *",),
    ),
    "autogen": _preset(
        "autogen-agentchat", "0.7.5",
        auxiliary=("You are in a role play game.*select the next role *",),
        auxiliary_user=("You are in a role play game.*select the next role *",),
    ),
    "claude-code": _preset(
        "@anthropic-ai/claude-code", "2.1.197",
        compaction_user=("*Respond with TEXT ONLY.*Your task is to create a detailed summary of *conversation*",),
        auxiliary=(
            "*Generate a concise, sentence-case title (*",
            "*Write a short summary label describing what these tool calls accomplished.*",
            "*You are an assistant for performing a web search tool use*",
            "*You are evaluating a *hook* in Claude Code.*",
            "*You are a security monitor for autonomous AI coding agents.*",
            "*Your task is to process * commands that an AI coding agent wants to run.*",
            "*You are selecting memories that will be useful to Claude Code *",
            "*You are searching for past Claude Code conversation sessions *",
        ),
        auxiliary_user=(
            "*Web page content:*Provide a concise response based *on the content above*",
            "*[SUGGESTION MODE: Suggest what the user might naturally type next *",
            "*<system-reminder>This is a side question from the user.*",
            "*The user stepped away and is coming back. Recap in *",
            "*Generate a short kebab-case name (*",
            "*Describe your most recent action in 3-5 words *",
            "*You are now acting as the memory extraction subagent.*",
            "*# Dream: Memory Consolidation*",
        ),
        ignore=(
            "Today's date is *",
            "The current month is *",  # in a tool's description
            "OS Version: *",
            "agentId: *",
            "duration_ms*</",
            "output_file: *",
            "Command running in background with ID: *",
            "Full output saved to: *",
            "<task-id>*</task-id>",
            "<tool-use-id>*</tool-use-id>",
            "<output-file>*</output-file>",
        ),
    ),
    "cline": _preset(
        "cline", "3.0.65",
        compaction=("Summarize the provided coding session into a concise continuation note *",),
        ignore=("2. Date: *",),
    ),
    "codex": _preset(
        "@openai/codex", "0.169.0",
        compaction_user=("You are performing a CONTEXT CHECKPOINT COMPACTION.*",),
        auxiliary=(
            "*You are judging one planned coding-agent action.*",
            "*## Memory Writing Agent: Phase *",
            "*You are part of an agent memory system.*",
            "*Generate a concise, single-line task title of at most *",
        ),
        ignore=(
            "<current_date>*</current_date>",
            "Chunk ID: *",
            "Wall time* seconds",
            "running with session ID *",
            # The results of the default model's tool, which runs JavaScript.
            '"chunk_id":"*"',
            '"wall_time_seconds":*,',
            '"session_id":*,',
        ),
    ),
    "crewai": _preset(
        "crewai", "1.15.30",
        compaction=("You are a precise assistant that creates structured summaries of agent *",),
        auxiliary=(
            "You analyze a query for searching memory.*",
            "You extract discrete, reusable memory statements *",
            "You analyze content to be stored in a hierarchical memory system.*",
            "You are comparing new content against existing memories *",
            "Your goal is to rewrite the user query so that it is optimized for retrieval *",
            "You extract generalizable lessons from human feedback *",
        ),
    ),
    "gemini-cli": _preset(
        "@google/gemini-cli", "0.61.0",
        compaction=("*You are a specialized system component responsible for distilling chat history *",),
        compaction_user=("### State Update: Agent Continuity*",),
        # Pages, searches and long results are read with the main system prompt and no tools.
        others=(ThreadRule("auxiliary", system="You are *CLI agent specializing in software engineering tasks.*", tools=""),),
        auxiliary=(
            "*You are a specialized Task Routing AI.*",
            "*You are a diagnostic agent that determines whether a conversational AI assistant is stuck *",
            "*You are an expert code-editing assistant*failed *edit*",
            "*You are an expert context compressor.*",
            "*You are a security expert responsible for generating fine-grained security policies *",
            "*You are a security enforcement engine.*",
        ),
        auxiliary_user=(
            "*Analyze *only* the content and structure of your immediately preceding response *",
            "Summarize the user's primary intent or goal in this conversation in ONE sentence *",
        ),
        ignore=("Today's date is *", "Process Group PGID: *"),
    ),
    "google-adk": _preset(
        "google-adk", "2.13.0",
        compaction_user=("The following is a conversation history between a user and an AI agent.*",),
    ),
    "langchain": _preset(
        "langchain", "1.4.7",
        compaction_user=("<role>\nContext Extraction Assistant\n</role>*",),
    ),
    "mini-swe-agent": _preset("mini-swe-agent", "2.4.6", ignore=("Linux * SMP *",)),
    "openclaw": _preset(
        "openclaw", "2026.9.6",
        compaction=("You are a context summarization assistant.*",),
        auxiliary=(
            "Generate a concise session title *",
            "Generate a very short topic label *",
            "You write the live status line for an AI assistant *",
            "You judge the trajectory of a running AI agent session *",
            "Write an Activity recap for someone scanning their tasks*",
            "You classify one chat message from a user who was just asked to approve *",
            "You are OpenClaw's * safety reviewer.*",
            "You are keeping a dream diary.*",
            "Choose how to incorporate each supplied candidate into MEMORY.md.*",
        ),
        auxiliary_user=("*Based on this conversation, generate a short 1-2 word filename slug *",),
        ignore=("Current date: *", "Runtime: agent=*", "[* 20*-*-* *:* *] "),
    ),
    "opencode": _preset(
        "opencode-ai", "1.18.33",
        compaction=("You are a context summarization agent.*",),
        auxiliary=(
            "You are a title generator.*",
            "Summarize what was done in this conversation. Write like a pull *",
        ),
        auxiliary_user=("Generate a short 2-3 word name that describes this task:*",),
        ignore=(
            "Today's date: *",
            "Full output saved to: *",
            '<task id="*"',
        ),
    ),
    "pi": _preset(
        "@mariozechner/pi-coding-agent", "0.73.1",
        compaction=("You are a context summarization assistant.*",),
        ignore=("Current date: *",),
    ),
    "qwen-code": _preset(
        "@qwen-code/qwen-code", "0.24.4",
        compaction_user=("*Then, produce the <state_snapshot> XML.",),
        # Titles, next speakers, classifiers and other questions with a structured reply.
        others=(ThreadRule("auxiliary", tools="respond_in_schema"),),
        auxiliary=(
            "You generate session recaps for a programming assistant CLI.*",
            "Write a short summary label describing what these tool calls accomplished.*",
            "Extract and summarize the requested information from the provided web content.*",
            "You are assisting a text-only coding assistant that cannot see images.*",
            "You are evaluating a hook in Qwen Code.*",
            "You are now acting as the managed memory extraction subagent *",
            "You are performing a managed memory dream *",
            "You are reviewing this conversation to extract reusable skills.*",
        ),
        auxiliary_user=(
            "*[SUGGESTION MODE: Suggest what the user might naturally type next.]*",
            "*<system-reminder>\nThis is a side question from the user.*",
            "*<system-reminder>\nYou are acting as an ADVISOR *",
            "*Please analyze the conversation history above and generate a comprehensive project summary *",
        ),
        ignore=("Today's date is *", "The current date is: *"),
    ),
    "smolagents": _preset(
        "smolagents", "1.26.0",
        # Plans are a part of the work, and a model other than the tools' may write them.
        others=_by(
            "sub-agent",
            ("You are a world expert at analyzing a situation, and plan accordingly *",
             "An agent tried to answer a user query but it got stuck *",),
            ("You are a world expert at analyzing a situation to derive facts, and plan accordingly *",),
        ),
    ),
    "strands": _preset(
        "strands-agents", "1.62.0",
        compaction=(
            "You are a conversation summarizer.*",
            "You are a summarization assistant. Produce *",
        ),
        compaction_user=("Please summarize this conversation.",),
        auxiliary=(
            "# Goal Evaluation*",
            "You extract durable facts worth remembering across future conversations *",
        ),
        auxiliary_user=("# Steering Evaluation*",),
    ),
}  # fmt: skip


def rules_of(presets: Iterable[str], rules: Iterable[ThreadRule]) -> tuple[ThreadRule, ...]:
    """Return the rules in the order in which they are tried: the configured rules before the presets."""
    return (*rules, *(rule for preset in presets for rule in PRESETS[preset].rules))
