"""Variants of a conversation: stand-ins for a reply, and other texts for what is new."""

import orjson
import pytest
from turns import assistant, tool_call

from proxy.continuation.twins import OTHER_WORD, WORD, other_forms, other_texts, repeats_a_part, stand_in


@pytest.mark.parametrize(
    "reply",
    [
        assistant("Yes"),
        assistant("Yes", reasoning="Hm"),
        assistant(None, tool_calls=[tool_call("{}")]),
        assistant("Yes", tool_calls=[tool_call('{"x": 1}'), tool_call("", name="sub", call_id="call-2")]),
        assistant("<think>Hm</think>Yes"),
    ],
)
def test_a_variant_has_the_parts_of_the_reply_with_other_texts(reply):
    """Names and ids of calls are kept, because templates and tool messages refer to them."""
    one, other = stand_in(reply, WORD), stand_in(reply, OTHER_WORD)

    assert reply.keys() == one.keys() == other.keys()
    assert [bool(one[name]) for name in reply] == [bool(reply[name]) for name in reply]
    for ours, theirs in zip(one.get("tool_calls", []), reply.get("tool_calls", []), strict=True):
        assert (theirs["id"], theirs["function"]["name"]) == (ours["id"], ours["function"]["name"])
        assert WORD in orjson.loads(ours["function"]["arguments"])["x"]
    assert one != other


def test_an_empty_reply_gets_a_word():
    """Templates may drop empty turns."""
    assert WORD in stand_in(assistant(None), WORD)["content"]


def test_other_texts_begin_with_another_letter_than_every_new_text():
    """So that two renderings differ where the first new text begins."""
    texts = ["kiwi", "Bolt", " ufer", "Xeno"]
    new = [{"role": "user", "content": text} for text in texts]
    new.append({"role": "user", "content": [{"type": "text", "text": "Jade"}]})
    word, others = other_texts(new)

    assert [message["role"] for message in new] == [message["role"] for message in others]
    first = {message["content"][0].lower() for message in others[:4]} | {others[4]["content"][0]["text"][0].lower()}
    assert first.isdisjoint("kbuxj")
    assert word == others[0]["content"]
    assert {"type": "text", "text": word} == others[4]["content"][0]


def test_texts_that_begin_with_every_letter_have_no_others():
    """The turn is then not continued by twins."""
    every = [{"role": "user", "content": letter} for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]

    assert "" == other_texts(every)[0]


def test_other_forms_have_the_calls_alone_or_a_text():
    """A reply that is a text, or calls, has no such form of its own."""
    text, calls = assistant(WORD), [tool_call("{}")]

    assert [] == other_forms(assistant("Yes"))
    assert [text] == other_forms(assistant(None, reasoning="Hm")) == other_forms(assistant("Yes", reasoning="Hm"))
    assert [text] == other_forms(assistant(None)) == other_forms(assistant(None, tool_calls=calls))
    alone = assistant("", reasoning="", tool_calls=calls)
    assert [alone, text] == other_forms(assistant("Yes", reasoning="Hm", tool_calls=calls))


def test_the_word_of_each_part_has_another_number():
    """A rendering in which a part occurs twice is recognized, in upper or lower case."""
    reply = assistant("Yes", reasoning="Hm", tool_calls=[tool_call("{}"), tool_call("{}")])
    made = stand_in(reply, WORD)
    arguments = [orjson.loads(call["function"]["arguments"])["x"] for call in made["tool_calls"]]
    words = [
        made["content"],
        made["reasoning"],
        *arguments,
        stand_in(assistant("<think>Hm</think>Yes"), WORD)["content"],
    ]

    assert [WORD, f"2{WORD}", f"3{WORD}", f"4{WORD}", f"<think>\n1{WORD}\n</think>\n\n{WORD}"] == words
    assert not repeats_a_part(" ".join(words[:4]))
    assert repeats_a_part(f"{words[0]} > {words[0]}")
    assert repeats_a_part(f"{words[2]} {words[1].upper()} {words[1].upper()}")
