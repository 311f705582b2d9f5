"""The turns that a list of messages continues, by what the agent repeats."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.continuation.turns import Conversations

USER, MORE = {"role": "user", "content": "Which?"}, {"role": "user", "content": "And then?"}


def assistant(content="Yes", *, call=None, arguments='{"x": 1}', **fields):
    if call is not None:
        fields["tool_calls"] = [{"id": call, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": content, **fields}


@dataclass(eq=False)
class Recorded:
    """A recorded reply."""

    step_id: str
    reply: Any
    place: tuple[int, bytes]
    choice: int = 0
    names: frozenset[str] = frozenset()
    agent: str | None = None
    is_delivered: bool = True
    parent: Any = None


@dataclass
class Rollout:
    """Recorded replies, added one after the other."""

    conversations: Conversations = field(default_factory=Conversations)
    added: list[Recorded] = field(default_factory=list)

    def add(self, step_id, messages, reply, *, follows=None, **facts):
        names = frozenset(call["id"] for call in reply.get("tool_calls") or ())
        recorded = Recorded(step_id, reply, self.conversations.place(messages), **{"names": names, **facts})
        self.added.append(recorded)
        self.conversations.add(recorded, follows or facts.get("parent"))
        return recorded

    def follow(self, *messages, fits=lambda _: True, **caller):
        """Return the step ids of the replies that messages continue, by position."""
        found = self.conversations.follow([USER, *messages], fits, **caller)
        return {position: [reply.step_id for reply in replies] for position, replies in found}


def replies(*recorded, **facts):
    """Return a rollout with these replies to its first call: s0, s1, …"""
    rollout = Rollout()
    for number, reply in enumerate(recorded):
        rollout.add(f"s{number}", [USER], reply, **{name: values[number] for name, values in facts.items()})
    return rollout


def test_replies_that_nothing_distinguishes_are_all_returned():
    """Nothing is guessed."""
    rollout = replies(assistant(reasoning="A"), assistant(reasoning="B"), assistant("No"))

    assert rollout.follow(assistant(), MORE) == {1: ["s0", "s1"]}
    assert rollout.follow(assistant("Never"), MORE) == {}
    assert rollout.follow({"role": "user", "content": "Yes"}, MORE) == {}


@pytest.mark.parametrize("field_name", ["reasoning", "reasoning_content"])
def test_reasoning_that_is_sent_back_distinguishes_replies(field_name):
    """Whitespace apart, and in either field; with the reasoning of none, none is meant."""
    rollout = replies(assistant(reasoning="Keep it."), assistant(reasoning="Delete\nit."), assistant())

    assert rollout.follow(assistant(**{field_name: " Delete it."}), MORE) == {1: ["s1"]}
    assert rollout.follow(assistant(**{field_name: "Burn it."}), MORE) == {1: []}
    assert rollout.follow(assistant(**{field_name: ["Keep it."]}), MORE) == {1: []}
    assert replies(assistant()).follow(assistant(**{field_name: "Keep it."}), MORE) == {1: []}


def test_a_call_id_that_the_agent_repeats_identifies_the_reply():
    """It precedes everything else; IDs that no reply has are the agent's own."""
    rollout = replies(assistant(call="c0"), assistant(call="c1"), agent=["a", "b"])

    assert rollout.follow(assistant(call="c1"), MORE, agent="a") == {1: ["s1"]}
    assert rollout.follow(assistant(call="own"), MORE, agent="a") == {1: ["s0"]}
    assert rollout.follow(assistant(call="own"), MORE) == {1: ["s0", "s1"]}


def test_a_call_id_of_another_reply_is_of_no_reply():
    """The agent repeats the reply's call ID, but edited the reply."""
    rollout = replies(assistant("Yes", call="c0"), assistant("No", call="c1"))

    assert rollout.follow(assistant("Yes", call="c1"), MORE) == {1: []}


def test_a_call_without_an_id_has_the_id_of_its_dialect():
    """A prefix, the step id and the index."""
    rollout = replies(assistant(call="s0_0"), assistant(call="s1_0"))

    assert rollout.follow(assistant(call="toolu_s1_0"), MORE) == {1: ["s1"]}


def test_a_response_id_that_the_agent_repeats_identifies_the_reply():
    rollout = replies(assistant(), assistant(), names=[frozenset({"chatcmpl-0"}), frozenset({"chatcmpl-1"})])

    assert rollout.follow(assistant(id="chatcmpl-1"), MORE) == {1: ["s1"]}


def test_a_step_that_the_caller_names_is_meant():
    """Unless its reply was changed; steps of other places do not matter."""
    rollout = replies(assistant(), assistant(), assistant("No"))

    assert rollout.follow(assistant(), MORE, steps={"s1", "elsewhere"}) == {1: ["s1"]}
    assert rollout.follow(assistant(), MORE, steps={"s2"}) == {1: []}


def test_what_was_sent_back_before_distinguishes_the_replies_after_it():
    """A reply follows the reply that its prompt contains as it was sampled."""
    rollout = replies(assistant(reasoning="A", call="c0"), assistant(reasoning="B", call="c1"))
    for step_id, parent in zip(("t0", "t1"), tuple(rollout.added), strict=True):
        rollout.add(step_id, [USER, parent.reply, MORE], assistant("Bye"), parent=parent)
    end = MORE, assistant("Bye"), MORE

    assert rollout.follow(assistant(reasoning="B", call="own"), *end) == {3: ["t1"], 1: ["s1"]}
    assert rollout.follow(assistant(call="c0"), *end) == {3: ["t0"], 1: ["s0"]}
    assert rollout.follow(assistant(reasoning="B", call="c0"), *end) == {3: [], 1: []}
    assert rollout.follow(assistant(call="own"), *end) == {3: ["t0", "t1"], 1: ["s0", "s1"]}


def test_replies_that_the_call_may_continue_come_first():
    """Replies of other models and options are returned if there are no others."""
    rollout = replies(assistant(), assistant(" Yes"))

    assert rollout.follow(assistant(), MORE, fits=lambda reply: reply.step_id == "s1") == {1: ["s1"]}
    assert rollout.follow(assistant(), MORE, fits=lambda _: False) == {1: ["s0"]}


def test_an_unchanged_reply_comes_before_one_that_is_formatted_differently():
    """Whitespace around the text; spaces and the order of arguments."""
    rollout = replies(assistant("Yes\n"), assistant("Yes"))
    assert rollout.follow(assistant("Yes"), MORE) == {1: ["s1"]}
    assert rollout.follow(assistant(" Yes"), MORE) == {1: ["s0", "s1"]}

    rollout = replies(assistant(call="f:0", arguments='{"x":1}'), assistant(call="f:0"))
    assert rollout.follow(assistant(call="f:0"), MORE) == {1: ["s1"]}
    assert rollout.follow(assistant(call="f:0", arguments='{ "x":1 }'), MORE) == {1: ["s0", "s1"]}


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "1.0"), ("1", "true"), ("9007199254740992", "9007199254740993"), ("1" * 30, "1" * 29 + "2"), ("[]", "{}")],
)
def test_arguments_are_compared_as_json_has_them(one, other):
    """Numbers of different types, and integers beyond 2^53 and 2^64, are different."""
    rollout = replies(assistant(call="f:0", arguments=f'{{"x":{one}}}'))

    assert rollout.follow(assistant(call="f:0", arguments=f'{{"x": {one}}}'), MORE) == {1: ["s0"]}
    assert rollout.follow(assistant(call="f:0", arguments=f'{{"x": {other}}}'), MORE) == {}


def test_a_function_call_is_compared_as_a_tool_call():
    """The deprecated field."""
    function = {"name": "f", "arguments": "{}"}
    rollout = replies(assistant(function_call=function), assistant(function_call=None))

    assert rollout.follow(assistant(function_call=function), MORE) == {1: ["s0"]}
    assert rollout.follow(assistant(), MORE) == {1: ["s1"]}


def test_the_agent_distinguishes_equal_replies():
    """A call of an agent without a reply of its own may continue any agent's reply."""
    rollout = replies(assistant(), assistant(), agent=["a", "b"])

    assert rollout.follow(assistant(), MORE, agent="b") == {1: ["s1"]}
    assert rollout.follow(assistant(), MORE, agent="c") == {1: ["s0", "s1"]}


def test_later_messages_distinguish_equal_replies():
    """A call that begins with a recorded call, such as a retry, continues the same reply as that one."""
    rollout = replies(assistant(reasoning="A"), assistant(reasoning="B"), assistant(reasoning="C"))
    first, second, _ = rollout.added
    call = [USER, assistant(), MORE]
    rollout.add("t0", [USER, assistant(), USER], assistant("Bye"), follows=first)
    after = rollout.add("t1", call, assistant("Bye"), follows=second)
    rollout.add("u1", [*call, assistant("Bye"), USER], assistant("Well"), follows=after)

    assert rollout.follow(assistant()) == {1: ["s0", "s1", "s2"]}
    assert rollout.follow(assistant(), USER) == {1: ["s0"]}
    assert rollout.follow(*call[1:], assistant("Edited"), USER) == {1: ["s1"]}


def test_delivered_replies_come_before_undelivered_ones():
    rollout = replies(assistant(reasoning="A"), assistant(reasoning="B"), is_delivered=[True, False])

    assert rollout.follow(assistant(), MORE) == {1: ["s0"]}


def test_thoughts_in_the_text_may_be_dropped_if_the_caller_allows_it():
    """A reply that never had any comes before; reasoning that is sent in a field is compared with them."""
    rollout = replies(assistant("<think>Hm.</think>\nYes"))
    assert rollout.follow(assistant(), MORE) == {}
    assert rollout.follow(assistant(), MORE, drops_thoughts=True) == {1: ["s0"]}
    assert rollout.follow(assistant(reasoning="Hm."), MORE, drops_thoughts=True) == {1: ["s0"]}
    assert rollout.follow(assistant(reasoning="No."), MORE, drops_thoughts=True) == {1: []}

    rollout.add("s1", [USER], assistant())
    assert rollout.follow(assistant(), MORE, drops_thoughts=True) == {1: ["s1"]}


def test_arguments_that_are_nested_too_deeply_are_compared_as_texts():
    """Nothing parses them."""
    nested = "[" * 5000 + "]" * 5000
    rollout = replies(assistant(call="f:0", arguments=nested))

    assert rollout.follow(assistant(call="f:0", arguments=nested), MORE) == {1: ["s0"]}
    assert rollout.follow(assistant(call="f:0", arguments=f"{nested} "), MORE) == {}


def test_calls_of_any_shape_are_followed():
    """Agents and engines may send anything."""
    odd = [None, 5, {"id": 3}, {"function": 4}, {"id": "x", "function": {"name": ["f"], "arguments": {"a": 1}}}]
    rollout = Rollout()
    rollout.conversations.add(Recorded("s0", assistant(tool_calls=odd), rollout.conversations.place([USER])))

    assert rollout.follow(assistant(tool_calls=odd), MORE) == {1: ["s0"]}
    assert rollout.follow(assistant(tool_calls=odd[:-1]), MORE) == {}
    assert rollout.follow(assistant(tool_calls="odd"), "odd") == {}
