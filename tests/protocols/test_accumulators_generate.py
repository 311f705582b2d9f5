"""Chunks of the generate endpoint accumulate to the response of the unstreamed call."""

import orjson
import pytest
from tests.support.recorded import load

from proxy.protocols.accumulators import GenerateAccumulator


def chunk(index, ids, **more):
    choice = {"index": index, "finish_reason": None, "token_ids": ids, "sampling_mask": None, "logprobs": None} | more
    return {"request_id": "g", "usage": None, "choices": [choice]}


def accumulate(*chunks):
    accumulator = GenerateAccumulator()
    before = orjson.dumps(chunks)
    for piece in chunks:
        accumulator.feed(piece)
    response = accumulator.finish()
    assert before == orjson.dumps(chunks)
    return response


def test_an_accumulated_stream_equals_the_unstreamed_response():
    """vLLM's streams have no model, no creation time, and usage only on request; these fields are not compared."""
    events = [event.removeprefix(b"data: ") for event in load("scale_out/generate_stream").response.split(b"\n\n")]
    accumulated = accumulate(*(orjson.loads(event) for event in events if event.startswith(b"{")))
    whole = orjson.loads(load("scale_out/generate").response)

    assert {**whole, **accumulated, "usage": None, "request_id": None} == {**whole, "usage": None, "request_id": None}


def test_interleaved_choices_are_joined_by_index():
    """Ids, logprobs, sampling mask and text are concatenated per choice in the order of arrival."""
    first_entry, second_entry = {"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -2.0}
    response = accumulate(
        chunk(1, [1], logprobs={"content": [first_entry]}, sampling_mask=[[1, 5]], text="a"),
        chunk(0, [9], text="x"),
        chunk(1, [2], logprobs={"content": [second_entry]}, sampling_mask=[[]], text="b", finish_reason="stop"),
        chunk(0, [], text="y", finish_reason="length", weight_versions=[{"version": "v", "start": 0, "end": 1}]),
    )
    first, second = response["choices"]

    assert (0, [9], None, None, "xy") == tuple(
        first[key] for key in ("index", "token_ids", "logprobs", "sampling_mask", "text")
    )
    assert [{"version": "v", "start": 0, "end": 1}] == first["weight_versions"]
    assert (1, [1, 2], {"content": [first_entry, second_entry]}, [[1, 5], []], "ab") == tuple(
        second[key] for key in ("index", "token_ids", "logprobs", "sampling_mask", "text")
    )
    assert "weight_versions" not in second


def test_usage_is_read_from_a_chunk_without_choices():
    """vLLM sends it last, if requested."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1}

    assert usage == accumulate(chunk(0, [1]), {"choices": [], "usage": usage})["usage"]
    assert accumulate(chunk(0, [1]))["usage"] is None


def test_finished_choices_are_counted_once():
    """The stream's end is detected by this count."""
    accumulator = GenerateAccumulator()
    counts = []
    chunks = (chunk(0, [1]), chunk(1, [1], finish_reason="stop"), chunk(1, []), chunk(0, [], finish_reason="length"))
    for piece in chunks:
        accumulator.feed(piece)
        counts.append(accumulator.finished)

    assert [0, 1, 1, 2] == counts


@pytest.mark.parametrize(
    "malformed", [{"choices": [{"index": True}]}, {"choices": [{"token_ids": [1]}]}, {"choices": [7]}]
)
def test_a_malformed_chunk_raises(malformed):
    """The caller expects these three exceptions."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        accumulate(malformed)
