"""The tape of a playback: which calls ask for the same."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_step

from proxy.trajectory.codec import encode
from proxy.trajectory.tape import Tape, blanked, difference

PATTERNS = ["It is *", "took * s", "<id>*</id>", "a*b*c", "*end"]
QUESTION = {"role": "user", "content": "Weather?"}


def recorded(messages, reply="Rain.", *, step_id="s1", known=frozenset(), **facts):
    """A step with these messages, and its record."""
    body = {"model": "m", "messages": messages, **facts.pop("body", {})}
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}]}
    return encode(make_step(step_id, [1], [2], request=body, response=response, **facts), known)


def tape_of(*records, ignore=(), undelivered=frozenset()):
    """The tape of these records."""
    tape = Tape(ignore)
    blocks = {name: block for record in records for name, block in record.blocks.items()}
    tape.extend([record.record for record in records], blocks, undelivered)
    return tape


def finds(tape, messages, **body):
    """The ids of the steps that have the key of this chat call."""
    body = {"model": "m", "messages": messages, **body}
    return [step.step_id for step in tape.equal(tape.ask("chat", body, body).key, len(tape))]


def called(*names, arguments='{"a": 1}'):
    """A reply that calls tools with these ids."""
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name, content):
    """The result of a call."""
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_a_step_is_found_by_its_own_messages_and_fields():
    tape = tape_of(recorded([QUESTION], body={"temperature": 1}))
    assert finds(tape, [QUESTION], temperature=1) == ["s1"]
    assert finds(tape, [{**QUESTION, "content": "Snow?"}], temperature=1) == []
    assert finds(tape, [QUESTION]) == finds(tape, [QUESTION], temperature=0.5) == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_ignored_in_the_description_of_a_tool_makes_no_difference(wrapped):
    """Claude Code writes the month into one."""

    def tools(*texts, name="search"):
        own = [{"name": name, "description": text, "parameters": {}} for text in texts]
        return [{"type": "function", "function": each} for each in own] if wrapped else own

    tape = tape_of(recorded([QUESTION], body={"tools": tools("Search.\nIt is May.\nAsk.")}), ignore=PATTERNS)
    assert finds(tape, [QUESTION], tools=tools("Search.\nIt is June.\nAsk.")) == ["s1"]
    assert finds(tape, [QUESTION], tools=tools("Search.\nIt is June.\nAsk me.")) == []
    assert finds(tape, [QUESTION], tools=tools("Search.\nIt is June.\nAsk.", name="find")) == []
    for odd in (
        "It is June.",
        [],
        ["It is June."],
        [None],
        [{"description": 3}],
        [{"function": {"description": None}}],
    ):
        assert finds(tape, [QUESTION], tools=odd) == []


@pytest.mark.parametrize(
    "field", ["model", "seed", "stream", "stream_options", "metadata", "user", "prompt_cache_key", "store"]
)
def test_fields_of_the_client_alone_make_no_difference(field):
    assert finds(tape_of(recorded([QUESTION])), [QUESTION], **{field: "other"}) == ["s1"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "user", "content": "Weather?", "cache_control": {"type": "ephemeral"}},
    ],
)
def test_the_same_text_in_another_form_is_the_same_message(message):
    assert finds(tape_of(recorded([QUESTION])), [message]) == ["s1"]


def test_ids_of_tool_calls_are_compared_by_their_place_and_results_in_any_order():
    messages = [QUESTION, called("x", "y"), result("x", "1"), result("y", "2")]
    tape = tape_of(recorded(messages))
    assert finds(tape, [QUESTION, called("p", "q"), result("q", "2"), result("p", "1")]) == ["s1"]
    assert finds(tape, [QUESTION, called("p", "q"), result("q", "1"), result("p", "2")]) == []
    assert finds(tape, [QUESTION, called("p", "q"), result("p", "1")]) == []


def test_arguments_are_compared_as_json_and_thoughts_are_not():
    tape = tape_of(recorded([QUESTION, called("x", arguments='{"a": 1, "b": [true]}'), result("x", "1")]))
    other = {**called("x", arguments='{"b":[true],"a":1}'), "reasoning_content": "Hm."}
    assert finds(tape, [QUESTION, other, result("x", "1")]) == ["s1"]
    assert finds(tape, [QUESTION, called("x", arguments='{"b":[1],"a":1}'), result("x", "1")]) == []


def test_steps_of_one_key_are_found_in_their_order_the_delivered_ones_first():
    records = [recorded([QUESTION], step_id=name, index=at) for at, name in enumerate(("s1", "s2", "s3"))]
    assert finds(tape_of(*records, undelivered=frozenset({"s1"})), [QUESTION]) == ["s2", "s3", "s1"]


def test_partial_and_damaged_steps_are_not_answered():
    partial, damaged = recorded([QUESTION], step_id="s2", status="partial"), recorded([QUESTION], step_id="s3")
    damaged = replace(damaged, record=damaged.record[:-1])
    tape = tape_of(recorded([QUESTION]), partial, damaged)
    assert finds(tape, [QUESTION]) == ["s1"]
    assert tape.step("s2") is not None
    assert tape.step("s3") is None


def test_messages_that_are_equal_but_for_what_is_ignored_are_restored():
    recorded_question = {"role": "user", "content": "It is Monday.\nWeather?"}
    asked = [{"role": "user", "content": "It is Tuesday.\nWeather?"}, called("q"), result("q", "1")]
    tape = tape_of(recorded([recorded_question, called("x")]), ignore=["It is *"])
    body = {"messages": asked}
    call = tape.ask("chat", body, body)
    assert tape.restored(call, 3) == [recorded_question, called("x"), result("x", "1")]
    assert tape.restored(call, 1) == [recorded_question, *asked[1:]]
    assert tape.restored(call, 0) == asked


def test_messages_are_inherited_up_to_the_first_reply_to_a_call_that_the_tape_lacks():
    said = {"role": "assistant", "content": "Rain."}
    first, second = [QUESTION], [QUESTION, said, QUESTION]
    tape = tape_of(recorded(first), recorded(second, step_id="s2"))

    def length(messages, end):
        return tape.inherited_length(tape.ask("chat", {}, {"messages": messages}), end)

    third = [*second, {"role": "assistant", "content": "Snow."}, QUESTION]
    assert [length(third, end) for end in range(3)] == [1, 3, 5]
    assert [length(first, end) for end in range(3)] == [1, 1, 1]
    assert length([said, *second], 0) == 4  # the source made no call before this reply


def test_the_nearest_step_has_the_longest_common_beginning():
    longer = [QUESTION, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And?"}]
    first, known = recorded([QUESTION]), frozenset()
    second = recorded(longer, step_id="s2", known=known)
    tape = tape_of(first, second)
    asked = [*longer[:2], {"role": "user", "content": "Or?"}]
    body = {"messages": asked}
    step, shared = tape.nearest(tape.ask("chat", body, body), tape.steps)
    assert (step.step_id, shared) == ("s2", 2)
    assert difference(asked, longer, shared) == ("messages[2].content", "Or?", "And?")
    assert difference(asked[:2], longer, shared) == ("messages[2]", None, json.dumps(longer[2], separators=(",", ":")))


def test_a_completion_is_found_by_its_prompt():
    response = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}
    facts = {"dialect": "completions", "endpoint": "/v1/completions", "response": response}
    ids = [7] * 400
    records = [
        encode(make_step("s1", [1], [2], request={"model": "m", "prompt": "a" * 3000}, **facts)),
        encode(make_step("s2", ids, [2], request={"model": "m", "prompt": ids}, **facts)),
    ]
    tape = tape_of(*records)
    for name, prompt in (("s1", "a" * 3000), ("s2", ids)):
        request = {"model": "m", "prompt": prompt}
        assert [step.step_id for step in tape.equal(tape.ask("completions", request, request).key, 2)] == [name]
    request = {"model": "m", "prompt": "b"}
    assert tape.equal(tape.ask("completions", request, request).key, 2) == []


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        ("It is *", "So: It is 3.\nIt is 4.\nNo.", "So: \0\n\0\nNo."),
        ("took * s", "took 3 s, took 4 s, took 5", "\0, \0, took 5"),
        ("took * s", "took 3\n s", "took 3\n s"),
        ("<id>*</id>", "a<id>1</id>b<id>", "a\0b<id>"),
        ("*end", "the end\nno\nend end", "\0\nno\n\0\0"),
    ],
)
def test_a_pattern_matches_within_a_line(pattern, text, left):
    assert blanked(text, [pattern.split("*")]) == left


@given(st.text("abc endIt is took<>/\n", max_size=40), st.sampled_from(PATTERNS), st.text("xyz", max_size=5))
def test_what_a_pattern_ignores_makes_no_difference(around, pattern, other):
    """A text with a match has the same rest as the text with another match in its place."""
    parts = [pattern.split("*")]
    texts = [f"{around}\n{pattern.replace('*', word)}\n{around}" for word in (other, "w")]
    assert blanked(texts[0], parts) == blanked(texts[1], parts)


@given(
    st.lists(
        st.sampled_from(
            [QUESTION, called("x", "y"), result("x", "1"), result("y", "2"), {"role": "system", "content": "S"}]
        ),
        max_size=8,
    )
)
def test_a_recorded_list_of_messages_is_found_and_a_longer_one_is_not(messages):
    """The digests of stored blocks equal those of the messages of a call."""
    tape = tape_of(recorded(messages))
    assert finds(tape, messages) == ["s1"]
    assert finds(tape, [*messages, {"role": "user", "content": "more"}]) == []


@pytest.mark.parametrize("field", ["image_data", "use_beam_search", "grammar"])
def test_what_an_engine_reads_besides_a_prompt_makes_a_difference(field):
    tape = Tape()
    assert tape.ask("generate", {"text": "a", field: "b"}, {}).key != tape.ask("generate", {"text": "a"}, {}).key


def test_an_image_at_another_place_makes_a_difference():
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}
    contents = [text, image, text], [text, text, image]
    asked = [Tape().ask("chat", {}, {"messages": [{"role": "user", "content": content}]}) for content in contents]
    assert asked[0].key != asked[1].key
