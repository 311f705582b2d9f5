"""Families of steps: the same agent, or states of the same."""

from threaded import call, said, user

from proxy.trajectory.families import Families
from proxy.trajectory.openings import Openings

LONG = "You work on the task of the user until it is done, and answer with a summary of what you did."
TASK = user("Task")


def families(*steps):
    """Return the family of each step, numbered by their first step."""
    reader = Openings()
    openings = [reader.read(step) for step in steps]
    found = Families(openings, reader.digests)
    return [found.of(at) for at in range(len(openings))]


def test_model_prompt_and_shared_tools_make_a_family():
    same = families(call(1, TASK, system="S", tools=("a", "b")), call(2, user("Other"), system="S", tools=("b", "c")))
    other_model = families(call(1, TASK, system="S"), call(2, user("Other"), system="S", model="n"))
    other_prompt = families(call(1, TASK, system="S"), call(2, user("Other"), system="T"))
    other_tools = families(call(1, TASK, system="S", tools=("a",)), call(2, user("Other"), system="S", tools=("b",)))

    assert [[0, 0], [0, 1], [0, 1], [0, 1]] == [same, other_model, other_prompt, other_tools]


def test_tools_that_change_from_turn_to_turn_are_one_family():
    """Each two turns share one of them."""
    steps = [call(n, user(f"State {n}"), system="S", tools=(f"t{n}", f"t{n + 1}")) for n in range(6)]

    assert {0} == set(families(*steps))


def test_numbers_in_the_prompt_do_not_count():
    assert [0, 0] == families(call(1, TASK, system="It is 12:30."), call(2, user("Other"), system="It is 9:05."))


def test_a_conversation_with_a_similar_prompt_is_one_family():
    """The reply of the step before is in its place."""
    first = call(1, TASK, system=f"{LONG} It is Monday.", reply="Reply")
    second = call(2, TASK, said("Reply"), user("More"), system=f"{LONG} It is Tuesday.")

    assert [0, 0] == families(first, second)
    assert [0, 1] == families(first, call(2, user("Other"), said("Reply"), system=f"{LONG} It is Tuesday."))


def test_a_similar_prompt_and_equal_tools_are_one_family_if_the_agent_rewrites_replies():
    first = call(1, TASK, system=f"{LONG} It is Monday.", tools=("a",))
    second = call(2, TASK, said("Rewritten"), user("More"), system=f"{LONG} It is Tuesday.", tools=("a",))

    assert [0, 0] == families(first, second)


def test_a_title_of_the_same_messages_is_another_family():
    """Its prompt is not similar."""
    steps = [
        call(1, TASK, system=LONG, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Write a title."), system="You write titles."),
    ]

    assert [0, 1] == families(*steps)


def test_a_last_turn_without_tools_is_in_the_family():
    steps = [
        call(1, TASK, system=LONG, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Answer now."), system=LONG),
    ]
    without_prompt = [
        call(1, TASK, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Answer now.")),
    ]

    assert [[0, 0], [0, 0]] == [families(*steps), families(*without_prompt)]


def test_calls_of_one_agent_are_a_family_and_no_others():
    steps = [
        call(1, TASK, system="S", agent="planner"),
        call(2, user("Other"), system="T", model="n", agent="planner"),
        call(3, TASK, system="S"),
        call(4, TASK, system="S", agent="coder"),
    ]

    assert [0, 0, 1, 2] == families(*steps)
