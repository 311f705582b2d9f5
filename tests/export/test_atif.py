"""Harbor's trajectories (ATIF) and RolloutDetail, against Harbor's published models."""

from dataclasses import replace
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.support.forests import make_choice, make_step
from tests.support.threaded import call as drawn_call
from tests.support.threaded import said, user
from tests.support.trainers import import_published, load_published
from typing_extensions import TypedDict

from proxy.export import FORMATS
from proxy.export.atif import Conversation, content_of
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
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What time is it?"}
MORE = {"role": "user", "content": "And tomorrow?"}
NOW = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "A clock has it.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}],
}
TEN = {"role": "tool", "tool_call_id": "c1", "content": "10:00"}
REPLY = {"role": "assistant", "content": "It is ten."}
HELPER = {"role": "system", "content": "You search files for another agent."}


def call(name, messages, reply, prompt=(1, 2), ids=(3, 4)):
    """Return a step of these messages and this reply."""
    response = {"choices": [{"index": 0, "message": reply}]}
    return replace(make_step(name, list(prompt), list(ids)), request={"messages": messages}, response=response)


@cache
def harbor():
    """Harbor's model of a trajectory."""
    (module,) = import_published("harbor", "models.trajectories.trajectory", without=())
    return module


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

    assert (found.schema_version, found.session_id, found.trajectory_id) == ("ATIF-v1.8", "r1", "r1/main")
    assert (found.agent.name, found.agent.version) == ("coder", "unknown")
    assert {"reward": 0.5, "group_id": "g1", "status": "completed", "thread": "main"}.items() <= found.extra.items()
    assert (found.final_metrics.total_prompt_tokens, found.final_metrics.total_completion_tokens) == (5, 4)
    assert [step.metrics.completion_token_ids for step in found.steps if step.metrics] == [[2, 3], [6, 7]]


def test_a_reply_that_was_retried_is_skipped():
    """It is in the report with its tokens."""
    rows = ATIF.rows(FACTS, linear(), Options())

    assert rows.trained == [("1", "3")]
    assert [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped] == [("2", 1)]


def test_the_result_of_a_tool_that_started_an_agent_refers_to_its_trajectory():
    found = trajectory(delegated())
    (embedded,) = found.subagent_trajectories
    (caller,) = [step for step in found.steps if step.tool_calls]
    (result,) = caller.observation.results

    assert result.content == "It is in main.c."
    assert [embedded.trajectory_id] == [reference.trajectory_id for reference in result.subagent_trajectory_ref]
    assert [step.metrics.completion_token_ids for step in embedded.steps if step.metrics] == [[9], [5]]
    assert embedded.extra["kind"] == "sub-agent"


def test_agents_with_prompts_that_begin_alike_belong_to_their_own_calls():
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

    assert [each.extra["kind"] for each in (found, embedded)] == ["main", "auxiliary"]
    assert [step.metrics.completion_token_ids for step in found.steps if step.metrics] == [[9], [5]]
    assert ["main", names[0]] == rows.threads
    assert rows.rows[0]["completion_token_ids"] == [[9], [5]]


def test_other_choices_of_a_call_are_in_no_trajectory():
    """They are in the report."""
    (step,) = [call("1", [USER], REPLY, (1,), (2, 3))]
    several = replace(step, choices=(*step.choices, replace(step.choices[0], index=1)))
    rows = ATIF.rows(FACTS, [several], Options())

    assert (
        rows.trained,
        [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped],
    ) == ([("1",)], [("1", 2)])


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

    assert [step.metrics.completion_token_ids for step in trajectory(steps).steps if step.metrics] == [[5, 6], [8]]
    rows = DETAIL.rows(FACTS, steps, Options())
    assert (
        rows.rows[0]["completion_token_ids"],
        [(left["step_id"], left["dropped_tokens"]) for left in rows.skipped],
    ) == ([[5, 6], [8]], [("1", 1)])


def test_rewards_of_steps_and_threads_are_in_extra():
    main = trajectory(delegated(), replace(FACTS, thread_rewards={"main": 2.0}, step_rewards={"1": 0.25, "3": -1}))

    assert (main.extra["reward"], main.subagent_trajectories[0].extra["reward"]) == (2.0, 0.5)
    assert [step.extra["reward"] for step in main.steps if step.extra and "reward" in step.extra] == [0.25]


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
    assert ATIF.rows(FACTS, [], Options()).rows == DETAIL.rows(FACTS, [], Options()).rows == []


def test_a_rollout_detail_has_the_turns_of_a_thread():
    """The main one is the first. The fields are Harbor's."""
    main, helper = DETAIL.rows(FACTS, delegated(), Options()).rows

    assert (main["prompt_token_ids"], main["completion_token_ids"]) == ([[1], [1, 2, 3, 6]], [[2, 3], [7]])
    assert (helper["prompt_token_ids"], helper["completion_token_ids"]) == ([[8], [8, 9, 4]], [[9], [5]])
    assert [[len(ids) for ids in main["completion_token_ids"]]] == [[len(turn) for turn in main["logprobs"]]]
    for row in (main, helper):
        assert row == detail().validate_python(row, strict=True)


def conversation(*steps):
    made = Conversation()
    for step in steps:
        made.add(step, step.choices)
    return made


def kept(made):
    """Return the IDs of the calls with replies in the conversation."""
    return [step.step_id for step, _ in made.calls]


def outline(made):
    """Return the source and the text of each step, and the texts of its observations."""
    return [
        (step["source"], step["message"], *(result.get("content") for result in step["observation"]["results"]))
        if "observation" in step
        else (step["source"], step["message"])
        for step in made.steps
    ]


def test_each_message_is_a_step_once_and_results_of_tools_are_observations():
    made = conversation(
        call("a", [SYSTEM, USER], NOW),
        call("b", [SYSTEM, USER, NOW, TEN], REPLY),
        call("c", [SYSTEM, USER, NOW, TEN, REPLY, MORE], {"role": "assistant", "content": "Eleven."}),
    )

    assert outline(made) == [
        ("system", "Be brief."),
        ("user", "What time is it?"),
        ("agent", "", "10:00"),
        ("agent", "It is ten."),
        ("user", "And tomorrow?"),
        ("agent", "Eleven."),
    ]
    assert [step["step_id"] for step in made.steps] == [1, 2, 3, 4, 5, 6]
    assert kept(made) == ["a", "b", "c"]


def test_a_sampled_step_has_its_ids_logprobs_reasoning_and_tool_calls():
    (_, sampled) = conversation(call("a", [USER], NOW, prompt=(5, 6, 7), ids=(8, 9))).steps

    assert {name: value for name, value in sampled["metrics"].items() if name != "logprobs"} == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [5, 6, 7],
        "completion_token_ids": [8, 9],
    }
    assert len(sampled["metrics"]["logprobs"]) == 2
    assert sampled["reasoning_content"] == "A clock has it."
    assert sampled["tool_calls"] == [{"tool_call_id": "c1", "function_name": "now", "arguments": {"zone": "UTC"}}]
    assert (sampled["extra"]["step_id"], sampled["llm_call_count"]) == ("a", 1)


def test_arguments_that_are_no_object_are_kept_as_the_model_wrote_them():
    odd = {**NOW, "tool_calls": [{"id": "c1", "function": {"name": "now", "arguments": '{"zone": '}}]}
    (_, sampled) = conversation(call("a", [USER], odd)).steps

    assert [sampled["tool_calls"][0][name] for name in ("arguments", "extra")] == [{}, {"arguments": '{"zone": '}]


def test_a_reply_that_the_next_call_does_not_contain_is_abandoned():
    """With what followed the messages in common: the agent tried again, or went back."""
    retried = conversation(call("a", [USER], REPLY), call("b", [USER], NOW))
    went_back = conversation(
        call("a", [USER], NOW),
        call("b", [USER, NOW, TEN], REPLY),
        call("c", [USER, MORE], {**REPLY, "content": "Eleven."}),
    )

    assert (outline(retried), kept(retried)) == ([("user", "What time is it?"), ("agent", "")], ["b"])
    assert kept(went_back) == ["c"]
    assert outline(went_back) == [("user", "What time is it?"), ("user", "And tomorrow?"), ("agent", "Eleven.")]


def test_a_conversation_that_the_agent_left_returns_with_its_sampled_replies():
    """As one of two equal sub-agents in parallel, or of the branches of a search."""
    noon = {**REPLY, "content": "It is noon."}
    calls = [
        call("a1", [USER], REPLY, ids=(1,)),
        call("b1", [USER], noon, ids=(2,)),
        call("a2", [USER, REPLY, MORE], {**REPLY, "content": "Ten."}, ids=(3,)),
        call("b2", [USER, noon, MORE], {**REPLY, "content": "Noon."}, ids=(4,)),
    ]

    assert [kept(conversation(*calls[: number + 1])) for number in range(4)] == [
        ["a1"],
        ["b1"],
        ["a1", "a2"],
        ["b1", "b2"],
    ]
    assert [step["metrics"]["completion_token_ids"][0] for step in conversation(*calls).steps if "metrics" in step] == [
        2,
        4,
    ]


def test_a_conversation_returns_however_many_others_have_an_equal_reply():
    """As one of many sub-agents with one answer: a reply is found among those to the same messages."""
    tasks = [{"role": "user", "content": f"Task {number}"} for number in range(18)]
    calls = [call(f"a{number:02}", [task], REPLY) for number, task in enumerate(tasks[:17])]
    other = call("b", [tasks[17]], {**REPLY, "content": "It is noon."})
    made = conversation(*calls, other, call("c", [tasks[16], REPLY, MORE], {**REPLY, "content": "Ten."}))

    assert kept(made) == ["a16", "c"]


def test_another_reply_in_the_place_of_a_recorded_one_is_copied_context():
    """Its call is not exported, for example because it is flagged. The recorded reply is not in the conversation."""
    other = {"role": "assistant", "content": "It is noon."}
    made = conversation(call("a", [USER], REPLY), call("c", [USER, other, MORE], {**REPLY, "content": "Eleven."}))

    assert kept(made) == ["c"]
    assert [step.get("is_copied_context") for step in made.steps] == [None, True, None, None]
    assert made.steps[1]["message"] == "It is noon."


def test_a_history_that_the_agent_changed_or_cut_is_not_repeated():
    """The reply is found by its tool calls, or by its text."""
    shorter = [SYSTEM, {**NOW, "reasoning_content": None, "content": ""}, TEN]
    made = conversation(
        call("a", [SYSTEM, USER], NOW),
        call("b", shorter, REPLY),
        call("c", [MORE, {**REPLY, "content": [{"type": "text", "text": "It is ten. "}]}, USER], REPLY),
    )

    assert [step["message"] for step in made.steps] == [
        "Be brief.",
        "What time is it?",
        "",
        "It is ten.",
        "What time is it?",
        "It is ten.",
    ]
    assert kept(made) == ["a", "b", "c"]


def test_two_results_with_one_id_are_two_observations():
    """Some parsers of engines give each call of a reply the same ID; they are removed with their call as well."""
    calls = [call("a", [USER], NOW), call("b", [USER, NOW, TEN, {**TEN, "content": "11:00"}], REPLY)]

    assert outline(conversation(*calls))[1] == ("agent", "", "10:00", "11:00")
    assert kept(conversation(*calls, call("c", [USER, MORE], REPLY))) == ["c"]


def test_an_assistant_message_that_was_not_sampled_here_is_copied_context():
    """It has no token ids, and consumers do not train it."""
    (copied, _, sampled) = conversation(call("a", [NOW, USER], REPLY)).steps

    assert (copied["is_copied_context"], copied.get("metrics")) == (True, None)
    assert "is_copied_context" not in sampled


def test_a_result_of_an_unknown_tool_call_is_an_observation_of_the_system():
    (_, observed, _) = conversation(call("a", [USER, TEN], REPLY)).steps

    assert (observed["source"], observed["observation"]["results"][0]["content"]) == ("system", "10:00")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("text", "text"),
        ([{"type": "text", "text": "a"}, "b"], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        (
            [{"type": "image_url", "image_url": {"url": "https://h/a.png"}}],
            [{"type": "image", "source": {"media_type": "image/png", "path": "https://h/a.png"}}],
        ),
        ([{"type": "image_url", "image_url": {"url": "https://h/a"}}], [{"type": "text", "text": "https://h/a"}]),
    ],
)
def test_contents_are_texts_or_parts(content, expected):
    assert content_of(content) == expected


MESSAGES = st.lists(
    st.sampled_from(
        [
            *(SYSTEM, USER, MORE, NOW, TEN, REPLY, {"role": "other", "content": 7}, "odd", {"role": "assistant"}),
            {"role": ["user"], "content": {"a": 1}},
        ]
    ),
    max_size=6,
)


@given(
    st.lists(
        st.tuples(MESSAGES, st.sampled_from([NOW, REPLY, {"role": "assistant", "content": ""}])), min_size=1, max_size=6
    )
)
def test_any_conversation_is_valid_for_harbor_and_has_each_call_once(calls):
    """In the trajectory, or as abandoned; its metrics have the sampled ids and logprobs."""
    made = conversation(*(call(str(number), messages, reply) for number, (messages, reply) in enumerate(calls)))
    agent = {"name": "agent", "version": "1"}
    trajectory = harbor().Trajectory.model_validate({"agent": agent, "steps": made.steps})
    sampled = [step for step in trajectory.steps if step.metrics]

    assert kept(made) == [step.extra["step_id"] for step in sampled]
    assert len(kept(made)) == len(set(kept(made)))
    assert str(len(calls) - 1) == kept(made)[-1]
    for (step, choice), found in zip(made.calls, sampled, strict=True):
        assert choice.ids.tolist() == found.metrics.completion_token_ids
        assert step.prompts[0].tolist() == found.metrics.prompt_token_ids
        assert choice.logprobs.tolist() == found.metrics.logprobs


@st.composite
def sessions(draw):
    """Draw calls of an agent that continues with any choice, tries again, goes back, or returns; and the history at the end.

    Returns the calls, the messages with the last reply, and the kept calls with the index of their choice.
    """
    history, calls, replies, left = [SYSTEM, USER], [], {}, []
    for number in range(draw(st.integers(1, 8))):
        texts = [f"reply {number} {index}" for index in range(draw(st.integers(1, 3)))]
        if draw(st.booleans()):  # a call of two tools each; the IDs may be equal
            names = [f"c{number}", draw(st.sampled_from([f"c{number}", f"d{number}"]))]
            made = [{"id": name, "function": {"name": "now", "arguments": "{}"}} for name in names]
            texts, tools = texts[:1], [{**TEN, "tool_call_id": name, "content": f"{name} is ten"} for name in names]
            sampled = [{"role": "assistant", "content": texts[0], "tool_calls": made}]
        else:
            tools, sampled = [], [{"role": "assistant", "content": text} for text in texts]
        response = {"choices": [{"index": index, "message": reply} for index, reply in enumerate(sampled)]}
        step = call(f"{number}", list(history), sampled[0], ids=(number, 3))
        choices = tuple(replace(step.choices[0], index=index) for index in range(len(sampled)))
        calls.append(replace(step, response=response, choices=choices))
        chosen = draw(st.integers(0, len(sampled) - 1))
        then = draw(st.sampled_from(["continue", "continue", "retry", "back", "return"]))
        if then == "continue":
            replies = {**replies, len(history): (f"{number}", chosen)}
            history = [*history, sampled[chosen], *tools, {**MORE, "content": f"user {number}"}]
        elif then == "back":
            at = draw(st.sampled_from([at for at, each in enumerate(history) if each["role"] == "user"]))
            history = [*history[:at], {**USER, "content": f"other {number}"}]
            replies = {place: reply for place, reply in replies.items() if place < at}
        elif then == "return":
            history, replies = draw(st.sampled_from([*left, (history, replies)]))
        left.append((history, dict(replies)))
    last = call("last", list(history), REPLY)
    return [*calls, last], [*history, REPLY], [*replies.values(), ("last", 0)]


@given(sessions())
def test_a_trajectory_is_the_history_at_the_end(drawn):
    """Each message once, in order, each result beside its call; sampled replies have the ids of the choice that continues."""
    calls, history, expected = drawn
    made = conversation(*calls)
    texts = [
        text
        for step in made.steps
        for text in (
            step["message"],
            *(each["content"] for each in step.get("observation", {"results": []})["results"]),
        )
    ]

    assert [message["content"] for message in history] == texts
    assert [(step.step_id, choice.index) for step, choice in made.calls] == expected
    assert not any(step.get("is_copied_context") for step in made.steps)
    harbor().Trajectory.model_validate({"agent": {"name": "agent", "version": "1"}, "steps": made.steps})
