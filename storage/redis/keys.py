"""All keys of the store, with their types and lifetimes. No other module contains a key name.

ID is the percent-encoded name of a rollout; B is one of the sixteen `BUCKETS`, chosen by a hash of ID. Keys of a rollout:

    {prefix}:{B}:rollout:ID     hash   birth, created_ms, touched_ms, held, f:FIELD -> bytes, n:COUNT -> integer
    {prefix}:{B}:records:ID     list   the records, in the order in which they were appended
    {prefix}:{B}:positions:ID   hash   record name -> position in the list
    {prefix}:{B}:blocks:ID      hash   block name -> bytes
    {prefix}:{B}:marks:ID       hash   mark name -> bytes
Keys of a bucket:
    {prefix}:{B}:listing        zset   created_ms (15 digits) + ID, all with score 0: sorted by age as text
    {prefix}:{B}:expiry         zset   the same members -> Unix ms at which the rollout expires; only with a TTL
    {prefix}:{B}:queue          stream only for groups: the queue `default`, with a note in each entry
    {prefix}:{B}:queue:NAME     stream only for groups: any other queue
    {prefix}:{B}:notices        hash   announcements: NAME -> bytes, number:NAME -> integer; the same in each bucket
    {prefix}:{B}:beats          hash   heartbeats: NAME -> Unix ms at which it expires (15 digits) + bytes; first bucket only
    {prefix}:{B}:timers         zset   ID, space, incarnation -> Unix ms at which a process looks at the rollout
    {prefix}:{B}:deleted        zset   incarnation of a deleted rollout -> Unix ms at which it is removed; only with a TTL
    {prefix}:{B}:cache          hash   name -> Unix ms at which the value expires (15 digits) + bytes
    {prefix}:{B}:cache-expiry   zset   the same names -> Unix ms; {prefix}:{B}:cache-bytes has the size of all values
Keys of the store:
    {prefix}:constants          hash   name -> bytes
`birth` is the incarnation; `held` has the reservations.

Groups are stored like rollouts without records, under the prefix `{prefix}.groups`. A group and rollouts with names in the
same bucket are in one slot, so that one script can create them. Batches are stored the same way, under `{prefix}.batches`.

Lifetimes: without a TTL, all keys exist until they are deleted; Redis removes a sorted set with its last member. With a TTL,
each write to a rollout sets the expiry of its seven keys again. So the sets of a bucket expire with the newest of its rollouts,
and later writes remove the members of rollouts that expired before. Constants, announcements and timers do not expire: who
looks at a rollout that is gone removes its timer. Heartbeats expire when none is sent within their lifetime, and the keys of
the cache with the newest value. With a TTL, the incarnation of a deleted rollout is kept for one day or for the TTL, whichever
is longer, so that a late append can distinguish deleted from expired rollouts. A later deletion in the same bucket removes it.

Percent-encoded names have only letters, digits and `_.-~%`, so no name can produce the key of another. The braces are hash
tags: Redis Cluster stores a bucket in one slot, so that one script can open, list and delete a rollout. The slots of the
sixteen tags are distributed evenly, one in each sixteenth of the slots.
"""

from binascii import crc32
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from storage.types import DEFAULT_QUEUE

BUCKETS: Final = (
    "18", "5x", "dj", "3r", "d2", "pv", "uh", "iy", "ly", "h9", "uv", "q6", "9s", "5f", "dt", "ha",
)  # fmt: skip
AGE_DIGITS: Final = 15  # Unix ms until the year 33658; the scripts contain the same number


@dataclass(frozen=True, slots=True)
class RolloutKeys:
    """The keys of a rollout and of its bucket. `all`: the seven keys of the rollout in the order in which scripts get them."""

    encoded: bytes
    rollout: bytes
    records: bytes
    positions: bytes
    blocks: bytes
    marks: bytes
    listing: bytes
    expiry: bytes
    announcements: bytes
    deleted: bytes
    timers: bytes
    all: tuple[bytes, ...]


GROUPS: Final = ".groups"  # appended to the prefix
BATCHES: Final = ".batches"


def bucket_for(name: str) -> str:
    """Return the bucket of a name."""
    return BUCKETS[crc32(_encoded(name).encode()) % len(BUCKETS)]


def _encoded(name: str) -> str:
    # surrogatepass: a name with a lone surrogate is not valid UTF-8, but it must be usable and distinct.
    return quote(name, safe="", errors="surrogatepass")


@lru_cache(maxsize=4096)
def rollout_keys(prefix: str, rollout: str) -> RolloutKeys:
    """Return the keys of the rollout with this name."""
    encoded, bucket = _encoded(rollout), bucket_for(rollout)
    listing, expiry = bucket_keys(prefix, bucket)
    parts = ("rollout", "records", "positions", "blocks", "marks")
    own = {part: f"{prefix}:{{{bucket}}}:{part}:{encoded}".encode() for part in parts}
    return RolloutKeys(
        encoded=encoded.encode(),
        listing=listing,
        expiry=expiry,
        announcements=announcements_key(prefix, bucket),
        deleted=deleted_key(prefix, bucket),
        timers=timers_key(prefix, bucket),
        all=(*own.values(), listing, expiry),
        **own,
    )


def bucket_keys(prefix: str, bucket: str) -> tuple[bytes, bytes]:
    """Return the keys of the listing of a bucket and of the expiry of its members."""
    return f"{prefix}:{{{bucket}}}:listing".encode(), f"{prefix}:{{{bucket}}}:expiry".encode()


def queue_key(prefix: str, bucket: str, queue: str = DEFAULT_QUEUE) -> bytes:
    """Return the key of a queue of the groups of a bucket."""
    suffix = "" if queue == DEFAULT_QUEUE else f":{_encoded(queue)}"
    return f"{prefix}{GROUPS}:{{{bucket}}}:queue{suffix}".encode()


def announcements_key(prefix: str, bucket: str) -> bytes:
    """Return the key of the announcements of a bucket."""
    return f"{prefix}:{{{bucket}}}:notices".encode()


def deleted_key(prefix: str, bucket: str) -> bytes:
    """Return the key of the deleted incarnations of a bucket."""
    return f"{prefix}:{{{bucket}}}:deleted".encode()


def timers_key(prefix: str, bucket: str) -> bytes:
    """Return the key of the timers of a bucket."""
    return f"{prefix}:{{{bucket}}}:timers".encode()


def heartbeats_key(prefix: str, bucket: str) -> bytes:
    """Return the key of the heartbeats of a bucket."""
    return f"{prefix}:{{{bucket}}}:beats".encode()


def cache_keys(prefix: str, bucket: str) -> tuple[bytes, bytes, bytes]:
    """Return the keys of the cached values of a bucket, of their expiry times and of their size."""
    values = f"{prefix}:{{{bucket}}}:cache".encode()
    return values, values + b"-expiry", values + b"-bytes"


def constants_key(prefix: str) -> bytes:
    """Return the key of the constants of the store."""
    return f"{prefix}:constants".encode()


def decoded_name(encoded: bytes) -> str | None:
    """Return the name that is encoded in a key, a member of a set or an entry; None if it is none."""
    try:
        return unquote(encoded.decode("ascii"), errors="surrogatepass") or None
    except UnicodeError:
        return None
