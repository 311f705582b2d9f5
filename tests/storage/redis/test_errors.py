"""Translation of errors of redis-py, the operating system and servers."""

import pytest
import redis.exceptions as redis_py
from redis.asyncio.connection import DefaultParser

from storage.errors import StorageError, StoreUnreachable
from storage.redis.errors import checked, translate_errors

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
    """The error has the message of the server."""
    with pytest.raises(StoreUnreachable) as caught:
        checked(DefaultParser.parse_error(words))

    assert f"the store is not available: {words}" == str(caught.value)


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
    with pytest.raises(StorageError, match=words) as caught, translate_errors("here", 3):
        raise error

    assert kind is type(caught.value)
    assert error is caught.value.__cause__


def test_other_errors_are_not_translated():
    """Errors that do not come from a server are raised unchanged."""
    with pytest.raises(KeyError), translate_errors("here", 3):
        raise KeyError
