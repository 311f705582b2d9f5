"""Token ids that share their beginning."""

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
def test_it_reads_like_an_array(ids, other, cut, part):
    """In all that steps are read for."""
    plain, chained = array("i", ids), shared(ids, cut)

    assert (len(plain), list(plain), plain.tolist(), plain.tobytes()) == (
        len(chained), list(chained), chained.tolist(), chained.tobytes()
    )  # fmt: skip
    assert plain[part] == chained[part]
    assert repr(plain) == repr(chained)
    assert plain == chained == plain
    assert chained == shared(ids, 4)
    assert (ids == other) == (chained == shared(other, 8)) == (array("i", other) == chained)
    assert plain + array("i", other) == chained + array("i", other)
    assert chained == copy.deepcopy(chained) == pickle.loads(pickle.dumps(chained))
    assert [chained[at] for at in range(len(ids))] == ids


def test_it_is_no_list():
    """As an array is none."""
    assert shared([1], 4) != [1]
    with pytest.raises(TypeError):
        hash(shared([1], 4))


@pytest.mark.parametrize("tail", [b"\x01", b"\x01\x02\x03"])
def test_bytes_that_are_not_whole_ids_are_refused(tail):
    """When it is made, not when it is read."""
    with pytest.raises(ValueError, match="not a multiple of 4"):
        SharedIds(Link(None, b"\x01\x02\x03\x04"), tail)


def test_chains_share_their_memory():
    """Two prompts that begin alike have the same links."""
    stem = Link(None, array("i", range(256)).tobytes())
    one, other = (SharedIds(Link(stem, array("i", [number]).tobytes()), b"") for number in (1, 2))

    assert [1, 2] == [one[-1], other[-1]]
    assert list(one.links())[1] is list(other.links())[1] is stem
