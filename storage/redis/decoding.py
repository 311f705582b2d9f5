"""Replies of the Redis protocol as the store's values.

Holds the reading of flat replies, and nothing that asks for them.
"""

from collections.abc import Iterable, Mapping, Sequence

from storage.redis.multiplexed import Reply
from storage.types import Announcement, StoredEntity


def read_rollout(
    name: str,
    reply: Reply,
    *,
    own_incarnation: str | None = None,
    announcements: Reply = (),
    has_reservation: int | None = None,
) -> StoredEntity:
    """The rollout that a reply of HGETALL tells of; `own_incarnation` is the one that the caller would have given it."""
    own: dict[bytes, bytes] = {}
    fields: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    for key, value in pairs(reply):
        if key.startswith(b"f:"):
            fields[key[2:].decode()] = value
        elif key.startswith(b"n:"):
            counts[key[2:].decode()] = int(value)
        else:
            own[key] = value
    incarnation = own[b"birth"].decode()
    created_ms, touched_ms = int(own[b"created_ms"]), int(own[b"touched_ms"])
    created = incarnation == own_incarnation
    given = None if has_reservation is None else bool(has_reservation)
    return StoredEntity(
        name, incarnation, created_ms, touched_ms, fields, counts, created, read_announcements(announcements), given
    )


def read_announcements(reply: Reply) -> dict[str, Announcement]:
    """What is announced."""
    said = dict(pairs(reply))
    names = [name for name in said if not name.startswith(b"number:")]
    return {name.decode(): Announcement(said[name], int(said[b"number:" + name])) for name in names}


def pairs(reply: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """The pairs of a flat reply."""
    return zip(reply[::2], reply[1::2], strict=True)


def optional_pairs(fields: Mapping[str, bytes | None]) -> Iterable[str | bytes]:
    """Names and values as the scripts take them where a value may be none."""
    for name, value in fields.items():
        yield f"f:{name}"
        yield b"" if value is None else b"=" + value
