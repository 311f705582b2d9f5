"""What distinguishes the conversations of a rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import JSON
from tests.support.threaded import call, conversation, said, user

from proxy.trajectory.openings import Openings, System, called_with, works_in_turns


def test_an_opening_has_the_system_prompt_the_tools_and_the_messages_before_the_first_reply():
    messages = [user("Task"), {"role": "system", "content": "More."}, said("Reply"), user("Next")]
    reader = Openings()
    opening = reader.read(call(1, *messages, system="You work.", tools=("a", "b")))

    assert ("You work.", {"a", "b"}, 2, 4, messages[0]) == (
        opening.system.text,
        opening.tools,
        opening.first,
        opening.length,
        opening.message(0),
    )
    assert (list(opening.parts()), reader.user(opening)) == (["Task"], "Next")
    assert list(opening.imported()) == ["Task", "Reply"]


def test_parts_of_a_message_are_texts_of_their_own():
    parts = [{"type": "text", "text": " <reminder> "}, {"type": "text", "text": "Task\n"}, {"type": "image_url"}]
    opening = Openings().read(call(1, {"role": "user", "content": parts}))

    assert list(opening.parts()) == ["<reminder>", "Task"]


def test_of_many_messages_and_parts_the_first_and_the_last_texts_are_read():
    """An agent may send no reply in its history."""
    parts = {"role": "user", "content": [{"type": "text", "text": f"part {number}"} for number in range(100)]}
    opening = Openings().read(call(1, *[user(f"text {number}") for number in range(100)], parts))
    texts = list(opening.parts())

    assert ([texts[0], texts[-1]], len(texts)) == (["text 0", "part 99"], 16 + 15 + 32)
    assert opening.first == 101


@given(st.lists(st.lists(st.sampled_from([user("a"), user("b"), said("r"), "odd"]), max_size=6), max_size=6))
def test_the_steps_before_do_not_change_the_opening_of_a_step(drawn):
    """What two steps have in common is read once."""
    steps = [call(number, *messages, system="S" * (number % 2)) for number, messages in enumerate(drawn)]
    reader = Openings()

    for step in steps:
        found, alone = reader.read(step), Openings().read(step)
        assert (alone.first, alone.digest, alone.system.key) == (found.first, found.digest, found.system.key)
        assert Openings().user(alone) == reader.user(found)


def test_a_prompt_may_have_any_characters():
    """Digits are ASCII digits; a lone surrogate is a question mark."""
    assert System("Il est 12 h — é\ud800").key == System("Il est 3 h — é?").key
    assert System("Il est 12 h").words == {"Il", "est", "h"}


@pytest.mark.parametrize("tools", [None, 7, "bash", [7, None, {"name": 3}, {"function": 4}]])
def test_tools_of_another_type_are_no_tools(tools):
    assert Openings().read(call(1, user("hi"), request={"tools": tools, "messages": []})).tools == frozenset()


@pytest.mark.parametrize("tools", [[{"name": "a"}], [{"function": {"name": "a"}}]])
def test_tools_are_named_in_both_spellings(tools):
    step = call(1, request={"tools": tools, "messages": [user("hi")]})

    assert Openings().read(step).tools == {"a"}


def test_completions_have_no_messages():
    reader = Openings()
    opening = reader.read(call(1, user("hi"), dialect="completions"))

    assert (opening.messages, opening.first, reader.user(opening)) == ([], 0, "")


@pytest.mark.parametrize(
    ("one", "other", "share_tools", "resembles"),
    [
        ("It is 12:30 on 2026-11-23.", "It is 9:05 on 2027-01-01.", False, True),
        ("You are a planner.", "You are a coder.", False, False),
        ("You are a planner.", "You are a coder.", True, True),
        ("a b c d e f g h i monday", "a b c d e f g h i tuesday", False, True),
        ("You write titles.", "Work on the task of the user.", True, False),
        ("", "Work.", True, False),
    ],
)
def test_prompts_resemble_each_other_if_most_words_are_equal(one, other, share_tools, resembles):
    assert resembles == System(one).resembles(System(other), share_tools=share_tools)


def test_texts_of_arguments_are_read_at_any_depth():
    reply = said("", ("task", {"prompt": "Do it", "more": {"list": ["deep", 3]}}), ("note", "whole"))

    assert list(called_with(reply)) == [("task", "Do it"), ("task", "deep"), ("note", "whole")]


@pytest.mark.parametrize(
    "calls",
    [
        None,
        7,
        [7],
        [{"function": None}],
        [{"function": {"name": 3, "arguments": "{"}}],
        [{"function": {"arguments": None}}],
    ],
)
def test_calls_of_another_type_have_no_texts(calls):
    assert list(called_with({"tool_calls": calls})) == []


def test_long_arguments_are_not_read():
    assert list(called_with(said("", ("write", {"text": "x" * 2**18})))) == []
    assert len(list(called_with(said("", ("write", {"texts": [str(n) for n in range(500)]}))))) == 62


@given(value=JSON)
def test_any_json_in_place_of_messages_and_calls_is_read(value):
    reply = {"role": "assistant", "content": value, "tool_calls": value}
    reader = Openings()
    opening = reader.read(call(1, user("hi"), reply, {"role": "user", "content": value}, reply=reply))

    assert opening.first == 1
    assert isinstance(reader.user(opening), str)
    assert all(isinstance(text, str) for text in [*opening.imported(), *(text for _, text in called_with(reply))])


def in_turns(lists, tools=()):
    """Return whether calls with these messages are of a conversation."""
    reader = Openings()
    return works_in_turns([reader.read(call(n, *each, tools=tools)) for n, each in enumerate(lists)], reader.digests)


@given(turns=st.integers(1, 8), seed=st.randoms(use_true_random=False), edited=st.booleans())
def test_a_conversation_has_turns_in_any_order_and_questions_about_its_states_have_none(turns, seed, edited):
    """Also if an agent edits the replies before it sends them back."""
    lists = [each["messages"] for each in conversation(turns, "Task")]
    if edited:
        lists = [[said("edited") if each["role"] == "assistant" else each for each in messages] for messages in lists]
    seed.shuffle(lists)

    assert in_turns(lists) == (turns > 1)
    assert not in_turns([[*messages, said("Done."), user("Who is next?")] for messages in lists])


def test_a_conversation_has_turns_if_an_agent_adds_a_reminder_to_the_last_message():
    """As aider adds its rules for edits, which it does not send again in the history."""
    calls = conversation(3, "Task")
    for each in calls:
        each["messages"] = [
            user("Files"),
            said("Ok."),
            *each["messages"][:-1],
            user(each["messages"][-1]["content"] + " Be brief."),
        ]
    reader = Openings()
    openings = [reader.read(call(n, *each["messages"], reply=each["reply"])) for n, each in enumerate(calls)]

    assert works_in_turns(openings, reader.digests)
    assert not works_in_turns(openings[:1], reader.digests)


def test_attempts_at_one_call_are_no_turns_and_calls_with_tools_are():
    assert not in_turns([[user("Task")], [user("Task")], [user("Other"), said("a"), user("b")], []])
    assert in_turns([[user("Task")]], tools=("bash",))
