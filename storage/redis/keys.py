"""Every key that is ever written, with its type and its lifetime. Nothing else in the project may spell one.

Per rollout, where ID is its percent-encoded name and B one of the sixteen `BUCKETS`, chosen by a hash of ID:

    {prefix}:{B}:rollout:ID     hash   birth, created_ms, touched_ms, held, f:<field> -> bytes, n:<count> -> integer
    {prefix}:{B}:records:ID     list   the records, in the order they were appended
    {prefix}:{B}:positions:ID   hash   name of a record -> its position in the list
    {prefix}:{B}:blocks:ID      hash   name of a block -> bytes
    {prefix}:{B}:marks:ID       hash   name of a mark -> bytes
Per bucket:
    {prefix}:{B}:listing        zset   created_ms (15 digits) + ID, all of score 0: in order of age as text
    {prefix}:{B}:expiry         zset   the same members -> unix ms at which the rollout is gone; with a ttl only
    {prefix}:{B}:queue          stream of groups only: those offered to holders, with a note each
    {prefix}:{B}:notices        hash   name -> bytes, the same in each bucket
    {prefix}:{B}:beats          hash   name -> when it is dead (unix ms, 15 digits) + bytes; of the first bucket only
    {prefix}:{B}:deleted        zset   birth of a deleted rollout -> unix ms at which it is forgotten; with a ttl only
Per store:
    {prefix}:constants          hash   name -> bytes
Groups are kept like rollouts without records, under the prefix `{prefix}.groups`: a group and rollouts whose names fall into
its bucket lie in one slot, and are made in one atomic script. So are batches, under `{prefix}.batches`.

Lifetimes: without a ttl all of these live until they are deleted, and a sorted set without members is gone by itself.
With one, every write to a rollout sets the expiry of all seven keys anew; so the sets of a bucket live as long as the
youngest of its rollouts, and members that died earlier are taken out by later writes. Constants live for ever; beats
are gone when nobody has beaten for their life. With a ttl, a birth is kept as deleted for a day, or for the ttl where that is
longer: so a late append can tell a rollout that was deleted from one that expired. Later deletions in its bucket remove it.

Percent-encoding leaves of a name only letters, digits and `_.-~%`: so no name can touch another's key. The braces make
a Redis cluster keep a bucket in one slot, so that a rollout is opened, listed and deleted in one atomic script there
too. The sixteen tags are such that their slots lie evenly over a cluster: one in each sixteenth.
"""

from binascii import crc32
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

BUCKETS: Final = (
    "18", "5x", "dj", "3r", "d2", "pv", "uh", "iy", "ly", "h9", "uv", "q6", "9s", "5f", "dt", "ha",
)  # fmt: skip
AGE_DIGITS: Final = 15  # unix ms until the year 33658; the scripts spell the same number


@dataclass(frozen=True, slots=True)
class RolloutKeys:
    """The keys of one rollout and of its bucket."""

    encoded: bytes
    rollout: bytes
    records: bytes
    positions: bytes
    blocks: bytes
    marks: bytes
    listing: bytes
    expiry: bytes

    def all(self) -> tuple[bytes, ...]:
        """The keys in the order that the scripts know."""
        return (
            self.rollout, self.records, self.positions, self.blocks, self.marks, self.listing, self.expiry,
        )  # fmt: skip


GROUPS: Final = ".groups"  # behind the prefix
BATCHES: Final = ".batches"


def bucket_for(name: str) -> str:
    """The bucket that a name falls into."""
    return BUCKETS[crc32(_encoded(name).encode()) % len(BUCKETS)]


def _encoded(name: str) -> str:
    # surrogatepass: a lone surrogate is no valid UTF-8, but must not make a name unusable or equal to another.
    return quote(name, safe="", errors="surrogatepass")


@lru_cache(maxsize=4096)
def rollout_keys(prefix: str, rollout: str) -> RolloutKeys:
    """The keys of a rollout of any name."""
    encoded, bucket = _encoded(rollout), bucket_for(rollout)
    listing, expiry = bucket_keys(prefix, bucket)
    parts = ("rollout", "records", "positions", "blocks", "marks")
    own = {part: f"{prefix}:{{{bucket}}}:{part}:{encoded}".encode() for part in parts}
    return RolloutKeys(encoded=encoded.encode(), listing=listing, expiry=expiry, **own)


def bucket_keys(prefix: str, bucket: str) -> tuple[bytes, bytes]:
    """The listing of a bucket, and the expiry of its members."""
    return f"{prefix}:{{{bucket}}}:listing".encode(), f"{prefix}:{{{bucket}}}:expiry".encode()


def queue_key(prefix: str, bucket: str) -> bytes:
    """The queue of a bucket's groups."""
    return f"{prefix}{GROUPS}:{{{bucket}}}:queue".encode()


def announcements_key(prefix: str, bucket: str) -> bytes:
    """What is announced to a bucket."""
    return f"{prefix}:{{{bucket}}}:notices".encode()


def deleted_key(prefix: str, bucket: str) -> bytes:
    """The births of a bucket's deleted rollouts."""
    return f"{prefix}:{{{bucket}}}:deleted".encode()


def heartbeats_key(prefix: str, bucket: str) -> bytes:
    """Who is alive, of a store's processes."""
    return f"{prefix}:{{{bucket}}}:beats".encode()


def constants_key(prefix: str) -> bytes:
    """Where the constants of the whole store are."""
    return f"{prefix}:constants".encode()


def name_from_member(member: str) -> str:
    """The rollout that a member of a listing stands for."""
    return unquote(member[AGE_DIGITS:], errors="surrogatepass")
