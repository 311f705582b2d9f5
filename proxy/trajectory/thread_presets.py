"""Presets: the calls of known agents beside their main conversation, by texts of the version in which they were read.

A preset has the calls that the general rules do not recognize in every rollout, and those whose text is certain. Sub-agents
need no rule, because a tool calls them with their text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from proxy.trajectory.thread_rules import ThreadKind, ThreadRule


@dataclass(frozen=True, slots=True)
class Preset:
    """The rules for an agent, and its package and version on PyPI or npm, in which the texts were read."""

    package: str
    version: str
    rules: tuple[ThreadRule, ...]


def _by(kind: ThreadKind, *, system: Iterable[str] = (), user: Iterable[str] = ()) -> tuple[ThreadRule, ...]:
    """Return a rule for each pattern of the system prompt or of the last user message."""
    return (*(ThreadRule(kind, system=each) for each in system), *(ThreadRule(kind, user=each) for each in user))


PRESETS: Final[Mapping[str, Preset]] = {
    "agno": Preset(
        "agno",
        "3.1.10",
        _by(
            "auxiliary",
            system=(
                "Analyze the following conversation between a user and an assistant, and extract *",
                "You are a Memory Manager *",
                "You are a memory compression assistant.*",
                "You are a Learning Extractor.*",
                "You are a Session Context Manager.*",
            ),
        ),
    ),
    "aider": Preset(
        "aider-chat",
        "0.86.2",
        (
            *_by("compaction", system=("*Briefly* summarize this partial conversation about programming.*",)),
            *_by("auxiliary", system=("You are an expert software engineer that generates *Git commit messages *",)),
        ),
    ),
    "autogen": Preset(
        "autogen-agentchat",
        "0.7.5",
        _by(
            "auxiliary",
            system=("You are in a role play game.*select the next role *",),
            user=("You are in a role play game.*select the next role *",),
        ),
    ),
    "claude-code": Preset(
        "@anthropic-ai/claude-code",
        "2.1.197",
        (
            *_by("compaction", user=("*Respond with TEXT ONLY.*Your task is to create a detailed summary of *conversation*",)),
            *_by(
                "auxiliary",
                system=(
                    "*Generate a concise, sentence-case title (*",
                    "*Write a short summary label describing what these tool calls accomplished.*",
                    "*You are an assistant for performing a web search tool use*",
                    "*You are evaluating a *hook* in Claude Code.*",
                    "*You are a security monitor for autonomous AI coding agents.*",
                    "*Your task is to process * commands that an AI coding agent wants to run.*",
                    "*You are selecting memories that will be useful to Claude Code *",
                    "*You are searching for past Claude Code conversation sessions *",
                ),
                user=(
                    "*Web page content:*Provide a concise response based *on the content above*",
                    "*[SUGGESTION MODE: Suggest what the user might naturally type next *",
                    "*<system-reminder>This is a side question from the user.*",
                    "*The user stepped away and is coming back. Recap in *",
                    "*Generate a short kebab-case name (*",
                    "*Describe your most recent action in 3-5 words *",
                    "*You are now acting as the memory extraction subagent.*",
                    "*# Dream: Memory Consolidation*",
                ),
            ),
        ),
    ),
    "cline": Preset(
        "cline",
        "3.0.65",
        _by("compaction", system=("Summarize the provided coding session into a concise continuation note *",)),
    ),
    "codex": Preset(
        "@openai/codex",
        "0.169.0",
        (
            *_by("compaction", user=("You are performing a CONTEXT CHECKPOINT COMPACTION.*",)),
            *_by(
                "auxiliary",
                system=(
                    "*You are judging one planned coding-agent action.*",
                    "*## Memory Writing Agent: Phase *",
                    "*You are part of an agent memory system.*",
                    "*Generate a concise, single-line task title of at most *",
                ),
            ),
        ),
    ),
    "crewai": Preset(
        "crewai",
        "1.15.30",
        (
            *_by("compaction", system=("You are a precise assistant that creates structured summaries of agent *",)),
            *_by(
                "auxiliary",
                system=(
                    "You analyze a query for searching memory.*",
                    "You extract discrete, reusable memory statements *",
                    "You analyze content to be stored in a hierarchical memory system.*",
                    "You are comparing new content against existing memories *",
                    "Your goal is to rewrite the user query so that it is optimized for retrieval *",
                    "You extract generalizable lessons from human feedback *",
                ),
            ),
        ),
    ),
    "gemini-cli": Preset(
        "@google/gemini-cli",
        "0.61.0",
        (
            *_by(
                "compaction",
                system=("*You are a specialized system component responsible for distilling chat history *",),
                user=("### State Update: Agent Continuity*",),
            ),
            # Pages, searches and long results are read with the main system prompt and no tools.
            ThreadRule("auxiliary", system="You are *CLI agent specializing in software engineering tasks.*", tools=""),
            *_by(
                "auxiliary",
                system=(
                    "*You are a specialized Task Routing AI.*",
                    "*You are a diagnostic agent that determines whether a conversational AI assistant is stuck *",
                    "*You are an expert code-editing assistant*failed *edit*",
                    "*You are an expert context compressor.*",
                    "*You are a security expert responsible for generating fine-grained security policies *",
                    "*You are a security enforcement engine.*",
                ),
                user=(
                    "*Analyze *only* the content and structure of your immediately preceding response *",
                    "Summarize the user's primary intent or goal in this conversation in ONE sentence *",
                ),
            ),
        ),
    ),
    "google-adk": Preset(
        "google-adk",
        "2.13.0",
        _by("compaction", user=("The following is a conversation history between a user and an AI agent.*",)),
    ),
    "langchain": Preset(
        "langchain",
        "1.4.7",
        _by("compaction", user=("<role>\nContext Extraction Assistant\n</role>*",)),
    ),
    "openclaw": Preset(
        "openclaw",
        "2026.9.6",
        (
            *_by("compaction", system=("You are a context summarization assistant.*",)),
            *_by(
                "auxiliary",
                system=(
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
                user=("*Based on this conversation, generate a short 1-2 word filename slug *",),
            ),
        ),
    ),
    "opencode": Preset(
        "opencode-ai",
        "1.18.33",
        (
            *_by("compaction", system=("You are a context summarization agent.*",)),
            *_by(
                "auxiliary",
                system=("You are a title generator.*", "Summarize what was done in this conversation. Write like a pull *"),
                user=("Generate a short 2-3 word name that describes this task:*",),
            ),
        ),
    ),
    "pi": Preset(
        "@mariozechner/pi-coding-agent",
        "0.73.1",
        _by("compaction", system=("You are a context summarization assistant.*",)),
    ),
    "qwen-code": Preset(
        "@qwen-code/qwen-code",
        "0.24.4",
        (
            *_by("compaction", user=("*Then, produce the <state_snapshot> XML.",)),
            # Titles, next speakers, classifiers and other questions with a structured reply.
            ThreadRule("auxiliary", tools="respond_in_schema"),
            *_by(
                "auxiliary",
                system=(
                    "You generate session recaps for a programming assistant CLI.*",
                    "Write a short summary label describing what these tool calls accomplished.*",
                    "Extract and summarize the requested information from the provided web content.*",
                    "You are assisting a text-only coding assistant that cannot see images.*",
                    "You are evaluating a hook in Qwen Code.*",
                    "You are now acting as the managed memory extraction subagent *",
                    "You are performing a managed memory dream *",
                    "You are reviewing this conversation to extract reusable skills.*",
                ),
                user=(
                    "*[SUGGESTION MODE: Suggest what the user might naturally type next.]*",
                    "*<system-reminder>\nThis is a side question from the user.*",
                    "*<system-reminder>\nYou are acting as an ADVISOR *",
                    "*Please analyze the conversation history above and generate a comprehensive project summary *",
                ),
            ),
        ),
    ),
    "smolagents": Preset(
        "smolagents",
        "1.26.0",
        # Plans are a part of the work, and a model other than the tools' may write them.
        _by(
            "sub-agent",
            system=(
                "You are a world expert at analyzing a situation, and plan accordingly *",
                "An agent tried to answer a user query but it got stuck *",
            ),
            user=("You are a world expert at analyzing a situation to derive facts, and plan accordingly *",),
        ),
    ),
    "strands": Preset(
        "strands-agents",
        "1.62.0",
        (
            *_by(
                "compaction",
                system=("You are a conversation summarizer.*", "You are a summarization assistant. Produce *"),
                user=("Please summarize this conversation.",),
            ),
            *_by(
                "auxiliary",
                system=("# Goal Evaluation*", "You extract durable facts worth remembering across future conversations *"),
                user=("# Steering Evaluation*",),
            ),
        ),
    ),
}  # fmt: skip


def rules_of(presets: Iterable[str], rules: Iterable[ThreadRule]) -> tuple[ThreadRule, ...]:
    """Return the rules in the order in which they are tried: the configured ones, then those of the presets."""
    return (*rules, *(rule for preset in presets for rule in PRESETS[preset].rules))
