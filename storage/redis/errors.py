"""Foreign faults, named once, at the border.

Holds the translation of what redis-py, the operating system and a server's replies say into the errors of `store`.
Nothing beyond it sees a redis exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from storage.errors import StorageError, StoreUnreachable

# The first words of replies of a server that is there and cannot serve now, but may later. redis-py drops some of these
# words and keeps them in the class's name; `_word` puts them together again.
_AWAY_WORDS: Final = frozenset(
    {
        "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN", "UNBLOCKED",
    }
)  # fmt: skip
_WORDS_BY_CLASS: Final = {
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}


@contextmanager
def translated_errors(where: str, timeout_s: float) -> Iterator[None]:
    """Turn whatever goes wrong between us and the server at `where` into a `StorageError`."""
    try:
        yield
    except (AuthenticationError, NoPermissionError) as error:
        raise StorageError(f"the store at {where} does not let us in: {error}; check its user and password") from error
    except (RedisTimeoutError, TimeoutError) as error:
        raise StoreUnreachable(f"the store at {where} did not answer within {timeout_s:g} s") from error
    except (RedisConnectionError, OSError) as error:
        raise StoreUnreachable(f"the store at {where} cannot be reached: {error}") from error
    except RedisError as error:
        raise StorageError(f"what answers at {where} does not speak the Redis protocol: {error}") from error


def checked(reply: Any) -> Any:
    """The reply, unless it is the server's refusal: that is raised as a `StorageError`, in the server's words."""
    if not isinstance(reply, ResponseError):
        return reply
    word = _WORDS_BY_CLASS.get(type(reply).__name__)
    sentence = f"{word} {reply}" if word else str(reply)
    if sentence.partition(" ")[0] in _AWAY_WORDS:
        raise StoreUnreachable(f"the store cannot serve now: {sentence}") from reply
    if isinstance(reply, NoPermissionError):
        raise StorageError(f"the store's user may not do what TokenTape needs: {sentence}") from reply
    raise StorageError(f"the store refused a command: {sentence}") from reply
