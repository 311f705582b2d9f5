"""Chat bodies and responses as the translated dialects use them; what follows a tool call in a stream is held until the end."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.dialects.chat_format import TEXT, HeldPieces, Usage, event, read_usage, reasoning_of

PIECES = st.lists(st.tuples(st.integers(TEXT, 3), st.binary(min_size=1, max_size=2)), max_size=12)


@given(PIECES)
def test_all_that_is_not_of_the_first_call_is_written_at_the_end_call_by_call(pieces):
    """Each piece is written once. The pieces of a call, and of the text, keep the order in which they arrived."""
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
    assert held.release() == b""


def test_an_event_has_its_type_in_the_event_line_and_in_its_data():
    assert event("message_stop") == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert event("x", index=1) == b'event: x\ndata: {"type":"x","index":1}\n\n'


def test_token_counts_of_engines_are_read():
    """vLLM and llama.cpp return reasoning tokens in details, SGLang on the top level; invalid counts are 0."""
    counts = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}

    assert Usage(5, 7, 3, None) == read_usage(counts)
    assert Usage(5, 7, 3, 2) == read_usage(counts | {"reasoning_tokens": 2, "completion_tokens_details": None})
    assert Usage(5, 7, 3, 0) == read_usage(counts | {"completion_tokens_details": {"reasoning_tokens": 0}})
    assert Usage(0, 0, 0, None) == read_usage({"prompt_tokens": True, "prompt_tokens_details": 7}) == read_usage(None)


def test_reasoning_has_the_field_of_the_engine():
    assert [
        reasoning_of(message)
        for message in ({"reasoning": "a", "reasoning_content": "a"}, {"reasoning_content": "b"}, {"reasoning": ""})
    ] == ["a", "b", None]
