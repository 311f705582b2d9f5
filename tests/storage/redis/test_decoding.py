"""Replies of the Redis protocol as the store's values."""

from storage.redis.decoding import optional_pairs, pairs, read_rollout


def test_a_flat_reply_is_read_by_pairs():
    """Name and value, one after the other."""
    assert [(b"a", b"1"), (b"b", b"2")] == list(pairs([b"a", b"1", b"b", b"2"]))


def test_a_rollout_is_read_by_what_its_fields_are_called():
    """Its own facts, fields (`f:`) and counts (`n:`)."""
    reply = [b"birth", b"x", b"created_ms", b"1", b"touched_ms", b"2", b"f:status", b"open", b"n:steps", b"3"]
    read = read_rollout("r", reply, own_incarnation="x")

    assert ("r", "x", 1, 2, True) == (read.name, read.incarnation, read.created_ms, read.touched_ms, read.created)
    assert ({"status": b"open"}, {"steps": 3}) == (read.fields, read.counts)
    assert not read_rollout("r", reply).created


def test_what_may_be_absent_is_told_from_what_is_empty():
    """As the scripts want it."""
    assert ["f:a", b"=", "f:b", ""] == [
        part or "" if part == b"" else part for part in optional_pairs({"a": b"", "b": None})
    ]
