"""Chunks of the generate endpoint folded into the response that the unstreamed call would have given."""

import orjson
import pytest
from recorded import load

from proxy.protocols.accumulators import GenerateAccumulator


def chunk(index, ids, **more):
    choice = {"index": index, "finish_reason": None, "token_ids": ids, "sampling_mask": None, "logprobs": None} | more
    return {"request_id": "g", "usage": None, "choices": [choice]}


def accumulate(*chunks):
    folding = GenerateAccumulator()
    before = orjson.dumps(chunks)
    for one in chunks:
        folding.feed(one)
    response = folding.finish()
    assert before == orjson.dumps(chunks)
    return response


def test_a_recorded_stream_gives_what_the_unstreamed_call_gave():
    """Of everything that vLLM says in both framings: its streams have no model, no time, and no usage unasked."""
    events = [event.removeprefix(b"data: ") for event in load("scale_out/generate_stream").response.split(b"\n\n")]
    folded = accumulate(*(orjson.loads(event) for event in events if event.startswith(b"{")))
    whole = orjson.loads(load("scale_out/generate").response)

    assert {**whole, **folded, "usage": None, "request_id": None} == {**whole, "usage": None, "request_id": None}


def test_choices_may_interleave():
    """Each has its own ids, logprobs, mask and text, in the order in which they came."""
    one, two = {"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -2.0}
    response = accumulate(
        chunk(1, [1], logprobs={"content": [one]}, sampling_mask=[[1, 5]], text="a"),
        chunk(0, [9], text="x"),
        chunk(1, [2], logprobs={"content": [two]}, sampling_mask=[[]], text="b", finish_reason="stop"),
        chunk(0, [], text="y", finish_reason="length", weight_versions=[{"version": "v", "start": 0, "end": 1}]),
    )
    first, second = response["choices"]

    assert (0, [9], None, None, "xy") == tuple(
        first[key] for key in ("index", "token_ids", "logprobs", "sampling_mask", "text")
    )
    assert [{"version": "v", "start": 0, "end": 1}] == first["weight_versions"]
    assert (1, [1, 2], {"content": [one, two]}, [[1, 5], []], "ab") == tuple(
        second[key] for key in ("index", "token_ids", "logprobs", "sampling_mask", "text")
    )
    assert "weight_versions" not in second


def test_usage_comes_in_a_chunk_without_choices():
    """If it was asked for, and it is the last that counts."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1}

    assert usage == accumulate(chunk(0, [1]), {"choices": [], "usage": usage})["usage"]
    assert accumulate(chunk(0, [1]))["usage"] is None


def test_finishes_are_counted_once_each():
    """What the end of the turn is, is read off this count."""
    folding = GenerateAccumulator()
    counts = []
    for one in (chunk(0, [1]), chunk(1, [1], finish_reason="stop"), chunk(1, []), chunk(0, [], finish_reason="length")):
        folding.feed(one)
        counts.append(folding.finished)

    assert [0, 1, 1, 2] == counts


@pytest.mark.parametrize("odd", [{"choices": [{"index": True}]}, {"choices": [{"token_ids": [1]}]}, {"choices": [7]}])
def test_what_is_no_chunk_is_refused(odd):
    """By an exception that the reply expects."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        accumulate(odd)
