"""Token ids of prompts that share prefixes."""

import copy
import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.shared_ids import Link, SharedIds

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


def shared(ids, cut):
    raw = array("i", ids).tobytes()
    link = None
    while len(raw) >= cut:
        link, raw = Link(link, raw[:cut]), raw[cut:]
    return SharedIds(link, raw)


@given(IDS, IDS, st.sampled_from([4, 8, 12]), st.slices(9))
def test_it_behaves_like_an_array(ids, second, cut, part):
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


def test_it_equals_no_list_and_is_not_hashable():
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
