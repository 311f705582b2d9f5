"""The last steps of a rollout: texts of windows of ids decide a kind of drift."""

import pytest
from tests.support.forests import call, make_step

from proxy.trajectory.drift import Endings, find_boundaries
from proxy.trajectory.tree import grow

ASK = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "reply"}
MORE = {"role": "user", "content": "more"}
THINKING = {**REPLY, "reasoning": "hm"}
OPENED = list(range(1, 31))


FIRST = call("a", OPENED, [[50, 51, 52]], [ASK], REPLY)


@pytest.mark.parametrize(
    "prompt",
    [
        [*OPENED, 50, 99, 52, 2],  # within the reply
        [*OPENED[:-1], 99, 50, 51, 52, 2],  # in the reply's opening
        [*OPENED[:-8], 99],  # at the first id of its possible opening
    ],
)
def test_the_window_equals_the_window_of_the_rollouts_drift(prompt):
    second = call("b", prompt, [[60]], [ASK, REPLY, MORE], REPLY)
    endings = Endings()
    (boundary,) = find_boundaries(grow([FIRST, second]))

    assert endings.add(FIRST) is None
    assert boundary.window == endings.add(second)


def test_a_repeated_earlier_call_hides_no_drift_of_a_later_reply():
    """The prompt continues the newest step, a retry of the first call, but differs from the ids of the second call."""
    two, opened = {**REPLY, "content": "two"}, [*OPENED, 50, 51, 52, *OPENED]
    second = call("b", opened, [[60, 61, 62]], [ASK, REPLY, MORE], two)
    third = call("d", [*opened, 60, 99, 62, 2], [[70]], [ASK, REPLY, MORE, two, MORE], REPLY)
    endings = Endings()
    for step in (FIRST, second, call("c", OPENED, [[50, 51, 52]], [ASK], REPLY)):
        assert endings.add(step) is None
    (boundary,) = find_boundaries(grow([FIRST, second, third]))

    assert boundary.window == endings.add(third)


@pytest.mark.parametrize(
    ("prompt", "messages", "reply"),
    [
        ([*OPENED, 50, 51, 52, 2], [ASK, REPLY, MORE], REPLY),  # the ids continue
        ([*OPENED, 50, 99], [ASK, {**REPLY, "content": "changed"}, MORE], REPLY),  # the messages differ
        ([*OPENED, 99, 51], [ASK, {**REPLY, "role": "user"}, MORE], REPLY),  # no reply is continued
        ([*OPENED, 99, 51], [ASK, MORE], REPLY),  # the reply was dropped
        ([*OPENED[:9], 99, *OPENED[10:], 50, 51, 52], [ASK, REPLY, MORE], REPLY),  # far from the reply: the template
        ([*OPENED, 50], [ASK, REPLY, MORE], REPLY),  # the prompt ends there
        ([*OPENED, 99, 51], [ASK, REPLY, MORE], THINKING),  # the agent dropped the reasoning
    ],
)
def test_no_window_is_returned_if_ids_or_messages_decide_the_kind(prompt, messages, reply):
    endings = Endings()
    endings.add(call("a", OPENED, [[50, 51, 52]], [ASK], reply))

    assert endings.add(call("b", prompt, [[60]], messages, REPLY)) is None


def test_any_of_several_equal_replies_may_be_continued():
    """If the ids continue none of them, the first one is expected."""
    endings = Endings()
    endings.add(call("a", OPENED, [[50], [51]], [ASK], REPLY, REPLY))

    assert endings.add(call("b", [*OPENED, 51, 2], [[60]], [ASK, REPLY, MORE], REPLY)) is None
    window = endings.add(call("c", [*OPENED, 52, 2], [[60]], [ASK, REPLY, MORE], REPLY))
    assert window is not None
    assert window.expected_ids[window.index - window.start] == 50


def test_only_the_latest_endings_of_a_policy_are_kept():
    """The memory of a rollout does not grow with its steps. Policies do not continue each other."""
    endings = Endings()
    for number in range(50):
        endings.add(call("a", OPENED, [[50, 51, number]], [ASK], REPLY))
        if number == 15:
            full = endings.size
    other = call("b", [*OPENED, 99, 2], [[60]], [ASK, REPLY, MORE], REPLY, policy="critic")

    assert full == endings.size < 20_000
    assert endings.add(other) is None
    assert endings.add(call("b", [*OPENED, 99, 2], [[60]], [ASK, REPLY, MORE], REPLY)) is not None
    assert f"<Endings of 2 policies, {endings.size} bytes>" == repr(endings)


@pytest.mark.parametrize(
    "step",
    [
        call("a", OPENED, [[50]], [ASK], REPLY, dialect="completions"),
        call("a", OPENED, [[50]], "no list", "no message"),
        call("a", OPENED, [[]], [ASK], REPLY),
        make_step("a", [], status="error", request={"messages": [ASK]}),
    ],
)
def test_steps_without_chat_messages_a_reply_or_ids_are_not_stored(step):
    endings = Endings()

    assert endings.add(step) is None
    assert repr(endings) == "<Endings of 0 policies, 0 bytes>"
    assert endings.add(call("b", [7], [[60]], [ASK, REPLY, MORE], REPLY)) is None


def test_a_message_of_another_size_than_the_reply_is_not_digested(monkeypatch):
    """An agent's message may have many megabytes, and this code runs on the event loop."""
    endings = Endings()
    endings.add(FIRST)
    digested = []
    monkeypatch.setattr("proxy.trajectory.drift.Digests.of", lambda _, message: digested.append(message) or b"")
    endings.add(call("b", [*OPENED, 99], [[60]], [ASK, {**REPLY, "content": "x" * 1000}, MORE], REPLY))

    assert digested == [REPLY]  # the step's own reply


@pytest.mark.parametrize("content", ["reply" * 100_000, [{"type": "text", "text": "reply"}]])
def test_long_replies_and_those_in_parts_are_not_remembered(content):
    """Their digests would block the event loop; the drift of the whole rollout is found later."""
    reply = {**REPLY, "content": content}
    endings = Endings()

    assert endings.add(call("a", OPENED, [[50, 51, 52]], [ASK], reply)) is None
    assert endings.add(call("b", [*OPENED, 50, 99, 52, 2], [[60]], [ASK, reply, MORE], REPLY)) is None
