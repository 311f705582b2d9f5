"""The steps of an ATIF trajectory from the calls of one conversation."""

import pytest
from harbor_models import MORE, NOW, REPLY, SYSTEM, TEN, USER, call, harbor
from hypothesis import given
from hypothesis import strategies as st

from proxy.export.atif_steps import Conversation, content_of


def conversation(*steps):
    made = Conversation()
    for step in steps:
        made.add(step, step.choices[0])
    return made


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
    assert [] == made.abandoned


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

    assert ([("user", "What time is it?"), ("agent", "")], ["a"]) == (outline(retried), retried.abandoned)
    assert ["a", "b"] == went_back.abandoned
    assert [("user", "What time is it?"), ("user", "And tomorrow?"), ("agent", "Eleven.")] == outline(went_back)


def test_another_reply_in_the_place_of_a_recorded_one_is_copied_context():
    """Its call is not exported, for example because it is flagged. The recorded reply is not in the conversation."""
    other = {"role": "assistant", "content": "It is noon."}
    made = conversation(call("a", [USER], REPLY), call("c", [USER, other, MORE], {**REPLY, "content": "Eleven."}))

    assert ["a"] == made.abandoned
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
    assert [] == made.abandoned


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
        [SYSTEM, USER, MORE, NOW, TEN, REPLY, {"role": "other", "content": 7}, "odd", {"role": "assistant"}]
    ),
    max_size=6,
)


@given(
    st.lists(
        st.tuples(MESSAGES, st.sampled_from([NOW, REPLY, {"role": "assistant", "content": ""}])), min_size=1, max_size=6
    )
)
def test_any_conversation_is_valid_for_harbor_and_has_each_call_once(calls):
    """In the trajectory, or as abandoned."""
    made = conversation(*(call(str(number), messages, reply) for number, (messages, reply) in enumerate(calls)))
    agent = {"name": "agent", "version": "1"}
    trajectory = harbor().Trajectory.model_validate({"agent": agent, "steps": made.steps})
    kept = [step.extra["step_id"] for step in trajectory.steps if step.metrics]

    assert sorted([*kept, *made.abandoned]) == [str(number) for number in range(len(calls))]
