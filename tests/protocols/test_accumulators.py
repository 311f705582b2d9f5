"""Streamed chunks accumulate to the response of the unstreamed call."""

import orjson
import pytest
from tests.support.recorded import comparable, load, names

from proxy.protocols.accumulators import ChatAccumulator, CompletionsAccumulator, GenerateAccumulator
from proxy.protocols.dialects import DIALECTS

# Not comparable, by tests/cassettes/README.md: other lengths, other seeds, speculation with temperature > 0, or aborted at
# another moment.
INCOMPARABLE = {"cmpl_multi_prompt", "spec_ngram/s_rep_stop", "spec_ngram/s_tool", "abort/pause_abort2_nonstream"}
# vLLM returns another message in its stream than in its unstreamed response. Ids and logprobs are the same.
OTHER_MESSAGE = {
    "tool_required": "a cut-off call is text unstreamed, and deltas of a call streamed (seen on vLLM 0.32)",
    "tool_required_noflags": "likewise",
    "tool_auto_truncated": "likewise",
    "tool_named_n2": "likewise",
    "tool_auto_toolcallonly_garbage": "a malformed call is text unstreamed, and nothing streamed (seen on vLLM 0.32)",
    "abort/pause_abort_nonstream": "aborted before the first token: streamed without a finish reason (seen on vLLM 0.32)",
    "reasoning/r_end_early": "further ends of thought are in streamed content, and not in unstreamed",
    "reasoning/r_n2": "likewise",
    "reasoning/r_think_then_end_immediate": "likewise",
    "reasoning/r_required": "a cut-off call",
    "pairs_hermes/chat_required_n_inj": "a cut-off call",
    "pairs_hermes/chat_required_n_plain": "a cut-off call",
}


def twins() -> list[tuple[str, str]]:
    every = set(names())
    found = [(name.removesuffix("_stream"), name) for name in every if name.endswith("_stream")]
    found = [(whole if whole in every else f"{whole}_nonstream", stream) for whole, stream in found]
    found += [(name.replace("_s_", "_n_"), name) for name in every if "pairs_" in name and "_s_" in name]
    return sorted(
        (whole, stream)
        for whole, stream in found
        if whole in every
        and whole not in INCOMPARABLE
        and load(whole).path in DIALECTS
        and load(whole).status == load(stream).status == 200
        and "include_reasoning_false" not in whole
        and "seed" in load(whole).body
    )


def accumulate(name: str) -> dict:
    cassette = load(name)
    accumulator = DIALECTS[cassette.path].accumulator()
    for event in cassette.response.split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if payload.strip() not in (b"", b"[DONE]"):
            accumulator.feed(orjson.loads(payload))
    return accumulator.finish()


def without_messages(response: dict) -> dict:
    hidden = ("message", "finish_reason")
    choices = [{key: value for key, value in choice.items() if key not in hidden} for choice in response["choices"]]
    return {**response, "choices": choices}


@pytest.mark.parametrize(("whole", "stream"), twins())
def test_an_accumulated_stream_equals_the_unstreamed_response(whole, stream):
    """Message, ids, logprobs, finish reasons and usage are the same, for every recorded pair of calls."""
    expected, actual = orjson.loads(load(whole).response), accumulate(stream)
    if actual["usage"] is not None and "completion_tokens_details" not in expected["usage"]:
        assert expected["usage"] == actual["usage"]
    if whole in OTHER_MESSAGE:
        expected, actual = without_messages(expected), without_messages(actual)
    if load(stream).body.get("echo"):  # its first chunk has prompt ids that were not requested (seen on vLLM 0.32)
        for choice in actual["choices"]:
            choice.pop("prompt_token_ids", None)
            expected["choices"][choice["index"]].pop("prompt_token_ids", None)

    assert comparable(expected) == comparable(actual)


def test_more_than_80_recorded_pairs_are_compared():
    assert len(twins()) > 80


def test_each_listed_exception_still_differs():
    listed = [(whole, stream) for whole, stream in twins() if whole in OTHER_MESSAGE]

    assert len(OTHER_MESSAGE) == len(listed)
    assert [
        whole
        for whole, stream in listed
        if comparable(orjson.loads(load(whole).response)) == comparable(accumulate(stream))
    ] == []


def test_interleaved_choices_are_joined_by_index():
    accumulator = CompletionsAccumulator()
    for index, text in ((1, "b"), (0, "a"), (1, "B"), (0, "A")):
        accumulator.feed({"id": "x", "choices": [{"index": index, "text": text, "finish_reason": None}]})
    accumulator.feed({"choices": [{"index": 1, "text": "", "finish_reason": "stop"}]})

    assert [choice["text"] for choice in accumulator.finish()["choices"]] == ["aA", "bB"]
    assert accumulator.finished == 1


def test_a_null_list_of_logprobs_adds_no_entries():
    accumulator = CompletionsAccumulator()
    for top in ([{"a": -1.0}], None):
        accumulator.feed({"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": top}}]})

    assert accumulator.finish()["choices"][0]["logprobs"] == {"tokens": ["a", "a"], "top_logprobs": [{"a": -1.0}]}


@pytest.mark.parametrize("index", ["0", 0.0, True, None])
def test_a_choice_index_that_is_not_an_integer_raises_type_error(index):
    with pytest.raises(TypeError, match="index"):
        ChatAccumulator().feed({"choices": [{"index": index, "delta": {"content": "a"}}]})


def test_tool_call_deltas_are_joined_by_index():
    """Arguments are concatenated; id and name may be sent once or with every delta."""
    accumulator = ChatAccumulator()
    calls = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"x":'}},
        {"index": 1, "id": "c2", "function": {"name": "mul"}},
        {"index": 0, "id": None, "function": {"name": None, "arguments": "1}"}},
    ]
    for call in calls:
        accumulator.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})

    expected = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": ""}},
    ]
    assert accumulator.finish()["choices"][0]["message"]["tool_calls"] == expected


def test_accumulating_does_not_change_the_chunks():
    """A chunk is forwarded to the client after it is accumulated for the record."""
    deltas = [({"content": "a"}, 1, -1.0), ({}, 2, -2.0)]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "token_ids": [token], "logprobs": {"content": [{"logprob": p}]}}]}
        for delta, token, p in deltas
    ]
    before = orjson.dumps(chunks)
    accumulator = ChatAccumulator()
    for each in chunks:
        accumulator.feed(each)

    assert before == orjson.dumps(chunks)
    assert accumulator.finish()["choices"][0]["token_ids"] == [1, 2]


def chunk(response_id, *indexes, text="x"):
    """Return a chunk with a text for each of these choices."""
    return {"id": response_id, "choices": [{"index": at, "delta": {"content": text}} for at in indexes]}


def problems_of(*chunks):
    accumulator = ChatAccumulator()
    for each in chunks:
        accumulator.feed(each)
    return accumulator.problems


def test_each_choice_of_a_stream_may_have_an_id_of_its_own():
    """So it is on SGLang 0.5.23, where a chunk without content has any of them; the response has the first one."""
    accumulator = ChatAccumulator()
    contents = (chunk("a", 0), chunk("b", 1), chunk("a", 0), chunk("b", 1))
    for each in (*contents, chunk("b", 0, text=""), chunk("a", 1, text=""), chunk("b"), chunk("a")):
        accumulator.feed(each)

    assert accumulator.problems == set()
    assert accumulator.finish()["id"] == "a"


@pytest.mark.parametrize(
    ("parts", "is_sound"),
    [
        (({"cached": 3}, {"input_ids": [1], "output_ids": [[2]]}), True),
        (({"input_ids": None, "cached": 3}, {"input_ids": [1]}), True),
        (({"input_ids": [1]}, {"input_ids": [1], "output_ids": [[2]]}), True),
        (({"input_ids": [1]}, {"input_ids": [3]}), False),
        (({"input_ids": [1]}, {"input_ids": None, "cached": 3}), True),
        (({"input_ids": [1]}, [1]), False),
    ],
)
def test_the_parts_of_sglext_may_arrive_in_several_chunks(parts, is_sound):
    """SGLang sends ids in an event of their own if they are framed. A part that changes is a problem."""
    accumulator = ChatAccumulator()
    for part in parts:
        accumulator.feed({"id": "a", "choices": [], "sglext": part})

    assert (set() if is_sound else {"changed_midstream"}) == accumulator.problems
    if is_sound:
        expected = {name: part for part in parts for name, part in part.items() if part is not None}
        assert accumulator.finish()["sglext"] == expected


@pytest.mark.parametrize(
    "chunks",
    [
        (("a", 0), ("b", 0)),
        (("a", 0), ("b", 1), ("b", 0)),
        (("a", 0), ("b", 1), ("a", 1)),
        (("a", 0), ("b", 1), ("c", 1)),
        (("a", 0, 1), ("b", 1)),
        (("a", 0), ("b", 1), ("c",)),
        (("a", 0), ("b",)),
    ],
)
def test_an_id_that_changes_within_a_choice_is_a_problem(chunks):
    assert problems_of(*(chunk(*each) for each in chunks)) == {"changed_midstream"}


def generated(index, ids, **more):
    choice = {"index": index, "finish_reason": None, "token_ids": ids, "sampling_mask": None, "logprobs": None} | more
    return {"request_id": "g", "usage": None, "choices": [choice]}


def accumulate_generated(*chunks):
    accumulator = GenerateAccumulator()
    before = orjson.dumps(chunks)
    for piece in chunks:
        accumulator.feed(piece)
    response = accumulator.finish()
    assert before == orjson.dumps(chunks)
    return response


def test_an_accumulated_stream_of_generate_equals_the_unstreamed_response():
    """vLLM's streams have no model, no creation time, and usage only on request; these fields are not compared."""
    events = [event.removeprefix(b"data: ") for event in load("scale_out/generate_stream").response.split(b"\n\n")]
    accumulated = accumulate_generated(*(orjson.loads(event) for event in events if event.startswith(b"{")))
    whole = orjson.loads(load("scale_out/generate").response)

    assert {**whole, **accumulated, "usage": None, "request_id": None} == {**whole, "usage": None, "request_id": None}


def test_interleaved_choices_of_generate_are_joined_by_index():
    """Ids, logprobs, sampling mask and text are concatenated per choice in the order of arrival."""
    first_entry, second_entry = {"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -2.0}
    response = accumulate_generated(
        generated(1, [1], logprobs={"content": [first_entry]}, sampling_mask=[[1, 5]], text="a"),
        generated(0, [9], text="x"),
        generated(1, [2], logprobs={"content": [second_entry]}, sampling_mask=[[]], text="b", finish_reason="stop"),
        generated(0, [], text="y", finish_reason="length", weight_versions=[{"version": "v", "start": 0, "end": 1}]),
    )
    first, second = response["choices"]

    spans = [{"version": "v", "start": 0, "end": 1}]
    assert {"index": 0, "token_ids": [9], "text": "xy", "weight_versions": spans}.items() <= first.items()
    assert (first["logprobs"], first["sampling_mask"]) == (None, None)
    assert {"index": 1, "token_ids": [1, 2], "text": "ab", "sampling_mask": [[1, 5], []]}.items() <= second.items()
    assert second["logprobs"] == {"content": [first_entry, second_entry]}
    assert "weight_versions" not in second


def test_usage_is_read_from_a_chunk_without_choices():
    """vLLM sends it last, if requested."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1}

    assert usage == accumulate_generated(generated(0, [1]), {"choices": [], "usage": usage})["usage"]
    assert accumulate_generated(generated(0, [1]))["usage"] is None


def test_finished_choices_are_counted_once():
    """The stream's end is detected by this count."""
    accumulator = GenerateAccumulator()
    counts = []
    chunks = (
        generated(0, [1]),
        generated(1, [1], finish_reason="stop"),
        generated(1, []),
        generated(0, [], finish_reason="length"),
    )
    for piece in chunks:
        accumulator.feed(piece)
        counts.append(accumulator.finished)

    assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "malformed", [{"choices": [{"index": True}]}, {"choices": [{"token_ids": [1]}]}, {"choices": [7]}]
)
def test_a_malformed_chunk_raises(malformed):
    """The caller expects these three exceptions."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        accumulate_generated(malformed)


@pytest.mark.parametrize(
    ("accumulator", "choice", "is_undecided"),
    [
        (ChatAccumulator, {"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}}, False),
        (ChatAccumulator, {"delta": {}, "logprobs": {"content": [{"token": "", "bytes": []}]}}, True),
        (ChatAccumulator, {"delta": {"content": "a\ufffd"}}, True),
        (ChatAccumulator, {"delta": {"content": "a", "reasoning": ""}}, False),
        (ChatAccumulator, {"delta": {"reasoning": "a"}}, True),
        (ChatAccumulator, {"delta": {"reasoning_content": "a"}}, True),
        (ChatAccumulator, {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}, True),
        (CompletionsAccumulator, {"text": "a", "logprobs": {"tokens": ["a"]}}, False),
        (CompletionsAccumulator, {"text": "", "logprobs": {"tokens": ["a", ""]}}, True),
    ],
)
def test_a_choice_is_undecided_while_its_rest_depends_on_more_than_its_ids(accumulator, choice, is_undecided):
    chunks = accumulator()
    assert not chunks.is_undecided
    chunks.feed({"choices": [{"index": 0, "finish_reason": None, **choice}]})
    assert chunks.is_undecided == is_undecided
