"""The agent of a call is named by a header, or by Codex's metadata."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threaded import call, said, user

from proxy.trajectory.thread_agents import AGENT_NAME, SUB_AGENT, agent_of
from proxy.trajectory.threads import find_threads


def metadata(**fields):
    """Return Codex's metadata of a turn of a sub-agent, as a field of the request."""
    turn = {"subagent_kind": "thread_spawn", "agent_name": "/root/count", **fields}
    return {"client_metadata": {"x-codex-turn-metadata": orjson.dumps(turn).decode()}}


def codex(number, *messages, turn, **facts):
    step = call(number, *messages, tools=("spawn_agent",), **facts)
    step.request.update(turn)
    return step


def agent_named(step):
    return agent_of(step.extra, step.request)


@pytest.mark.parametrize(
    ("turn", "agent"),
    [
        (metadata(), "sub-agent:root.count"),
        (metadata(agent_name="/root/plan/count"), "sub-agent:root.plan.count"),
        (metadata(agent_name="/"), None),
        (metadata(agent_name="/root/" + "a" * 64), None),
        (metadata(agent_name="/root/a b"), None),
        (metadata(agent_name=7), None),
        (metadata(subagent_kind="compact"), None),
        (metadata(subagent_kind=None), None),
        ({"client_metadata": {"x-codex-turn-metadata": "{"}}, None),
        ({"client_metadata": {"x-codex-turn-metadata": "[]"}}, None),
        ({"client_metadata": {"x-codex-turn-metadata": {}}}, None),
        ({"client_metadata": "a"}, None),
        ({}, None),
    ],
)
def test_the_agent_of_codexs_metadata_is_the_path_of_its_task(turn, agent):
    """Of sub-agents only, and only if it is a valid name."""
    assert agent == agent_named(codex(1, user("Task"), turn=turn))


def test_the_header_has_precedence():
    assert "critic" == agent_named(codex(1, user("Task"), turn=metadata(), agent="critic"))


@given(st.text() | st.from_regex(r"/?root/[a-z_/]{1,70}", fullmatch=True))
def test_each_task_has_a_name_as_the_header_may_have(path):
    name = agent_named(codex(1, user("Task"), turn=metadata(agent_name=path)))

    assert name is None or AGENT_NAME.fullmatch(name.removeprefix(SUB_AGENT))


def test_a_sub_agent_that_begins_with_the_history_of_its_caller_has_its_own_thread():
    """Codex's default model has such sub-agents: prompt, tools and first messages are the caller's."""
    task, delegates, begun = user("Task"), said("I delegate.", ("spawn_agent", {"message": "Count."})), user("Count.")
    result = {"role": "tool", "content": "/root/count"}
    steps = [
        codex(1, task, turn=metadata(subagent_kind=None), reply=delegates),
        codex(2, task, delegates, result, turn=metadata(subagent_kind=None)),
        codex(3, task, delegates, result, begun, turn=metadata()),
        codex(4, task, delegates, result, begun, said("ok"), result, turn=metadata()),
    ]

    found = find_threads(steps)

    assert ["main", "main", "sub-agent:root.count", "sub-agent:root.count"] == [
        found.of[step.step_id].name for step in steps
    ]
    assert [("main", None), ("sub-agent", None)] == [(thread.kind, thread.agent) for thread in found.all]


def test_a_task_of_one_call_without_tools_is_a_sub_agent():
    """The metadata of its caller is certain."""
    main = [codex(n, user("Task"), turn=metadata(subagent_kind=None)) for n in (1, 2)]
    task = call(3, user("Count."))
    task.request.update(metadata())

    assert "sub-agent" == find_threads([*main, task]).of[task.step_id].kind
