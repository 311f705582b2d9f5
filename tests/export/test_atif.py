"""Harbor's trajectories (ATIF) and RolloutDetail, against Harbor's published models."""

from dataclasses import replace
from functools import cache
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.support.forests import make_choice
from tests.support.harbor_models import MORE, NOW, REPLY, SYSTEM, TEN, USER, call, harbor
from tests.support.threaded import call as drawn_call
from tests.support.threaded import said, user
from tests.support.trainers import load_published
from typing_extensions import TypedDict

from proxy.export import FORMATS
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options

ATIF, DETAIL = FORMATS["atif"], FORMATS["rollout_detail"]
FACTS = RolloutFacts("r1", group_id="g1", status="completed", reward=0.5, metadata={"agent_name": "coder", "task": 7})
TASK = "Find out which file defines the function main, and read it."
DELEGATE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "d1", "type": "function", "function": {"name": "agent", "arguments": f'{{"prompt": "{TASK}"}}'}}
    ],
}
FOUND = {"role": "tool", "tool_call_id": "d1", "content": "It is in main.c."}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("agent", "now")
]
HELPER = {"role": "system", "content": "You search files for another agent."}


def with_tools(step, *names):
    tools = [tool for tool in TOOLS if tool["function"]["name"] in names]
    return replace(step, request={**step.request, "tools": tools})


def linear():
    """Return the calls of one conversation, with a retry."""
    return [
        call("1", [SYSTEM, USER], NOW, (1,), (2, 3)),
        call("2", [SYSTEM, USER, NOW, TEN], MORE, (1, 2, 3, 4), (5,)),
        call("3", [SYSTEM, USER, NOW, TEN], REPLY, (1, 2, 3, 4), (6, 7)),
    ]


def delegated():
    """Return the calls of an agent that calls another one."""
    ask = {"role": "user", "content": TASK}
    return [
        with_tools(call("1", [SYSTEM, USER], DELEGATE, (1,), (2, 3)), "agent", "now"),
        with_tools(call("2", [HELPER, ask], NOW, (8,), (9,)), "now"),
        with_tools(call("3", [HELPER, ask, NOW, TEN], REPLY, (8, 9, 4), (5,)), "now"),
        with_tools(call("4", [SYSTEM, USER, DELEGATE, FOUND], REPLY, (1, 2, 3, 6), (7,)), "agent", "now"),
    ]


@cache
def detail():
    """Harbor's type of a RolloutDetail."""
    published = load_published("harbor/models/agent/rollout_detail.py", "RolloutDetail", Any=Any, TypedDict=TypedDict)
    return TypeAdapter(published.RolloutDetail)


def trajectory(steps, facts=FACTS):
    (row,) = ATIF.rows(facts, steps, Options()).rows
    return harbor().Trajectory.model_validate(row)


def test_a_rollout_is_a_trajectory_with_its_reward_group_and_metrics():
    found = trajectory(linear())

    assert ("ATIF-v1.8", "r1", "r1/main") == (found.schema_version, found.session_id, found.trajectory_id)
    assert ("coder", "unknown") == (found.agent.name, found.agent.version)
    assert {"reward": 0.5, "group_id": "g1", "status": "completed", "thread": "main"}.items() <= found.extra.items()
    assert (5, 4) == (found.final_metrics.total_prompt_tokens, found.final_metrics.total_completion_tokens)
    assert [[2, 3], [6, 7]] == [step.metrics.completion_token_ids for step in found.steps if step.metrics]


def test_a_reply_that_was_retried_is_skipped():
    """It is in the report with its tokens."""
    rows = ATIF.rows(FACTS, linear(), Options())

    assert [("1", "3")] == rows.trained
    assert [("2", 1)] == [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped]


def test_the_result_of_a_tool_that_started_an_agent_refers_to_its_trajectory():
    found = trajectory(delegated())
    (embedded,) = found.subagent_trajectories
    (caller,) = [step for step in found.steps if step.tool_calls]
    (result,) = caller.observation.results

    assert "It is in main.c." == result.content
    assert [embedded.trajectory_id] == [reference.trajectory_id for reference in result.subagent_trajectory_ref]
    assert [[9], [5]] == [step.metrics.completion_token_ids for step in embedded.steps if step.metrics]
    assert "sub-agent" == embedded.extra["kind"]


def test_agents_whose_prompts_begin_alike_belong_to_their_own_calls():
    """Their prompts may be nested in the arguments."""
    prompts = [f"{'You search files for another agent. ' * 4}Search for {name}." for name in ("main", "test")]
    tasks = [orjson.dumps({"options": {"prompt": f"{prompt}\n"}}).decode() for prompt in prompts]
    calls = [{"id": f"d{at}", "function": {"name": "agent", "arguments": task}} for at, task in enumerate(tasks)]
    delegate = {"role": "assistant", "content": "", "tool_calls": calls}
    found = trajectory(
        [
            with_tools(call("1", [SYSTEM, USER], delegate, (1,), (2, 3)), "agent"),
            *(
                with_tools(call(name, [HELPER, {"role": "user", "content": prompt}], REPLY, (8, at), (9,)), "now")
                for at, (name, prompt) in enumerate(zip("23", reversed(prompts), strict=True))
            ),
        ]
    )

    results = found.steps[-1].observation.results
    references = {each.subagent_trajectory_ref[0].trajectory_id: each.source_call_id for each in results}
    embedded = {each.trajectory_id: each.steps[1].message for each in found.subagent_trajectories}
    assert {prompts[0]: "d0", prompts[1]: "d1"} == {embedded[name]: call_id for name, call_id in references.items()}


def test_threads_that_rules_have_named_keep_their_names_and_kinds():
    """The thread `main` is the trajectory, although another one is the main one without rules."""
    names = ["auxiliary:705a1b7f44cd", "main", "main", "auxiliary:705a1b7f44cd"]
    named = [replace(step, thread=name) for step, name in zip(delegated(), names, strict=True)]
    found = trajectory(named)
    (embedded,) = found.subagent_trajectories
    rows = DETAIL.rows(FACTS, named, Options())

    assert ["main", "auxiliary"] == [each.extra["kind"] for each in (found, embedded)]
    assert [[9], [5]] == [step.metrics.completion_token_ids for step in found.steps if step.metrics]
    assert ["main", names[0]] == rows.threads
    assert [[9], [5]] == rows.rows[0]["completion_token_ids"]


def test_other_choices_of_a_call_are_in_no_trajectory():
    """They are in the report."""
    (step,) = [call("1", [USER], REPLY, (1,), (2, 3))]
    several = replace(step, choices=(*step.choices, replace(step.choices[0], index=1)))
    rows = ATIF.rows(FACTS, [several], Options())

    assert ([("1",)], [("1", 2)]) == (
        rows.trained,
        [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped],
    )


def test_the_choice_with_which_the_agent_continued_is_the_reply():
    """In each format; the others are in the report."""
    first = call("1", [USER], REPLY, (1,), (2,))
    other = {**REPLY, "content": "It is noon."}
    response = {"choices": [{"index": 0, "message": REPLY}, {"index": 1, "message": other}]}
    second = replace(call("1", [USER], other, (1,), (5, 6)).choices[0], index=1)
    steps = [
        replace(first, choices=(*first.choices, second), response=response),
        call("2", [USER, other, MORE], REPLY, (1, 5, 6, 7), (8,)),
    ]

    assert [[5, 6], [8]] == [step.metrics.completion_token_ids for step in trajectory(steps).steps if step.metrics]
    rows = DETAIL.rows(FACTS, steps, Options())
    assert ([[5, 6], [8]], [("1", 1)]) == (
        rows.rows[0]["completion_token_ids"],
        [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped],
    )


def test_rewards_of_steps_and_threads_are_in_extra():
    main = trajectory(delegated(), replace(FACTS, thread_rewards={"main": 2.0}, step_rewards={"1": 0.25, "3": -1}))

    assert (2.0, 0.5) == (main.extra["reward"], main.subagent_trajectories[0].extra["reward"])
    assert [0.25] == [step.extra["reward"] for step in main.steps if step.extra and "reward" in step.extra]


TEXTS = ["The user wants a house that is blue.", "Its roof is done and painted red.", "Count the files, please."]


@st.composite
def rollouts(draw):
    """Draw calls that continue, repeat, change or shorten the histories of others, with several choices and tools."""
    texts, histories, steps = st.sampled_from(TEXTS), [], []
    for number in range(draw(st.integers(1, 8))):
        messages = draw(st.sampled_from([*histories, [user(draw(texts))]]))
        messages = [*messages, *draw(st.lists(st.sampled_from([user("x"), said("y"), TEN, NOW]), max_size=2))]
        replies = [said(draw(texts)) for _ in range(draw(st.integers(1, 2)))]
        if draw(st.booleans()):
            replies = [{**said("", ("agent", {"prompt": draw(texts)}), ("agent", {"prompt": draw(texts)}))}]
        response = {"choices": [{"index": index, "message": reply} for index, reply in enumerate(replies)]}
        choices = tuple(make_choice(index, [number, index, 7]) for index in range(len(replies)))
        facts = {"system": draw(st.sampled_from(["", "S"])), "tools": draw(st.sampled_from([(), ("agent",)]))}
        agent = draw(st.sampled_from([None, None, "critic"]))
        made = drawn_call(number, *messages, agent=agent, response=response, **facts)
        steps.append(replace(made, choices=choices))
        histories += [messages, *([*messages, reply] for reply in replies)]
    return steps


@given(rollouts())
def test_each_sampled_token_is_once_in_a_trajectory_or_in_the_report(steps):
    """With its own ids; the details have the same calls."""
    rows = ATIF.rows(FACTS, steps, Options())
    (row,) = rows.rows
    harbor().Trajectory.model_validate(row)
    documents = [row, *(row["subagent_trajectories"] or [])]
    sampled = [step for each in documents for step in each["steps"] if "metrics" in step]
    ids = {(step["extra"]["step_id"], step["extra"]["choice"]): step["metrics"] for step in sampled}
    recorded = {(step.step_id, choice.index): choice.ids.tolist() for step in steps for choice in step.choices}
    details = DETAIL.rows(FACTS, steps, Options()).rows

    assert len(sampled) == len(ids)
    assert all(recorded[key] == metrics["completion_token_ids"] for key, metrics in ids.items())
    dropped = sum(left["dropped_tokens"] for left in rows.skipped)
    assert sum(map(len, recorded.values())) == dropped + sum(len(recorded[key]) for key in ids)
    assert sorted(step for step, _ in ids) == sorted(step for each in details for step in each["extra"]["step_id"])


def test_a_rollout_without_exported_steps_has_no_trajectory():
    assert [] == ATIF.rows(FACTS, [], Options()).rows == DETAIL.rows(FACTS, [], Options()).rows


def test_a_rollout_detail_has_the_turns_of_a_thread():
    """The main one is the first. The fields are Harbor's."""
    main, helper = DETAIL.rows(FACTS, delegated(), Options()).rows

    assert ([[1], [1, 2, 3, 6]], [[2, 3], [7]]) == (main["prompt_token_ids"], main["completion_token_ids"])
    assert ([[8], [8, 9, 4]], [[9], [5]]) == (helper["prompt_token_ids"], helper["completion_token_ids"])
    assert [[len(ids) for ids in main["completion_token_ids"]]] == [[len(turn) for turn in main["logprobs"]]]
    for row in (main, helper):
        assert row == detail().validate_python(row, strict=True)
