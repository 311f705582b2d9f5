"""Drift: where the messages go on and the ids do not."""

from dataclasses import replace
from time import process_time

import pytest
from forests import forests, make_step
from hypothesis import given

from proxy.trajectory.drift import Boundary, Drift, Window, explain, find_boundaries
from proxy.trajectory.drift_kinds import KINDS
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import Tree, grow

ASK = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "reply"}
MORE = {"role": "user", "content": "more"}


def find_drift(tree: Tree) -> list[Drift]:
    return [explain(boundary) for boundary in find_boundaries(tree)]


def call(step_id, prompt, sampled, messages, *replies, **facts):
    """A chat step of these messages; each reply is the message of one choice."""
    response = {"choices": [{"index": at, "message": reply} for at, reply in enumerate(replies)]}
    return make_step(step_id, prompt, *sampled, request={"messages": messages}, response=response, **facts)


def test_boundary():
    """A step that goes on from an earlier one's messages and reply, but not from its ids, is reported where they part."""
    first = call("a", range(1, 13), [[20, 21, 22, 23]], [ASK], REPLY)
    second = call("b", [*range(1, 13), 20, 99, 22], [[30]], [ASK, REPLY, MORE], REPLY)

    assert [
        Drift("b", "a", 0, 13, 5, (6, 7, 8, 9, 10, 11, 12, 20, 21, 22, 23), (6, 7, 8, 9, 10, 11, 12, 20, 99, 22))
    ] == find_drift(grow([second, first]))


def test_prompt_cut_off():
    """Where a prompt ends within what the earlier step had, they part at its end."""
    first = call("a", [1], [[10, 11]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 10], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (2, (1, 10, 11), (1, 10)) == (drift.index, drift.expected_ids, drift.found_ids)
    assert "template" == drift.kind, "what stands at the end of a reply was left out, and no text differs"


def test_no_drift():
    """There is none where the ids go on, where the messages do not, and outside chat."""
    first = call("a", [1], [[10]], [ASK], REPLY)
    goes_on = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    elsewhere = call("c", [7], [[20]], [MORE], REPLY)
    compacted = call("d", [8], [[20]], [{**ASK, "content": "a summary of it"}, MORE], REPLY)
    silent = call("e", [9], [[20]], "no list of messages")
    odd = call("f", [9], [[20]], ["no message", MORE], "no message")

    assert [] == find_drift(grow([first, goes_on, elsewhere, compacted, silent, odd]))
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
    ("theirs", "kind"),
    [
        ({**REPLY, "content": "another"}, "edited"),
        ({**REPLY, "content": " reply\n"}, "whitespace"),
        ({**REPLY, "content": "reply", "tool_calls": [{"function": LOOK}]}, "edited"),
        ({**REPLY, "role": "user"}, None),
    ],
)
def test_a_reply_that_came_back_changed(theirs, kind):
    """The agent changed it, and how is told; what is no reply any more goes on from nothing."""
    steps = [call("a", [1], [[10]], [ASK], REPLY), call("b", [7], [[20]], [ASK, theirs, MORE], REPLY)]

    assert ([kind] if kind else []) == [drift.kind for drift in find_drift(grow(steps))]


def test_a_later_reply_that_changed_is_named_before_an_earlier_one_that_did_not():
    """The latest turn that the messages go on from."""
    edited = {**REPLY, "content": "edited"}
    a = call("a", [1], [[10]], [ASK], REPLY)
    b = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    c = call("c", [1, 10, 2, 21], [[30]], [ASK, REPLY, MORE, edited, MORE], REPLY)

    assert [("c", "b", "edited")] == [
        (drift.step_id, drift.earlier_step_id, drift.kind) for drift in find_drift(grow([a, b, c]))
    ]


def test_a_reply_that_the_agent_dropped():
    """Messages that go on from an earlier step's, without its reply, are another branch: nothing drifted."""
    system = {"role": "system", "content": "told"}
    first = call("a", [1, 2], [[10]], [system, ASK], REPLY)
    dropped = call("b", [1, 2, 4], [[20]], [system, ASK, MORE], REPLY)
    goes_on = call("c", [1, 2, 4, 20, 5], [[30]], [system, ASK, MORE, REPLY, MORE], REPLY)

    assert [] == find_drift(grow([first, dropped, goes_on]))


def test_one_message_that_the_agent_changed():
    """Of what the user or a tool said: the rest is as it was. Two changes are another conversation."""
    asked, told = {"role": "user", "content": "ask "}, {"role": "system", "content": "told"}
    first = call("a", [1, 2], [[10]], [told, ASK], REPLY)
    one = call("b", [1, 3], [[20]], [told, asked, REPLY, MORE], REPLY)
    two = call("b", [1, 3], [[20]], [MORE, asked, REPLY, MORE], REPLY)

    assert [("b", "a", "edited", 1)] == [
        (drift.step_id, drift.earlier_step_id, drift.kind, drift.index) for drift in find_drift(grow([first, one]))
    ]
    assert [] == find_drift(grow([first, two]))


THINKING = {**REPLY, "reasoning": "hm"}
CALLING = {**REPLY, "tool_calls": [{"function": LOOK}]}


@pytest.mark.parametrize(
    ("reply", "prompt", "texts", "kind"),
    [
        (THINKING, [1, 2, 12, 9], ("<think>hm", "reply"), "reasoning_stripped"),
        ({**REPLY, "content": "<think>hm</think>reply"}, [1, 2, 12, 9], ("<think>", "reply"), "reasoning_stripped"),
        (THINKING, [1, 3, 10, 11, 12], ("x<think>hm", "xreply"), "reasoning_stripped"),  # its opening is in the prompt
        (THINKING, [1, 2, 10, 13], ("reply", "reply"), "retokenized"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1}', '{"a":1}'), "tool_call_rewritten"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'), "tool_call_rewritten"),
        (CALLING, [1, 2, 10, 13], ("so I reply  ", "so I reply\n"), "whitespace"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1}', '{"a": 1}'), "retokenized"),
        (REPLY, [1, 2, 10, 13], ("hello there", "hello"), "retokenized"),
        (REPLY, [1, 2, 10, 13], ("hello  there", "hello th"), "whitespace"),
        (REPLY, [1, 2, 10, 13], ("</think>hello", "hello"), "reasoning_stripped"),
        (REPLY, [1, 2, 10, 13], ("hello", "goodbye"), "other"),
        (REPLY, [1, 2, 10, 13], ("", ""), "other"),
        (REPLY, [1, 3, 10], ("<think>\n", "<|im"), "template"),
        (REPLY, [1, 3, 10], ("a\n\nb", "a\n\nb"), "retokenized"),
    ],
)
def test_kinds(reply, prompt, texts, kind):
    """By what the reply had, by the texts around the boundary, and by where it is: each kind that a template makes."""
    steps = [call("a", [1, 2], [[10, 11, 12]], [ASK], reply), call("b", prompt, [[20]], [ASK, reply, MORE], REPLY)]
    (boundary,) = find_boundaries(grow(steps))

    assert isinstance(boundary, Boundary)
    assert kind == explain(boundary, *texts).kind
    assert kind in KINDS
    assert "unexplained" == explain(boundary).kind, "a kind that texts decide is not known without them"


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("caf\ufffd<|im_end|>", "caf<|im_end|>\n"),  # vLLM shows no character that was never completed
        ("caf\ufffd au lait", "caf\ufffd\ufffd\ufffd au l"),  # it came back as U+FFFD, of three bytes
        ("caf\u00e9 a", "caf\ufffd"),  # the window ends within a character
    ],
)
def test_bytes_that_are_no_text(expected, found):
    """Of a character that was never completed, or that the window cuts, nothing is compared: the text is the same."""
    steps = [call("a", [1], [[10, 11]], [ASK], REPLY), call("b", [1, 10, 13], [[20]], [ASK, REPLY, MORE], REPLY)]
    (boundary,) = find_boundaries(grow(steps))

    assert "retokenized" == explain(boundary, expected, found).kind


@pytest.mark.parametrize(
    ("prompt", "sent_back", "kind"),
    [
        ([1] * 9 + [3, 10, 11], REPLY, "reasoning_stripped"),  # it may open the reply, whose thoughts the agent dropped
        ([1] * 10 + [2, 11], REPLY, "reasoning_stripped"),
        ([3] * 11, THINKING, "template"),  # far from the reply
        ([1] * 10 + [2, 10], THINKING, "template"),  # it ends there
    ],
)
def test_kinds_that_need_no_texts(prompt, sent_back, kind):
    """What messages and ids show is known at once, and does not depend on texts."""
    steps = [call("a", [1] * 10 + [2], [[10, 11]], [ASK], THINKING), call("b", prompt, [[20]], [ASK, sent_back, MORE])]
    (boundary,) = find_boundaries(grow(steps))

    assert {kind} == {boundary.known, explain(boundary).kind, explain(boundary, "a", "a").kind}


def test_windows_of_the_same_ids_have_the_same_key():
    """Texts are kept by what they depend on: the engine, the ids that were expected and those that were found."""
    key = Window("a", 2, 0, (1, 2, 3), (1, 2, 4)).key

    assert key == Window("a", 9, 7, (1, 2, 3), (1, 2, 4)).key
    assert key != Window("b", 2, 0, (1, 2, 3), (1, 2, 4)).key
    assert key != Window("a", 2, 0, (1, 2, 4), (1, 2, 3)).key
    assert Window("a", 2, 0, (1, 2), (3, 4)).key != Window("a", 2, 0, (1, 2, 3), (4,)).key


def test_an_earlier_turn_that_the_template_writes_anew():
    """A user's turn may strip the thoughts of a reply before the last one: that turn is looked at."""
    a = call("a", [1], [[10, 11]], [ASK], THINKING)
    b = call("b", [1, 10, 11, 2], [[20]], [ASK, THINKING, MORE], REPLY)
    c = call("c", [1, 11, 2, 20, 3], [[30]], [ASK, THINKING, MORE, REPLY, MORE], REPLY)
    (boundary,) = find_boundaries(grow([a, b, c]))

    assert ("b", 1, True) == (boundary.earlier.step.step_id, boundary.window.index, boundary.in_reply)
    assert "reasoning_stripped" == explain(boundary, "<think>hm", "more").kind


@given(forests())
def test_what_joins_has_not_drifted(steps):
    """Steps without messages, or whose ids go on, are never reported; and reporting changes no sequence."""
    before = sequences(steps, RolloutFacts("r1", None, "open", None, {}, None, {}))

    assert [] == find_boundaries(grow(steps))
    assert before == sequences(steps, RolloutFacts("r1", None, "open", None, {}, None, {}))


def test_template_that_strips():
    """Ids that part within the earlier prompt are drift, even where the sampled ids stand at the same place again."""
    opening = [2] * 8
    first = call("a", [1, 50, *opening], [[10]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 60, *opening, 10, 3], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (1, (1, 50, *opening[:7]), (1, 60, *opening[:7])) == (drift.index, drift.expected_ids, drift.found_ids)
    assert "template" == drift.kind


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


def test_odd_responses():
    """What is no choice has no message."""
    first = call("a", [1], [[10]], [ASK], REPLY)
    odd = {"choices": ["odd", *first.response["choices"]]}

    assert [] == find_drift(
        grow([replace(first, response=odd), call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)])
    )


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
