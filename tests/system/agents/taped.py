"""The agents whose sessions are played back: scripted by playback.yaml, with parallel calls, sub-agents and random texts."""

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .environment import Environment
from .running import PROGRAMS, address, run

SCRIPT = Path(__file__).with_name("playback.yaml")
ANOTHER_DAY = "Pacific/Kiritimati"  # the first place on Earth where it is tomorrow; for 10 hours a day it is not in UTC


@dataclass(frozen=True, slots=True)
class Taped:
    """An agent: its package and preset, its program and words, and the number of calls of its session."""

    name: str
    package: str
    preset: str | None
    runs: str
    program: str
    words: tuple[str, ...]
    calls: int

    async def play(
        self, url: str, rollout: str, environment: Environment, folder: Path, extra: Mapping[str, str] | None = None
    ) -> None:
        """Run its session in an empty folder, which has the same path each time."""
        await asyncio.to_thread(_empty, folder)
        where = {**address(url, rollout), **(extra or {})}
        await run(self.runs, PROGRAMS / self.program, *self.words, where=where, environment=environment, folder=folder)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


_WAY = ("chat", "whole")
TAPED = (
    Taped("codex", "@openai/codex", "codex", "cli", "codex.sh", ("Play it with exec_command.",), 4),
    Taped("codex-default", "@openai/codex", "codex", "cli", "codex_default.sh", ("Play it with functions.",), 7),
    Taped(
        "claude-code", "@anthropic-ai/claude-code", "claude-code", "cli", "claude_code_threads.sh",
        ("Play it with Bash and Agent.",), 8,
    ),
    Taped("opencode", "opencode-ai", "opencode", "cli", "opencode_threads.sh", ("100000", "Play it with bash and task."), 8),
    Taped("langgraph", "langgraph", None, "main", "langgraph_agent.py", ("Play it with ask.", *_WAY), 7),
    Taped(
        "mini-swe-agent", "mini-swe-agent", "mini-swe-agent", "litellm", "swe_agent.py", ("Play it with commands.", *_WAY), 3
    ),
)  # fmt: skip
