"""What follows a tool call in a stream is held until the end."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.dialects.held_pieces import TEXT, HeldPieces

PIECES = st.lists(st.tuples(st.integers(TEXT, 3), st.binary(min_size=1, max_size=2)), max_size=12)


@given(PIECES)
def test_all_that_is_not_of_the_first_call_is_written_at_the_end_call_by_call(pieces):
    """Each piece is written once, in the order in which those of its call, or of the text, arrived."""
    held = HeldPieces()
    written = []

    def write(index, data):
        written.append((index, data))
        if held.open_call is None and index != TEXT:
            held.open_call = index
        return data

    before = b"".join([held.take([(index, partial(write, index, data))]) for index, data in pieces])
    shown = len(written)
    calls = held.calls
    after = held.release()

    first = next((index for index, _ in pieces if index != TEXT), TEXT)
    begun = next((place for place, (index, _) in enumerate(pieces) if index != TEXT), len(pieces))
    assert [*pieces[:begun], *(piece for piece in pieces[begun:] if piece[0] == first)] == written[:shown]
    assert sorted(pieces) == sorted(written)
    for index in range(TEXT, 4):
        assert [piece for piece in pieces if piece[0] == index] == [piece for piece in written if piece[0] == index]
    groups = [index for index, _ in written[shown:]]
    assert sorted(groups, key=groups.index) == groups
    assert list(dict.fromkeys(index for index, _ in pieces[begun:] if index not in {TEXT, first})) == calls
    assert b"".join(data for _, data in written) == before + after
    assert b"" == held.release()
