"""Conversion between the flat lists of the Redis protocol and the values in `storage.types`."""

from collections.abc import Iterable, Mapping, Sequence

from storage.redis.multiplexed import Reply
from storage.types import Announcement, StoredEntity


def decode_entity(
    name: str,
    reply: Reply,
    *,
    new_incarnation: str | None = None,
    announcements: Reply = (),
    has_reservation: int | None = None,
) -> StoredEntity:
    """Decode a reply of HGETALL. The entity is `created` if its incarnation is `new_incarnation`."""
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
    return StoredEntity(
        name,
        incarnation,
        created_ms=int(own[b"created_ms"]),
        touched_ms=int(own[b"touched_ms"]),
        fields=fields,
        counts=counts,
        created=incarnation == new_incarnation,
        announcements=decode_announcements(announcements),
        has_reservation=None if has_reservation is None else bool(has_reservation),
    )


def decode_announcements(reply: Reply) -> dict[str, Announcement]:
    """Decode a hash of announcements, which has a value and a number (`number:NAME`) for each name."""
    values = dict(pairs(reply))
    names = [name for name in values if not name.startswith(b"number:")]
    return {name.decode(): Announcement(values[name], int(values[b"number:" + name])) for name in names}


def pairs(reply: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Iterate over the pairs of a flat reply: name, value, name, value, …."""
    return zip(reply[::2], reply[1::2], strict=True)


def encode_optional(fields: Mapping[str, bytes | None]) -> Iterable[str | bytes]:
    """Encode fields as arguments of a script: `f:NAME`, then `=VALUE`, or an empty argument for None."""
    for name, value in fields.items():
        yield f"f:{name}"
        yield b"" if value is None else b"=" + value
