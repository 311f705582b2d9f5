"""Conversion between replies of Redis and the values of the store."""

from storage.redis.decoding import decode_entity, encode_optional, pairs


def test_pairs_of_a_flat_reply():
    """Names and values alternate."""
    assert [(b"a", b"1"), (b"b", b"2")] == list(pairs([b"a", b"1", b"b", b"2"]))


def test_an_entity_is_decoded_by_the_prefixes_of_its_fields():
    """Fields have the prefix `f:`, counts `n:`."""
    reply = [b"birth", b"x", b"created_ms", b"1", b"touched_ms", b"2", b"f:status", b"open", b"n:steps", b"3"]
    entity = decode_entity("r", reply, new_incarnation="x")

    assert ("r", "x", 1, 2, True) == (
        entity.name,
        entity.incarnation,
        entity.created_ms,
        entity.touched_ms,
        entity.created,
    )
    assert ({"status": b"open"}, {"steps": 3}) == (entity.fields, entity.counts)
    assert not decode_entity("r", reply).created


def test_absent_and_empty_values_are_encoded_differently():
    """As the scripts require."""
    assert ["f:a", b"=", "f:b", ""] == [
        part or "" if part == b"" else part for part in encode_optional({"a": b"", "b": None})
    ]
