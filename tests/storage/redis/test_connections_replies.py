"""The replies of the servers: translated errors, and values of the store."""

import pytest
import redis.exceptions as redis_py
from redis.asyncio.connection import DefaultParser

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import checked, decode_entity, encode_optional, pairs, translated

RETRYABLE = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "CLUSTERDOWN Hash slot not served",
    "MASTERDOWN Link with MASTER is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Valkey is busy running a script.",
    "NOREPLICAS Not enough good replicas to write.",
)


@pytest.mark.parametrize("words", RETRYABLE)
def test_a_retryable_error_reply_is_unreachable(words):
    """The error has the message of the server, and what an operator can do."""
    with pytest.raises(StoreUnreachable) as caught:
        checked(DefaultParser.parse_error(words))

    message, _, fix = str(caught.value).partition(" (")
    assert message == f"the store is not available: {words}"
    assert bool(fix) == words.startswith(("OOM", "READONLY", "MISCONF"))


@pytest.mark.parametrize("words", ["WRONGTYPE Operation against a key", "ERR unknown command", "NOPERM no"])
def test_other_error_replies_are_storage_errors(words):
    """An error that would occur again raises `StorageError`, not `StoreUnreachable`."""
    with pytest.raises(StorageError) as caught:
        checked(DefaultParser.parse_error(words))

    assert StorageError is type(caught.value)


@pytest.mark.parametrize("reply", [None, 0, b"", [], b"OOM", [b"x", None]])
def test_other_replies_are_returned(reply):
    """A reply that is not an error is returned unchanged."""
    assert reply is checked(reply)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (redis_py.ConnectionError("refused"), StoreUnreachable, "at here cannot be reached: refused"),
        (ConnectionResetError("reset"), StoreUnreachable, "at here cannot be reached: reset"),
        (redis_py.BusyLoadingError("loading"), StoreUnreachable, "at here cannot be reached: loading"),
        (redis_py.TimeoutError("slow"), StoreUnreachable, "at here did not respond within 3 s"),
        (TimeoutError(), StoreUnreachable, "at here did not respond within 3 s"),
        (redis_py.AuthenticationError("wrong"), StorageError, "refused authentication: wrong"),
        (redis_py.NoPermissionError("no"), StorageError, "refused authentication: no"),
        (redis_py.InvalidResponse("HTTP"), StorageError, "does not use the Redis protocol: HTTP"),
    ],
)
def test_errors_of_redis_py_are_translated(error, kind, words):
    """Errors of redis-py and the operating system become a `StorageError` with the address."""
    found = translated(error, "here", 3)

    assert kind is type(found)
    assert words in str(found)


def test_pairs_of_a_flat_reply():
    """Names and values alternate."""
    assert list(pairs([b"a", b"1", b"b", b"2"])) == [(b"a", b"1"), (b"b", b"2")]


def test_an_entity_is_decoded_by_the_prefixes_of_its_fields():
    """Fields have the prefix `f:`, counts `n:`."""
    reply = [b"birth", b"x", b"created_ms", b"1", b"touched_ms", b"2", b"f:status", b"open", b"n:steps", b"3"]
    entity = decode_entity("r", reply, new_incarnation="x")

    assert (
        entity.name,
        entity.incarnation,
        entity.created_ms,
        entity.touched_ms,
        entity.created,
    ) == ("r", "x", 1, 2, True)
    assert (entity.fields, entity.counts) == ({"status": b"open"}, {"steps": 3})
    assert not decode_entity("r", reply).created


def test_absent_and_empty_values_are_encoded_differently():
    """As the scripts require."""
    assert [part or "" if part == b"" else part for part in encode_optional({"a": b"", "b": None})] == [
        "f:a",
        b"=",
        "f:b",
        "",
    ]
