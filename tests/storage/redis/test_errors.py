"""Foreign faults: each has one name of ours."""

import pytest
import redis.exceptions as theirs
from redis.asyncio.connection import DefaultParser

from storage.errors import StorageError, StoreUnreachable
from storage.redis.errors import checked, translated_errors

AWAY = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "CLUSTERDOWN Hash slot not served",
    "MASTERDOWN Link with MASTER is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Valkey is busy running a script.",
    "NOREPLICAS Not enough good replicas to write.",
)


@pytest.mark.parametrize("words", AWAY)
def test_a_server_that_cannot_serve_now_is_away(words):
    """A refusal that may pass raises `StoreUnreachable` with the server's own words."""
    with pytest.raises(StoreUnreachable) as caught:
        checked(DefaultParser.parse_error(words))

    assert f"the store cannot serve now: {words}" == str(caught.value)


@pytest.mark.parametrize("words", ["WRONGTYPE Operation against a key", "ERR unknown command", "NOPERM no"])
def test_a_refusal_that_stays_is_an_error_but_not_away(words):
    """A refusal that would come again raises `StorageError`, and not `StoreUnreachable`."""
    with pytest.raises(StorageError) as caught:
        checked(DefaultParser.parse_error(words))

    assert StorageError is type(caught.value)


@pytest.mark.parametrize("reply", [None, 0, b"", [], b"OOM", [b"x", None]])
def test_other_replies_pass(reply):
    """What is no refusal is given back as it is."""
    assert reply is checked(reply)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (theirs.ConnectionError("refused"), StoreUnreachable, "at here cannot be reached: refused"),
        (ConnectionResetError("reset"), StoreUnreachable, "at here cannot be reached: reset"),
        (theirs.BusyLoadingError("loading"), StoreUnreachable, "at here cannot be reached: loading"),
        (theirs.TimeoutError("slow"), StoreUnreachable, "at here did not answer within 3 s"),
        (TimeoutError(), StoreUnreachable, "at here did not answer within 3 s"),
        (theirs.AuthenticationError("wrong"), StorageError, "does not let us in: wrong"),
        (theirs.NoPermissionError("no"), StorageError, "does not let us in: no"),
        (theirs.InvalidResponse("HTTP"), StorageError, "does not speak the Redis protocol: HTTP"),
    ],
)
def test_faults_are_named(fault, kind, words):
    """Whatever redis-py or the operating system raises becomes a `StorageError` that says where."""
    with pytest.raises(StorageError, match=words) as caught, translated_errors("here", 3):
        raise fault

    assert kind is type(caught.value)
    assert fault is caught.value.__cause__


def test_our_own_faults_pass():
    """What is no fault of a server is not renamed."""
    with pytest.raises(KeyError), translated_errors("here", 3):
        raise KeyError
