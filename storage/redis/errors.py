"""Translation of the errors of redis-py, the operating system and the servers into the errors of the store.

Code outside `storage.redis` never gets an exception of redis-py.
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

# Prefixes of error replies after which a retry can succeed. redis-py removes some prefixes and uses an exception class instead.
_RETRYABLE_PREFIXES: Final = frozenset(
    {
        "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN", "UNBLOCKED",
    }
)  # fmt: skip
_PREFIX_BY_CLASS: Final = {
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}


@contextmanager
def translate_errors(address: str, timeout_s: float) -> Iterator[None]:
    """Raise a `StorageError` for every error in the communication with the server at `address`."""
    try:
        yield
    except (AuthenticationError, NoPermissionError) as error:
        raise StorageError(
            f"the store at {address} refused authentication: {error}; check username and password"
        ) from error
    except (RedisTimeoutError, TimeoutError) as error:
        raise StoreUnreachable(f"the store at {address} did not respond within {timeout_s:g} s") from error
    except (RedisConnectionError, OSError) as error:
        raise StoreUnreachable(f"the store at {address} cannot be reached: {error}") from error
    except RedisError as error:
        raise StorageError(f"the server at {address} does not use the Redis protocol: {error}") from error


def checked(reply: Any) -> Any:
    """Return the reply. Raises a `StorageError` with the message of the server if it is an error reply."""
    if not isinstance(reply, ResponseError):
        return reply
    prefix = _PREFIX_BY_CLASS.get(type(reply).__name__)
    message = f"{prefix} {reply}" if prefix else str(reply)
    if message.partition(" ")[0] in _RETRYABLE_PREFIXES:
        raise StoreUnreachable(f"the store is not available: {message}") from reply
    if isinstance(reply, NoPermissionError):
        raise StorageError(
            f"the user of the store does not have a permission that TokenTape requires: {message}"
        ) from reply
    raise StorageError(f"the store returned an error: {message}") from reply
