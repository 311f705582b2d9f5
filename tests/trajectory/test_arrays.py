"""Numbers as arrays and as bytes: nothing is lost, nothing is taken for what it is not."""

from array import array
from base64 import b64encode
from math import inf, isnan, nan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.trajectory.arrays import (
    ids_from_little_endian,
    logprobs_from_little_endian,
    pack_experts,
    pack_ids,
    pack_logprobs,
    pack_mask,
    to_little_endian,
    unpack_experts,
    unpack_mask,
)

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_ids(ids):
    """Ids come back from their array as they were."""

    assert ids == pack_ids(ids).tolist()


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([1, 2**31], "token id 2147483648 does not fit into 32 bits"),
        ([-(2**31) - 1], "token id -2147483649 does not fit into 32 bits"),
        ([1, True], "a token id must be an integer, not True"),
        ([1, 2.0], r"a token id must be an integer, not 2\.0"),
        (["1"], "a token id must be an integer, not '1'"),
        ([None], "a token id must be an integer, not None"),
    ],
)
def test_what_is_no_id(ids, sentence):
    """What is not an integer of 32 bits is refused, and a truth value is not an id."""

    with pytest.raises(ValueError, match=sentence):
        pack_ids(ids)


@given(st.lists(st.one_of(st.none(), st.floats(), st.floats(width=32))))
def test_logprobs(logprobs):
    """Logprobs come back from their array as they were, to the last bit, with NaN for a missing one."""
    packed = pack_logprobs(logprobs).tolist()

    assert [repr(nan if value is None else value) for value in logprobs] == [repr(value) for value in packed]


@given(st.lists(st.one_of(st.none(), st.floats(width=32))))
def test_logprobs_of_float32(logprobs):
    """Logprobs that float32 carries, NaN and infinity included, take 4 bytes each."""

    assert "f" == pack_logprobs(logprobs).typecode


@pytest.mark.parametrize("logprob", [-0.1, -1e40, -1e-320])
def test_logprobs_of_float64(logprob):
    """One logprob that float32 would change makes all of them float64."""

    assert array("d", [-0.5, logprob]) == pack_logprobs([-0.5, logprob])


@given(st.lists(INT32), st.lists(st.floats(width=32)), st.sampled_from("fd"))
def test_bytes(ids, logprobs, code):
    """Arrays come back from their bytes, whatever the byte order of the machine that wrote them."""
    ids, logprobs = array("i", ids), array(code, logprobs)
    for byteorder in ("little", "big"):
        read_ids = ids_from_little_endian(to_little_endian(ids, byteorder), byteorder)
        read_logprobs = logprobs_from_little_endian(code, to_little_endian(logprobs, byteorder), byteorder)

        assert ids == read_ids
        assert logprobs.tobytes() == read_logprobs.tobytes()


def test_bytes_are_little_endian():
    """The bytes are the same on every machine: the least of a number comes first."""
    turned = array("i", [1])
    turned.byteswap()

    assert b"\1\0\0\0\xff\xff\xff\xff" == to_little_endian(array("i", [1, -1]), "little")
    assert b"\1\0\0\0" == to_little_endian(turned, "big")


def test_cut_bytes():
    """Bytes that end within a number are refused."""

    with pytest.raises(ValueError, match="multiple"):
        ids_from_little_endian(b"\0" * 5)
    with pytest.raises(ValueError, match="multiple"):
        logprobs_from_little_endian("d", b"\0" * 12)


def test_special_values_keep_their_kind():
    """NaN stays NaN, infinity stays infinite and the sign of zero is kept."""
    packed = pack_logprobs([None, nan, -inf, -0.0])

    assert [True, True] == [isnan(value) for value in packed[:2]]
    assert "[-inf, -0.0]" == repr(packed[2:].tolist())


@given(st.lists(st.lists(INT32)))
def test_masks(positions):
    """A mask comes back from its arrays as it was, positions without an id included."""

    assert positions == unpack_mask(pack_mask(positions))


@pytest.mark.parametrize("odd", [[[1.0]], [[True]], [["1"]]])
def test_what_is_no_mask(odd):
    """A mask holds ids and nothing else."""

    with pytest.raises(ValueError, match="a token id must be an integer"):
        pack_mask(odd)


@given(st.binary(), st.sampled_from([b"", b"\x93NUMPY\1\0"]))
def test_experts(raw, start):
    """A base64 text comes back to the last character, and what it holds is told by its first bytes."""
    text = b64encode(start + raw).decode()
    packed = pack_experts(text)

    assert start + raw == packed.raw
    assert ("npy" if packed.raw.startswith(b"\x93NUMPY") else "int32") == packed.form
    assert text == unpack_experts(packed)


@given(st.text() | st.none() | st.integers(-9, 9) | st.lists(st.text(alphabet="AB=-_\n")))
@example("AAB=")  # bits are left over, which the bytes do not carry
@example("AAA")
@example("A A A A")
@example("ä")
def test_odd_experts(given_):
    """Whatever else an engine may give comes back as it was."""

    assert given_ == unpack_experts(pack_experts(given_))
