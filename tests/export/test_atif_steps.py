"""The steps of an ATIF trajectory from the calls of one conversation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.harbor_models import MORE, NOW, REPLY, SYSTEM, TEN, USER, call, harbor

from proxy.export.atif import Conversation, content_of


def conversation(*steps):
    made = Conversation()
    for step in steps:
        made.add(step, step.choices)
    return made


def kept(made):
    """Return the IDs of the calls whose replies are in the conversation."""
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

    assert [
        ("system", "Be brief."),
        ("user", "What time is it?"),
        ("agent", "", "10:00"),
        ("agent", "It is ten."),
        ("user", "And tomorrow?"),
        ("agent", "Eleven."),
    ] == outline(made)
    assert [1, 2, 3, 4, 5, 6] == [step["step_id"] for step in made.steps]
    assert ["a", "b", "c"] == kept(made)


def test_a_sampled_step_has_its_ids_logprobs_reasoning_and_tool_calls():
    (_, sampled) = conversation(call("a", [USER], NOW, prompt=(5, 6, 7), ids=(8, 9))).steps

    assert {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [5, 6, 7],
        "completion_token_ids": [8, 9],
    } == {name: value for name, value in sampled["metrics"].items() if name != "logprobs"}
    assert 2 == len(sampled["metrics"]["logprobs"])
    assert "A clock has it." == sampled["reasoning_content"]
    assert [{"tool_call_id": "c1", "function_name": "now", "arguments": {"zone": "UTC"}}] == sampled["tool_calls"]
    assert ("a", 1) == (sampled["extra"]["step_id"], sampled["llm_call_count"])


def test_arguments_that_are_no_object_are_kept_as_the_model_wrote_them():
    odd = {**NOW, "tool_calls": [{"id": "c1", "function": {"name": "now", "arguments": '{"zone": '}}]}
    (_, sampled) = conversation(call("a", [USER], odd)).steps

    assert [{}, {"arguments": '{"zone": '}] == [sampled["tool_calls"][0][name] for name in ("arguments", "extra")]


def test_a_reply_that_the_next_call_does_not_contain_is_abandoned():
    """With what followed the messages in common: the agent tried again, or went back."""
    retried = conversation(call("a", [USER], REPLY), call("b", [USER], NOW))
    went_back = conversation(
        call("a", [USER], NOW),
        call("b", [USER, NOW, TEN], REPLY),
        call("c", [USER, MORE], {**REPLY, "content": "Eleven."}),
    )

    assert ([("user", "What time is it?"), ("agent", "")], ["b"]) == (outline(retried), kept(retried))
    assert ["c"] == kept(went_back)
    assert [("user", "What time is it?"), ("user", "And tomorrow?"), ("agent", "Eleven.")] == outline(went_back)


def test_a_conversation_that_the_agent_left_returns_with_its_sampled_replies():
    """As one of two equal sub-agents in parallel, or of the branches of a search."""
    noon = {**REPLY, "content": "It is noon."}
    calls = [
        call("a1", [USER], REPLY, ids=(1,)),
        call("b1", [USER], noon, ids=(2,)),
        call("a2", [USER, REPLY, MORE], {**REPLY, "content": "Ten."}, ids=(3,)),
        call("b2", [USER, noon, MORE], {**REPLY, "content": "Noon."}, ids=(4,)),
    ]

    assert [["a1"], ["b1"], ["a1", "a2"], ["b1", "b2"]] == [
        kept(conversation(*calls[: number + 1])) for number in range(4)
    ]
    assert [2, 4] == [
        step["metrics"]["completion_token_ids"][0] for step in conversation(*calls).steps if "metrics" in step
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

    assert ["c"] == kept(made)
    assert [None, True, None, None] == [step.get("is_copied_context") for step in made.steps]
    assert "It is noon." == made.steps[1]["message"]


def test_a_history_that_the_agent_changed_or_cut_is_not_repeated():
    """The reply is found by its tool calls, or by its text."""
    shorter = [SYSTEM, {**NOW, "reasoning_content": None, "content": ""}, TEN]
    made = conversation(
        call("a", [SYSTEM, USER], NOW),
        call("b", shorter, REPLY),
        call("c", [MORE, {**REPLY, "content": [{"type": "text", "text": "It is ten. "}]}, USER], REPLY),
    )

    assert ["Be brief.", "What time is it?", "", "It is ten.", "What time is it?", "It is ten."] == [
        step["message"] for step in made.steps
    ]
    assert ["a", "b", "c"] == kept(made)


def test_two_results_with_one_id_are_two_observations():
    """Some parsers of engines give each call of a reply the same ID; they are removed with their call as well."""
    calls = [call("a", [USER], NOW), call("b", [USER, NOW, TEN, {**TEN, "content": "11:00"}], REPLY)]

    assert ("agent", "", "10:00", "11:00") == outline(conversation(*calls))[1]
    assert ["c"] == kept(conversation(*calls, call("c", [USER, MORE], REPLY)))


def test_an_assistant_message_that_was_not_sampled_here_is_copied_context():
    """It has no token ids, and consumers do not train it."""
    (copied, _, sampled) = conversation(call("a", [NOW, USER], REPLY)).steps

    assert (True, None) == (copied["is_copied_context"], copied.get("metrics"))
    assert "is_copied_context" not in sampled


def test_a_result_of_an_unknown_tool_call_is_an_observation_of_the_system():
    (_, observed, _) = conversation(call("a", [USER, TEN], REPLY)).steps

    assert ("system", "10:00") == (observed["source"], observed["observation"]["results"][0]["content"])


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
    assert expected == content_of(content)


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
        if draw(st.booleans()):  # a call of two tools each, whose IDs may be equal
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
    assert expected == [(step.step_id, choice.index) for step, choice in made.calls]
    assert not any(step.get("is_copied_context") for step in made.steps)
    harbor().Trajectory.model_validate({"agent": {"name": "agent", "version": "1"}, "steps": made.steps})
