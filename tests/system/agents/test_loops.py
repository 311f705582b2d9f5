"""Tool loops of unmodified frameworks, as docs/clients.md lists them: same outcome, exact steps, one sequence.

The engine follows script.yaml, which includes one failure.
"""

import orjson
import pytest
from tests.support.chat_templates import template
from tests.support.continued_calls import check_rows, check_steps
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from .clients import LOOPS, STREAMED, Loop
from .recorded import is_scored_alike, recorded, scores_as_recorded
from .running import PROGRAMS, address, installed_version, run
from .seen import Seen

# Agents request more tokens than the window has, models that no engine serves, and tools that only a vendor hosts.
TERMS = {
    "sampling": {"cap": {"max_tokens": "auto"}},
    "models": {"*": "simulated"},
    "dialects": {"ignore_hosted_tools": True},
}
OFF, APPEND = {"continuation": {"mode": "off"}}, {"continuation": {"mode": "append"}}
# A sampled turn is never what this template renders: tokens are split, and calls are written in other white space.
DRIFTING = {"template": template("qwen3").source, "noncanonical_rate": 0.3, "seed": 1}
RUNS = [pytest.param(loop, way, id=f"{loop.name}, {way}") for loop in LOOPS for way in loop.ways]


async def run_loop(loop: Loop, way: str, where, environment, folder, *, task: str | None = None):
    """Run a program and return the outcome that it prints."""
    folder.mkdir(exist_ok=True)
    words = (task or loop.task, loop.dialect, way)
    printed = await run(loop.runs, PROGRAMS / loop.file, *words, where=where, environment=environment, folder=folder)
    assert printed.endswith("}\n"), printed
    return orjson.loads(printed.splitlines()[-1])


async def show_the_stop_token(http, url: str) -> None:
    """Make a call in another rollout that ends with text: a process has to see the stop token once (decision 064)."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    async with http.post(f"{url}/rollouts/earlier/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()


def reflecting_task(loop: Loop) -> str:
    """Return the task in which the model reasons."""
    return f"{loop.task[:-1]}, on reflection{loop.task[-1]}"


def scripted_outcome(loop: Loop):
    """Return the outcome of the script."""
    return {"answer": loop.answer, "calls": [list(call) for call in loop.calls]}


def check_asides(loop: Loop, found) -> None:
    """Check that a call beside the main conversation is an exact step too."""
    asides = [(step["status"], step["fidelity"]["exact"]) for step in found.asides]
    assert [("complete", True)] * (loop.aside is not None) == asides


async def table_row(loop: Loop, found, environment) -> Seen:
    """Return the loop's row of the table."""
    version = f"{loop.package} {await installed_version(loop.runs, loop.package, environment)}"
    return Seen(version, loop.dialect, found.drift)


@pytest.mark.parametrize(("loop", "way"), RUNS)
async def test_a_loop_has_the_scripted_outcome_and_exact_steps(
    loop, way, environment, table, scripted, store, http, tmp_path
):
    """Every call is a step; successful ones are exact; the failed one is separate; all score the same. Where the engine
    renders each call, drift is of a known kind.
    """
    async with scripted() as engine, proxying(engine, store, **TERMS, **OFF) as served:
        where = address(served.url, "a-loop")
        outcome = await run_loop(loop, way, where, environment, tmp_path / "recorded")
        found = await recorded(http, served.url, "a-loop", loop.aside)
        scored = await scores_as_recorded(served.url, engine, "a-loop")
    table.loops[loop.name, way, False] = await table_row(loop, found, environment)

    assert scripted_outcome(loop) == outcome
    assert found.rollouts == ["a-loop"]
    assert [step["status"] for step in found.steps] == ["complete", "error", "complete", "complete"]
    check_asides(loop, found)
    assert {loop.dialect.partition(",")[0]} == {step["dialect"] for step in found.steps}
    assert {bool(step["request"].get("stream")) for step in found.steps} == {way == STREAMED}
    assert found.inexact == []
    assert found.drift in ("", loop.drift.get(way)), found.why
    assert found.is_linear == (not found.drift and not loop.refused and loop.conversations == 1)
    assert {thread["kind"] for thread in found.tree["threads"]} - {"auxiliary"} == {"main"}
    assert is_scored_alike(scored), scored


@pytest.mark.parametrize(("loop", "way"), [run for run in RUNS if run.values[0].dialect == "chat"])
async def test_a_loop_has_the_scripted_outcome_without_the_proxy(loop, way, environment, scripted, tmp_path):
    """The engine itself serves chat, so the outcome does not depend on the proxy."""
    async with scripted() as engine:
        assert scripted_outcome(loop) == await run_loop(loop, way, address(engine), environment, tmp_path / "direct")


@pytest.mark.parametrize(("loop", "way"), RUNS)
async def test_reasoning_is_sent_back_or_the_tree_reports_drift(
    loop, way, environment, table, scripted, store, http, tmp_path
):
    """Reasoning that a dialect cannot carry or a program drops is drift of a known kind; the steps are exact."""
    async with scripted() as engine, proxying(engine, store, **TERMS, **OFF) as served:
        where = address(served.url, "a-loop")
        outcome = await run_loop(loop, way, where, environment, tmp_path / "reflecting", task=reflecting_task(loop))
        found = await recorded(http, served.url, "a-loop", loop.aside)
        scored = await scores_as_recorded(served.url, engine, "a-loop")
    table.loops[loop.name, way, True] = await table_row(loop, found, environment)

    assert scripted_outcome(loop) == outcome
    assert found.inexact == []
    assert found.drift in ("", loop.reflecting.get(way)), found.why
    assert is_scored_alike(scored), scored


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "reflecting"])
@pytest.mark.parametrize(("loop", "way"), RUNS)
async def test_a_linear_loop_is_one_sequence_in_append(
    loop, way, thinks, environment, table, scripted, store, http, tmp_path
):
    """The prompts of its calls are sent as ids, which differ from what the template renders. A loop that rewrites its
    history has the known reason instead.
    """
    async with scripted(**DRIFTING) as engine, proxying(engine, store, **TERMS, **APPEND) as served:
        await show_the_stop_token(http, served.url)
        where, task = address(served.url, "a-loop"), reflecting_task(loop) if thinks else loop.task
        outcome = await run_loop(loop, way, where, environment, tmp_path / "continued", task=task)
        found = await recorded(http, served.url, "a-loop", loop.aside)
        scored = await scores_as_recorded(served.url, engine, "a-loop")
        main = {step["step_id"] for step in found.complete}
        steps = [step for step in await stored_steps(store, "a-loop") if step.step_id in main]
    table.append[loop.name, way, thinks] = found.forks

    assert scripted_outcome(loop) == outcome
    assert found.inexact == []
    check_steps(steps)
    check_rows(steps, found.rows)
    assert is_scored_alike(scored), scored
    assert loop.refused == found.refused, found.why
    if not loop.refused:
        assert loop.conversations == len(found.rows), found.why
        assert found.is_linear == (loop.conversations == 1)
        assert found.tree["drift"] == []
        assert len(steps) - loop.conversations == found.differing
