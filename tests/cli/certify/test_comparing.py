"""Contents of responses, independent of events, and how two of them differ."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import RESPONSE

from proxy.cli.certify.comparing import are_equal, difference, formats, last_events, merged, payloads, sampled_ids

EVENTS = [
    {"id": "a", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"id": "a", "choices": [{"index": 1, "delta": {"content": "two"}, "finish_reason": None}]},
    {"id": "a", "choices": [{"index": 0, "delta": {"content": "one"}, "logprobs": {"content": [{"token": "one"}]}}]},
    {"id": "a", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]


def stream(*events: object) -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_a_stream_is_its_events_with_names_and_its_end():
    """Comments, for example in a replay, are not events."""
    body = b": keep-alive\n\nevent: ids\ndata: {}\r\n\r\n" + stream(1)

    assert payloads("text/event-stream", body) == [{"event": "ids", "data": {}}, 1, "[DONE]"]
    assert payloads("application/json", b'{"a": 1}') == [{"a": 1}]


@pytest.mark.parametrize("body", [b"", b"{", b"<html>"])
def test_a_response_that_is_no_json_raises(body):
    with pytest.raises(ValueError, match="JSON|json|char|end of"):
        payloads("application/json", body)


@given(st.lists(st.text(min_size=1), min_size=2, max_size=6), st.integers(0, 5))
def test_the_division_into_events_is_not_compared(texts, place):
    """The text of one choice may come in any parts, with names and times of its own."""
    place = min(place, len(texts) - 1)
    joined = [*texts[:place], "".join(texts[place:])]
    first, second = (
        [{"id": number, "created": number, "choices": [{"index": 0, "delta": {"content": text}}]} for text in parts]
        for number, parts in ((1, texts), (2, joined))
    )

    assert merged(first) == merged(second)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.booleans(),
)
def test_the_division_of_streams_of_generate_is_not_compared(one, other, continues):
    """Each event has what its choice has so far, or what it adds."""

    def streamed(*sizes):
        events = []
        for index, parts in enumerate(sizes):
            done = 0
            for size in parts:
                begun, done = done if continues else 0, done + size
                meta = {"completion_tokens": done, "finish_reason": None}
                text = "abcdefghijklmnopqrstuvwxyz"[begun:done]
                ids = list(range(begun, done))
                events.append({"text": text, "output_ids": ids, "meta_info": meta, "index": index})
        return merged(last_events([*events, "[DONE]"]), is_stream=True)

    assert streamed(one, other) == streamed([1] * sum(one), [1] * sum(other))
    assert streamed(one, other) != streamed(one, [*other, 1])


@pytest.mark.parametrize(
    "event",
    [
        1,
        {"meta_info": 1},
        {"meta_info": {}, "index": [], "output_ids": {}},
        {"meta_info": {"completion_tokens": 9}, "output_ids": [1]},
    ],
)
def test_odd_events_of_generate_are_compared_too(event):
    """They raise nothing, and differ from none."""
    assert merged(last_events([event, event]), is_stream=True) != merged(last_events([]), is_stream=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda event: event["choices"][0].update(index=2), "choices.0 has"),
        (lambda event: event["choices"][0]["delta"].update(content="other"), "'other'"),
        (lambda event: event["choices"][0]["delta"].update(more=1), "has more keys ['more'], and lacks []"),
        (lambda event: event["choices"][0].pop("logprobs"), "lacks ['logprobs']"),
        (lambda event: event["choices"][0]["logprobs"]["content"][0].update(token="x"), "choices.0.logprobs.content"),
        (lambda event: event.update(id=None), "id"),
    ],
)
def test_a_difference_is_found_and_named(change, message):
    """Of text, keys, lists, choices, and whether a name exists."""
    changed = orjson.loads(orjson.dumps(EVENTS))
    change(changed[2])

    assert message in difference(merged(EVENTS), merged(changed))
    assert difference(merged(EVENTS), merged(EVENTS)) == ""


def test_the_order_of_keys_is_compared_in_a_response():
    """An event of a stream may have the keys of several others."""
    one, other = {"id": "a", "choices": []}, {"choices": [], "id": "b"}
    events = [
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
    ]
    joined = [{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}]

    assert "has its keys as" in difference(merged([one]), merged([other]))
    assert merged(events, is_stream=True) == merged(joined, is_stream=True)
    assert merged(events) != merged(joined)


def test_numbers_are_compared_nearly_and_types_exactly():
    """As batches of other sizes round differently."""
    first, near, far = (
        merged([{"choices": [{"index": 0, "logprobs": [-1.0, value]}]}]) for value in (-2.0, -2.0004, -2.1)
    )

    assert are_equal(first, near)
    assert not are_equal(first, far)
    assert not are_equal([1], [True])
    assert not are_equal([1], [1.0])


def test_line_breaks_around_tool_calls_are_not_compared():
    """SGLang sends them only if they have an event of their own; without calls they are."""
    calls = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    first, second = ([{"choices": [{"index": 0, "delta": {"content": text} | calls}]}] for text in ("a\n", "a"))
    third, fourth = ([{"choices": [{"index": 0, "delta": {"content": text}}]}] for text in ("a\n", "a"))

    assert merged(first) == merged(second)
    assert merged(third) != merged(fourth)


def test_formats_are_equal_for_other_texts():
    texts = [{"choices": [{"index": 0, "text": text}]} for text in ("a", "b")]

    assert formats(merged(texts[:1])) == formats(merged(texts[1:]))
    assert formats(merged(texts[:1])) != formats(merged([{"choices": [{"index": 0, "text": "a", "more": 1}]}]))


@given(st.lists(RESPONSE, max_size=3), st.lists(RESPONSE, max_size=3))
def test_any_json_is_compared(one, two):
    """Of any type and depth; equal responses have no difference, and others have one."""
    first, second = merged(one), merged(two)

    assert (difference(first, second) == "") == are_equal(first, second)
    assert are_equal(first, merged(one))
    assert formats(first) == formats(merged(one))
    assert all(sampled_ids(kind, response) is None for kind in ("vllm", "sglang", "llamacpp") for response in one)


@pytest.mark.parametrize(
    ("kind", "response"),
    [
        ("vllm", {"choices": [{"index": 1, "token_ids": [7, 8]}]}),
        ("sglang", {"choices": [{"index": 1, "response_token_ids": [7, 8]}]}),
        ("llamacpp", {"choices": [{"index": 1}], "__verbose": {"tokens": [7, 8]}}),
        ("llamacpp", {"choices": [{"index": 1, "__verbose": {"tokens": [7, 8]}}]}),
    ],
)
def test_ids_are_read_where_each_engine_returns_them(kind, response):
    assert sampled_ids(kind, response) == {1: [7, 8]}
