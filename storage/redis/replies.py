"""The replies of the servers, decoded: errors become errors of the store, and flat lists the values in `storage.types`.

Code outside `storage.redis` never gets an exception of redis-py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from storage.errors import StorageError, StoreUnreachable
from storage.types import Announcement, StoredEntity

Reply: TypeAlias = Any  # bytes, int, None, a list of these, or a ResponseError

_LARGEST: Final = 2**63 - 1  # of HINCRBY
_LATEST_MS: Final = 253_402_300_799_999  # the end of the year 9999: later times are no dates
_TIME_DIGITS: Final = 15  # of the latest one
_DIGITS: Final = 18
_SHOWN: Final = 40  # bytes of a damaged value

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
_FIXES: Final = {
    "MISCONF": "make room on its disk; its log names the failure",
    "OOM": "raise maxmemory, or delete or archive rollouts",
    "READONLY": "use the address of the primary, or promote this server",
}


def translated(error: BaseException, address: str, timeout_s: float) -> StorageError:
    """Return the `StorageError` for an error of redis-py or of the connection to the server at `address`."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return StorageError(f"the store at {address} refused authentication: {error}; check username and password")
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreUnreachable(f"the store at {address} did not respond within {timeout_s:g} s", address)
    if isinstance(error, RedisConnectionError | OSError):
        return StoreUnreachable(f"the store at {address} cannot be reached: {error}", address)
    return StorageError(f"the server at {address} does not use the Redis protocol: {error}")


def checked(reply: Any) -> Any:
    """Return the reply. Raises a `StorageError` with the message of the server if it is an error reply."""
    if isinstance(reply, ResponseError):
        raise refused(reply) from reply
    return reply


def refused(reply: ResponseError) -> StorageError:
    """Return the `StorageError` for an error reply."""
    prefix = _PREFIX_BY_CLASS.get(type(reply).__name__)
    message = f"{prefix} {reply}" if prefix else str(reply)
    kind = message.partition(" ")[0]
    if kind in _RETRYABLE_PREFIXES:
        fix = f" ({_FIXES[kind]})" if kind in _FIXES else ""
        return StoreUnreachable(f"the store is not available: {message}{fix}")
    if isinstance(reply, NoPermissionError):
        return StorageError(f"the user of the store does not have a permission that TokenTape requires: {message}")
    return StorageError(f"the store returned an error: {message}")


def decode_entity(
    name: str,
    reply: Reply,
    *,
    new_incarnation: str | None = None,
    announcements: Reply = (),
    has_reservation: int | None = None,
) -> StoredEntity:
    """Decode a reply of HGETALL. The entity is `created` if its incarnation is `new_incarnation`.

    Invalid bytes are listed as damage and raise nothing: a reader of many entities needs the valid ones.
    """
    own: dict[bytes, bytes] = {}
    fields: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    damaged: list[str] = []
    for key, value in zip(reply[::2], reply[1::2], strict=True):
        kind = key[:2]
        if kind == b"f:":
            fields[key[2:].decode(errors="backslashreplace")] = value
        elif kind == b"n:":
            count = key[2:].decode(errors="backslashreplace")
            is_count = len(value) <= _DIGITS and value.isdigit()
            counts[count] = int(value) if is_count else _number(f"count {count!r}", value, damaged)
        else:
            own[key] = value
    incarnation = own.get(b"birth", b"").decode(errors="backslashreplace")
    if not incarnation:
        damaged.append("its incarnation is missing")
    created, touched = own.get(b"created_ms", b""), own.get(b"touched_ms", b"")
    are_times = len(created) < _TIME_DIGITS > len(touched) and created.isdigit() and touched.isdigit()
    return StoredEntity(
        name,
        incarnation,
        created_ms=int(created) if are_times else _number("created_ms", created, damaged, _LATEST_MS),
        touched_ms=int(touched) if are_times else _number("touched_ms", touched, damaged, _LATEST_MS),
        fields=fields,
        counts=counts,
        created=incarnation == new_incarnation,
        announcements=decode_announcements(announcements) if announcements else {},
        has_reservation=None if has_reservation is None else bool(has_reservation),
        damage="; ".join(damaged) or None,
    )


def _number(name: str, value: bytes, damaged: list[str], largest: int = _LARGEST) -> int:
    """Return a stored number; 0 for anything else, which is added to `damaged`."""
    try:
        number = int(value)
    except ValueError:
        number = -1
    if 0 <= number <= largest:
        return number
    damaged.append(f"{name} is {value[:_SHOWN]!r}")
    return 0


def readable(name: bytes) -> str:
    """Return a name as text; bytes that are no text are escaped."""
    return name.decode(errors="backslashreplace")


def decode_announcements(reply: Reply) -> dict[str, Announcement]:
    """Decode a hash of announcements, which has a value and a number (`number:NAME`) for each name.

    An announcement with an unreadable number counts as absent, so that all others apply.
    """
    values = dict(pairs(reply))
    found = {}
    for name, value in values.items():
        number = values.get(b"number:" + name, b"")
        if number.isdigit() and len(number) <= _DIGITS:
            found[readable(name)] = Announcement(value, int(number))
    return found


def pairs(reply: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Iterate over the pairs of a flat reply: name, value, name, value, …."""
    return zip(reply[::2], reply[1::2], strict=True)


def encode_optional(fields: Mapping[str, bytes | None]) -> Iterable[str | bytes]:
    """Encode fields as arguments of a script: `f:NAME`, then `=VALUE`, or an empty argument for None."""
    for name, value in fields.items():
        yield f"f:{name}"
        yield b"" if value is None else b"=" + value
