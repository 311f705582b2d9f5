"""The threads of real agents: titles, messages of commits, sub-agents and compactions beside the main conversation."""

from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.simulator.script import read_script
from proxy.trajectory.threads import find_threads

from .recorded import recorded
from .running import PROGRAMS, address, run
from .test_loops import APPEND, DRIFTING, TERMS, show_the_stop_token

SCRIPT = Path(__file__).with_name("threads.yaml")
WAY = ("chat", "whole")  # as the programs of test_loops.py
READ, MORE = "Read the numbers, please.", "Now look at them."


@dataclass(frozen=True, slots=True)
class Case:
    """A session: preset, program and its words, and the number of steps of each thread, the main one first.

    `without` are the threads without the preset, if others. `rows` is the number of the main thread's sequences: several if
    the agent rewrites its history.
    """

    preset: str | None
    program: str
    words: tuple[str, ...]
    threads: tuple[tuple[str, int], ...]
    without: tuple[tuple[str, int], ...] | None = None
    rows: int = 1
    runs: str = "cli"

    @property
    def name(self) -> str:
        """The test's ID."""
        return f"{self.program}: {', '.join(dict.fromkeys(kind for kind, _ in self.threads[1:]))}"


CASES = (
    Case(
        "claude-code", "claude_code_threads.sh", ("Delegate the counting to Agent.",),
        (("main", 2), ("auxiliary", 1), ("sub-agent", 1)),
    ),
    Case(
        "claude-code", "claude_code_threads.sh", (READ, "More of it.", "/compact", MORE),
        (("main", 2), ("auxiliary", 1), ("compaction", 2)), rows=2,  # a continued session has another name of the model
    ),
    Case("codex", "codex_threads.sh", ("1000", READ, MORE), (("main", 1), ("compaction", 2))),
    Case(
        "gemini-cli", "gemini_cli_threads.sh", ("0.5", "Delegate the counting to invoke_agent."),
        (("main", 2), ("sub-agent", 1)),
    ),
    Case(
        "gemini-cli", "gemini_cli_threads.sh", ("0.00001", READ, MORE),
        (("main", 1), ("compaction", 2), ("compaction", 1)),
    ),
    Case(
        "qwen-code", "qwen_code_threads.sh", ("0.7", "Delegate the counting to agent."), (("main", 2), ("sub-agent", 1))
    ),
    Case(
        "qwen-code", "qwen_code_threads.sh", ("0.02", "Read the numbers with run_shell_command."),
        (("main", 1), ("compaction", 2)),
    ),
    Case(
        "opencode", "opencode_threads.sh", ("100000", "Delegate the counting to task."),
        (("main", 2), ("auxiliary", 1), ("sub-agent", 1)),
    ),
    Case(
        "opencode", "opencode_threads.sh", ("18000", "Read the numbers with bash."),
        (("main", 2), ("auxiliary", 1), ("compaction", 1), ("compaction", 1)),
    ),
    Case(
        "pi", "pi_threads.sh", ("20000", "Read the numbers with bash.", MORE),
        (("main", 2), ("compaction", 3), ("compaction", 1)),
    ),
    Case(
        "cline", "cline_threads.sh", ("100000", "Delegate the counting to spawn_agent."),
        (("main", 2), ("sub-agent", 1)),
    ),
    Case(
        "cline", "cline_threads.sh", ("9000", "Read the numbers with run_commands."),
        (("main", 1), ("compaction", 1), ("compaction", 1)),
    ),
    Case(
        "aider", "aider_threads.py", ("Repair the file with aider.", *WAY),
        (("main", 1), ("auxiliary", 1)), without=(("main", 1), ("sub-agent", 1)), runs="aider",
    ),
    Case(
        None, "openai_agents_threads.py", ("Delegate the forecast to ask and hand it over.", *WAY),
        (("main", 2), ("sub-agent", 2), ("sub-agent", 2)), runs="main",
    ),
    Case(
        None, "pydantic_threads.py", ("Delegate the forecast to ask.", *WAY),
        (("main", 2), ("sub-agent", 2)), runs="main",
    ),
    Case(
        "smolagents", "smol_agent_threads.py", ("Delegate the forecast to the managed agent.", *WAY),
        (("main", 2), ("sub-agent", 1), ("sub-agent", 1)),
        without=(("main", 2), ("auxiliary", 1), ("sub-agent", 1)), rows=2, runs="main",
    ),
    Case(
        "langchain", "langchain_threads.py", ("Delegate the forecast to ask, then look.", *WAY),
        (("main", 2), ("compaction", 1), ("compaction", 1), ("sub-agent", 2)), runs="main",
    ),
    Case(
        "strands", "strands_threads.py", ("Delegate the forecast to ask.", *WAY),
        (("main", 2), ("compaction", 1), ("compaction", 1), ("sub-agent", 2)), runs="litellm",
    ),
    Case(
        "agno", "agno_threads.py", ("Delegate the forecast to the member.", *WAY),
        (("main", 2), ("auxiliary", 1), ("sub-agent", 2)), runs="litellm",
    ),
    Case(
        "autogen", "autogen_threads.py", ("Discuss the forecast.", *WAY),
        (("main", 2), ("auxiliary", 1), ("sub-agent", 2)), runs="litellm",
    ),
    Case(
        "google-adk", "adk_threads.py", ("Delegate the forecast to the agent tool.", *WAY),
        (("main", 2), ("sub-agent", 2)), runs="litellm",
    ),
    Case(
        "crewai", "crew_threads.py", ("Delegate the forecast to a coworker.", *WAY),
        (("main", 2), ("sub-agent", 2)), runs="crewai",
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_threads_have_the_calls_that_belong_to_them(case, environment, scripted, store, http, tmp_path):
    """With the agent's preset, and without it where the general rules suffice. The main thread is one sequence."""
    threads = {"threads": {"presets": [case.preset] if case.preset else []}}
    async with (
        scripted(script=read_script(SCRIPT), **DRIFTING) as engine,
        proxying(engine, store, **TERMS, **APPEND, **threads) as served,
    ):
        await show_the_stop_token(http, served.url)
        where, folder = address(served.url, "r"), tmp_path / "session"
        folder.mkdir()
        await run(case.runs, PROGRAMS / case.program, *case.words, where=where, environment=environment, folder=folder)
        found = await recorded(http, served.url, "r")
        exported = {wanted: await rows(http, served.url, wanted) for wanted in ("main", "agents", "all")}
        without = find_threads(await stored_steps(store, "r")).all

    assert found.inexact == []
    assert case.threads == in_order(found.tree["threads"])
    assert (case.without or case.threads) == in_order([thread.as_json() for thread in without])
    of = {node["step_id"]: node["thread"] for node in found.tree["nodes"]}
    trained = {thread["name"] for thread in found.tree["threads"] if thread["kind"] != "auxiliary"}
    for wanted, names in {"main": {"main"}, "agents": trained, "all": set(of.values())}.items():
        steps = [span["step_id"] for row in exported[wanted] for span in row["spans"]]
        assert {step for step, name in of.items() if name in names} == set(steps)
        assert all({row["thread"]} == {of[span["step_id"]] for span in row["spans"]} for row in exported[wanted])
    assert case.rows == len(exported["main"]), found.why


def in_order(threads) -> tuple[tuple[str, int], ...]:
    """Return the kind and the number of steps of each thread, the main one first."""
    return tuple((thread["kind"], thread["steps"]) for thread in sorted(threads, key=_place))


def _place(thread) -> tuple[bool, str, int]:
    return thread["kind"] != "main", thread["kind"], -thread["steps"]


async def rows(http, url: str, wanted: str):
    """Return the exported sequences of these threads."""
    async with http.get(f"{url}/rollouts/r/export?format=sequences&threads={wanted}") as response:
        assert response.status == 200
        return orjson.loads(await response.read())["rows"]
