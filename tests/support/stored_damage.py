"""Damage of a store: one value of one key is replaced by other bytes."""

from random import Random
from typing import Any
from urllib.parse import unquote

import orjson
import redis
import zstandard
from tests.support.odd_values import nested, odd_text

from proxy.trajectory.codec import frame, open_frame

# Kinds of keys with values of one entity.
OF_ENTITIES = ("rollout", "records", "positions", "blocks", "marks")


def damage(client: redis.Redis, prefix: str, random: Random) -> tuple[bytes, str | None, bytes, bytes]:
    """Replace or add one value; return the key, the rollout or group that it belongs to, the field and the new bytes."""
    keys = sorted(key for key in client.scan_iter(match=f"{prefix}*", count=1000) if not key.endswith(b"expiry"))
    kinds = sorted({_kind(key) for key in keys})
    kind = random.choice(kinds)
    key = random.choice([key for key in keys if _kind(key) == kind])
    entity = unquote(key.decode().split(":", 3)[3]) if kind[1] in OF_ENTITIES else None
    match client.type(key).decode():
        case "hash":
            field = random.choice(sorted(client.hkeys(key)))
            if random.random() < 0.15:
                field = random.choice(
                    (b"f:\xff", b"n:\xff", b"\xff", b"f:", b"member:\xff", b"replaced:x", b"late:\xff")
                )
            new = value(random, client.hget(key, field) or b"")
            client.hset(key, field, new)
        case "list":
            at = random.randrange(client.llen(key))
            field = b"%d" % at
            new = value(random, client.lindex(key, at))
            client.lset(key, at, new)
        case "zset":
            field, new = b"", value(random, random.choice(client.zrange(key, 0, -1)))
            client.zadd(key, {new: 0})
        case _:
            field, new = b"note", value(random, b'{"oldest":"1"}')
            group = random.choice((b"g%ff", b"\xff", b"gone"))
            entry = client.xadd(key, random.choice(({"group": group, "note": new}, {"group": group}, {b"\xff": new})))
            client.xreadgroup("holders", "-", {key: ">"})
            client.xclaim(key, "holders", "-", 0, [entry], idle=7 * 86_400_000, justid=True)
    return key, entity, field, new


def value(random: Random, before: bytes) -> bytes:
    """Return other bytes for a value."""
    match random.randrange(9):
        case 0:
            return random.randbytes(random.choice((0, 1, 8, 40)))
        case 1:
            return before[: random.randrange(len(before) + 1)]
        case 2:
            at = random.randrange(len(before) + 1)
            return before[:at] + random.randbytes(1) + before[at + 1 :]
        case 3:
            return nested(random)
        case 4:
            return odd_record(random, before)
        case 5:
            return random.choice((b"NaN", b'"zzz"', b"{{{", b"9" * 30, b"-1", b"1e300", b"-1e308", b"null", b'"\xff"'))
        case 6:
            return odd_inside(random, before)
        case _:
            return odd_text(random)


def odd_inside(random: Random, before: bytes) -> bytes:
    """Return JSON with an odd value at one place within it."""
    try:
        found: Any = orjson.loads(before)
    except orjson.JSONDecodeError:
        return odd_text(random)
    if isinstance(found, dict) and found:
        found[random.choice(sorted(found))] = orjson.Fragment(odd_text(random))
    elif isinstance(found, list) and found:
        found[random.randrange(len(found))] = orjson.Fragment(odd_text(random))
    else:
        return odd_text(random)
    return orjson.dumps(found)


def odd_record(random: Random, before: bytes) -> bytes:
    """Return a record with a valid checksum and an odd value in its head, or with other bytes."""
    try:
        schema, packed = open_frame(before)
        raw = zstandard.ZstdDecompressor().decompress(packed)
    except (ValueError, zstandard.ZstdError):
        return random.randbytes(30)
    lengths = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, 16, 4)]
    head = odd_inside(random, raw[16 : 16 + lengths[0]])
    rest = raw[16 + lengths[0] :]
    if random.random() < 0.3:
        at = random.randrange(len(rest) + 1)
        rest = rest[:at] + random.randbytes(4) + rest[at + 4 :]
    sizes = b"".join(length.to_bytes(4, "little") for length in (len(head), *lengths[1:]))
    return frame(schema, zstandard.compress(sizes + head + rest))


def _kind(key: bytes) -> tuple[str, str]:
    """Return the namespace of a key and its kind."""
    name, _, rest = key.decode().partition(":")
    return name, rest.split(":")[1] if ":" in rest else rest
