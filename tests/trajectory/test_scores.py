"""Scores of a row: their places, and their bytes."""

from array import array
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.scores import Scores, are_logprobs, decode_scores, encode_scores

LOGPROB = st.floats(-100, 0, width=32)


@st.composite
def scored(draw):
    count, top_k = draw(st.integers(0, 8)), draw(st.integers(0, 3))
    return Scores(
        draw(st.text()),
        draw(st.none() | st.text()),
        draw(st.none() | st.text()),
        array("f", draw(st.lists(LOGPROB, min_size=count, max_size=count))),
        top_k,
        array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=count * top_k, max_size=count * top_k))),
        array("f", draw(st.lists(LOGPROB, min_size=count * top_k, max_size=count * top_k))),
    )


@given(scored())
def test_scores_are_equal_after_encoding(scores):
    """Any names, and any number of likely tokens."""
    assert scores == decode_scores(encode_scores(scores))


@given(scored(), st.binary(max_size=20), st.integers(0, 200))
def test_other_bytes_are_no_scores(scores, other, cut):
    """A value of another version is computed again."""
    encoded = encode_scores(scores)
    assert None is decode_scores(encoded.replace(b"[", b"[[],", 1))
    assert None is decode_scores(encode_scores(replace(scores, model=5)))
    assert cut >= len(encoded) or None is decode_scores(encoded[:cut])
    decode_scores(other)


@given(scored(), st.data())
def test_values_are_at_the_trained_positions(scores, data):
    """Other positions have the fill value; the likely tokens are lists of equal length."""
    mask = data.draw(st.permutations([1] * len(scores.logprobs) + [0] * data.draw(st.integers(0, 5))))
    filled = scores.filled(mask, None)

    assert [bit == 0 for bit in mask] == [value is None for value in filled]
    assert scores.logprobs.tolist() == [value for value in filled if value is not None]
    if scores.top_k:
        ids, logprobs = scores.filled_top(mask, None)
        assert scores.top_ids.tolist() == [token for entry in ids if entry is not None for token in entry]
        assert scores.top_logprobs.tolist() == [value for entry in logprobs if entry is not None for value in entry]
        assert {scores.top_k} >= {len(entry) for entry in ids if entry is not None}


def test_logprobs_are_finite_and_not_above_zero():
    """Apart from rounding; vLLM's -9999 is a probability of 0."""
    assert are_logprobs([-0.5, 0.0, 1e-7])
    for value in (float("nan"), float("-inf"), 0.1, -9999.0):
        assert not are_logprobs([-0.5, value])
