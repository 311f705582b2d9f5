"""Token ids, logprobs, masks and routed experts as arrays and bytes; and the ids of prompts that share prefixes."""

import copy
import pickle
from array import array
from base64 import b64encode
from math import inf, isfinite, isnan, nan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.trajectory.arrays import (
    Link,
    SharedIds,
    _swapped,
    are_finite,
    floats_with_gaps,
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
def test_ids_round_trip(ids):
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
def test_a_value_that_is_not_a_32_bit_integer_is_rejected(ids, sentence):
    """A boolean is not a token id."""

    with pytest.raises(ValueError, match=sentence):
        pack_ids(ids)


@given(st.lists(st.one_of(st.none(), st.floats(), st.floats(width=32))))
def test_logprobs_round_trip_bit_for_bit(logprobs):
    """None becomes NaN."""
    packed = pack_logprobs(logprobs).tolist()

    assert [repr(nan if value is None else value) for value in logprobs] == [repr(value) for value in packed]


@given(st.lists(st.one_of(st.none(), st.floats(width=32))))
def test_logprobs_that_float32_represents_take_4_bytes(logprobs):
    """NaN and infinity included."""

    assert pack_logprobs(logprobs).typecode == "f"


@pytest.mark.parametrize("logprob", [-0.1, -1e40, -1e-320])
def test_a_logprob_that_float32_would_round_makes_the_array_float64(logprob):
    assert pack_logprobs([-0.5, logprob]) == array("d", [-0.5, logprob])


@given(st.lists(INT32), st.lists(st.floats(width=32)), st.sampled_from("fd"))
def test_arrays_round_trip_through_bytes_on_machines_of_either_byte_order(ids, logprobs, code):
    ids, logprobs = array("i", ids), array(code, logprobs)
    for byteorder, written in (("little", array.tobytes), ("big", _swapped)):
        read_ids = ids_from_little_endian(written(ids), byteorder)
        read_logprobs = logprobs_from_little_endian(code, written(logprobs), byteorder)

        assert ids == read_ids
        assert logprobs.tobytes() == read_logprobs.tobytes()


def test_bytes_are_little_endian():
    swapped = array("i", [1])
    swapped.byteswap()

    assert to_little_endian(array("i", [1, -1])) == b"\1\0\0\0\xff\xff\xff\xff"
    assert to_little_endian(array("i", [1])) == _swapped(swapped)


def test_bytes_that_end_within_a_number_are_rejected():
    with pytest.raises(ValueError, match="multiple"):
        ids_from_little_endian(b"\0" * 5)
    with pytest.raises(ValueError, match="multiple"):
        logprobs_from_little_endian("d", b"\0" * 12)


def test_nan_infinity_and_negative_zero_are_preserved():
    packed = pack_logprobs([None, nan, -inf, -0.0])

    assert [isnan(value) for value in packed[:2]] == [True, True]
    assert repr(packed[2:].tolist()) == "[-inf, -0.0]"


@given(st.lists(st.lists(INT32)))
def test_sampling_masks_round_trip(positions):
    """Positions without an id included."""

    assert positions == unpack_mask(pack_mask(positions))


@pytest.mark.parametrize("mask", [[[1.0]], [[True]], [["1"]]])
def test_a_mask_with_values_that_are_no_token_ids_is_rejected(mask):
    with pytest.raises(ValueError, match="a token id must be an integer"):
        pack_mask(mask)


@given(st.binary(), st.sampled_from([b"", b"\x93NUMPY\1\0"]))
def test_routed_experts_round_trip_as_base64(raw, start):
    """Their first bytes show the form: a NumPy file or int32."""
    text = b64encode(start + raw).decode()
    packed = pack_experts(text)

    assert packed.raw == start + raw
    assert ("npy" if packed.raw.startswith(b"\x93NUMPY") else "int32") == packed.form
    assert text == unpack_experts(packed)


@given(st.text() | st.none() | st.integers(-9, 9) | st.lists(st.text(alphabet="AB=-_\n")))
@example("AAB=")  # its unused bits are lost in decoding
@example("AAA")
@example("A A A A")
@example("ä")
def test_other_values_of_routed_experts_round_trip_unchanged(given_):
    assert given_ == unpack_experts(pack_experts(given_))


def test_floats_with_gaps_are_float32_values_and_zeros():
    """Values of float64 are rounded."""
    found = floats_with_gaps(5, [(1, array("f", [-1.5, -0.5])), (4, array("d", [-0.1]))])

    assert [0, -1.5, -0.5, 0, array("f", [-0.1])[0]] == array("f", bytes(found.values)).tolist()
    assert (bytes([0, 1, 1, 0, 1]), 5) == (found.present, len(found))


@pytest.mark.parametrize("code", ["f", "d"])
@given(st.lists(st.floats(width=32) | st.sampled_from([nan, inf, -inf, -1e-45, 3e38, -3e38]), max_size=4))
def test_values_are_finite_if_their_sum_is(code, values):
    """NaN and infinity are found by one byte of each value."""
    assert isfinite(sum(values)) is are_finite(array(code, values))


def test_a_sum_that_is_too_large_is_not_finite():
    assert not are_finite(array("d", [1.7e308, 1.7e308]))
    assert are_finite(array("d", [1.7e308, -1.7e308]))


IDS = st.lists(INT32, max_size=9)


def shared(ids, cut):
    raw = array("i", ids).tobytes()
    link = None
    while len(raw) >= cut:
        link, raw = Link(link, raw[:cut]), raw[cut:]
    return SharedIds(link, raw)


@given(IDS, IDS, st.sampled_from([4, 8, 12]), st.slices(9))
def test_shared_ids_behave_like_an_array(ids, second, cut, part):
    """Length, iteration, slices, equality, concatenation, copy and pickle."""
    plain, chained = array("i", ids), shared(ids, cut)

    assert (len(plain), list(plain), plain.tolist(), plain.tobytes()) == (
        len(chained), list(chained), chained.tolist(), chained.tobytes()
    )  # fmt: skip
    assert plain[part] == chained[part]
    assert repr(plain) == repr(chained)
    assert plain == chained == plain
    assert chained == shared(ids, 4)
    assert (ids == second) == (chained == shared(second, 8)) == (array("i", second) == chained)
    assert plain + array("i", second) == chained + array("i", second)
    assert chained == copy.deepcopy(chained) == pickle.loads(pickle.dumps(chained))
    assert [chained[index] for index in range(len(ids))] == ids


@given(IDS, IDS, st.sampled_from([4, 8, 12]))
def test_the_ids_after_a_beginning_are_found_by_the_links(first, rest, cut):
    """Also if the beginning ends within a piece; not if the chains are of different readers, unless there is none."""
    raw = array("i", first + rest).tobytes()
    link, links = None, [None]
    while len(raw) >= cut:
        link, raw = Link(link, raw[:cut]), raw[cut:]
        links.append(link)
    whole = SharedIds(link, raw)
    pieces = 4 * len(first) // cut
    beginning = SharedIds(links[pieces], array("i", first).tobytes()[pieces * cut :])
    longer = SharedIds(links[pieces], beginning.tail + b"\xff" * 4 * (len(rest) + 1))

    assert array("i", rest).tobytes() == whole.after(beginning)
    assert whole.after(longer) is None
    assert pieces == 0 or shared(first + rest, cut).after(beginning) is None


def test_shared_ids_equal_no_list_and_are_not_hashable():
    """Like an array."""
    assert shared([1], 4) != [1]
    with pytest.raises(TypeError):
        hash(shared([1], 4))


@pytest.mark.parametrize("tail", [b"\x01", b"\x01\x02\x03"])
def test_bytes_that_end_within_an_id_raise_on_construction(tail):
    with pytest.raises(ValueError, match="not a multiple of 4"):
        SharedIds(Link(None, b"\x01\x02\x03\x04"), tail)


def test_equal_prefixes_share_their_links():
    stem = Link(None, array("i", range(256)).tobytes())
    first, second = (SharedIds(Link(stem, array("i", [number]).tobytes()), b"") for number in (1, 2))

    assert [first[-1], second[-1]] == [1, 2]
    assert list(first.links())[1] is list(second.links())[1] is stem
