"""Drift: where the messages go on and the ids do not."""

from time import process_time

import pytest
from forests import make_step

from proxy.trajectory.drift import Drift, find_drift
from proxy.trajectory.tree import grow

ASK = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "reply"}
MORE = {"role": "user", "content": "more"}


def call(step_id, prompt, sampled, messages, *replies, **facts):
    """A chat step of these messages; each reply is the message of one choice."""
    response = {"choices": [{"index": at, "message": reply} for at, reply in enumerate(replies)]}
    return make_step(step_id, prompt, *sampled, request={"messages": messages}, response=response, **facts)


def test_boundary():
    """A step that goes on from an earlier one's messages and reply, but not from its ids, is reported where they part."""
    first = call("a", range(1, 9), [[10, 11, 12, 13, 14]], [ASK], REPLY)
    second = call("b", [*range(1, 9), 10, 99, 12, 13], [[20]], [ASK, REPLY, MORE], REPLY)

    assert [Drift("b", "a", 0, 9, 5, (6, 7, 8, 10, 11, 12, 13, 14), (6, 7, 8, 10, 99, 12, 13))] == find_drift(
        grow([second, first])
    )


def test_prompt_cut_off():
    """Where a prompt ends within what the earlier step had, they part at its end."""
    first = call("a", [1], [[10, 11]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 10], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (2, (1, 10, 11), (1, 10)) == (drift.index, drift.expected_ids, drift.found_ids)


def test_no_drift():
    """There is none where the ids go on, where the messages do not, and outside chat."""
    first = call("a", [1], [[10]], [ASK], REPLY)
    goes_on = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    elsewhere = call("c", [7], [[20]], [MORE], REPLY)
    edited = call("d", [8], [[20]], [ASK, {**REPLY, "content": "edited"}, MORE], REPLY)
    silent = call("e", [9], [[20]], "no list of messages")
    odd = call("f", [9], [[20]], ["no message", MORE], "no message")

    assert [] == find_drift(grow([first, goes_on, elsewhere, edited, silent, odd]))
    assert [] == find_drift(grow([first, call("f", [9], [[20]], [ASK, REPLY, MORE], REPLY, dialect="completions")]))


def test_what_agents_leave_out():
    """Reasoning, nulls and ids of calls that an agent does not send back make no other message of a reply."""
    function = {"name": "look", "arguments": "{}"}
    reply = {
        **REPLY,
        "content": None,
        "reasoning": "hm",
        "refusal": None,
        "tool_calls": [{"id": "x", "function": function}],
    }
    sent_back = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "y", "type": "function", "function": function}],
    }
    tool = {"role": "tool", "content": "4", "tool_call_id": "y"}
    steps = [call("a", [1], [[10]], [ASK], reply), call("b", [1, 9], [[20]], [ASK, sent_back, tool], REPLY)]

    assert [("b", "a")] == [(drift.step_id, drift.earlier_step_id) for drift in find_drift(grow(steps))]


LOOK = {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (REPLY, {**REPLY, "role": "user"}),
        ({"tool_calls": [{"function": LOOK}]}, {"tool_calls": [{"function": {**LOOK, "name": "touch"}}]}),
        ({"tool_calls": [{"function": LOOK}]}, {"tool_calls": [{"function": {**LOOK, "arguments": "[]"}}]}),
        ({"tool_calls": [{"function": LOOK}]}, {"tool_calls": [{"function": LOOK}, {"function": LOOK}]}),
        ({"tool_call_id": "x"}, {"tool_call_id": "y"}),
    ],
)
def test_what_makes_another_message(ours, theirs):
    """Another role, another tool call, its name or its arguments, or the answer to another call is another message."""
    first = call("a", [1], [[10]], [ASK], ours)

    assert ["b"] == [
        drift.step_id for drift in find_drift(grow([first, call("b", [7], [[20]], [ASK, ours, MORE], REPLY)]))
    ]
    assert [] == find_drift(grow([first, call("b", [7], [[20]], [ASK, theirs, MORE], REPLY)]))


def test_template_that_strips():
    """Ids that part within the earlier prompt are drift, even where the sampled ids stand at the same place again."""
    first = call("a", [1, 50, 2], [[10]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 60, 2, 10, 3], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (1, (1, 50, 2, 10), (1, 60, 2, 10, 3)) == (drift.index, drift.expected_ids, drift.found_ids)


def test_unfinished_reply():
    """A call that has an earlier reply as its last message, to be gone on with, drifts where its ids part from it."""
    first = call("a", [1], [[10, 9]], [ASK], REPLY)  # 9 ends the turn; what is to go on has no end
    drifted = find_drift(grow([first, call("b", [1, 10], [[20]], [ASK, REPLY], MORE)]))

    assert [("b", "a", 2)] == [(drift.step_id, drift.earlier_step_id, drift.index) for drift in drifted]


def test_several_choices():
    """A call that drifted is one boundary, however many choices it has."""
    first = call("a", [1], [[10]], [ASK], REPLY)

    assert 1 == len(find_drift(grow([first, call("b", [7], [[20], [21]], [ASK, REPLY, MORE], REPLY, REPLY)])))


def test_one_of_several():
    """A step that goes on from any of the calls that gave its reply has not drifted; else the oldest is named."""
    twins = [call("a", [1], [[10], [11]], [ASK], REPLY, REPLY), call("b", [1], [[12]], [ASK], REPLY)]

    assert [] == find_drift(grow([*twins, call("c", [1, 12], [[20]], [ASK, REPLY, MORE], REPLY)]))
    (drift,) = find_drift(grow([*twins, call("c", [1, 13], [[20]], [ASK, REPLY, MORE], REPLY)]))
    assert ("a", 0) == (drift.earlier_step_id, drift.earlier_choice)


def test_nearest():
    """A step is compared with the latest turn that its messages go on from."""
    a = call("a", [1], [[10]], [ASK], REPLY)
    b = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    c = call("c", [1, 10, 2, 21], [[30]], [ASK, REPLY, MORE, REPLY, MORE], REPLY)

    assert [("c", "b", 3)] == [
        (drift.step_id, drift.earlier_step_id, drift.index) for drift in find_drift(grow([a, b, c]))
    ]


def test_long_rollout():
    """The time to look through a rollout of 2,000 turns grows with its messages, not with turns²."""
    steps, messages, prompt = [], [], []
    for turn in range(2000):
        messages = [*messages, {"role": "user", "content": f"ask {turn}"}]
        reply = {"role": "assistant", "content": f"reply {turn}"}
        steps.append(call(f"{turn:04}", [*prompt, 1], [[turn]], messages, reply))
        messages, prompt = [*messages, reply], [*prompt, 1, turn]
    tree = grow(steps)
    started = process_time()
    found = find_drift(tree)
    spent_s = process_time() - started

    assert [] == found
    assert spent_s < 1  # 0.1 s on a quiet machine
