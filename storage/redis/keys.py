"""All keys of the store, with their types and lifetimes. No other module contains a key name.

ID is the percent-encoded name of a rollout; B is the tag of a bucket of the store, chosen by a hash of ID. Keys of a rollout:

    {prefix}:{B}:rollout:ID     hash   birth, created_ms, touched_ms, held, f:FIELD -> bytes, n:COUNT -> integer
    {prefix}:{B}:records:ID     list   the records, in the order in which they were appended
    {prefix}:{B}:positions:ID   hash   record name -> position in the list
    {prefix}:{B}:blocks:ID      hash   block name -> bytes
    {prefix}:{B}:marks:ID       hash   mark name -> bytes
Keys of a bucket:
    {prefix}:{B}:listing        zset   created_ms (15 digits) + ID, all with score 0: sorted by age as text
    {prefix}:{B}:expiry         zset   the same members -> Unix ms at which the rollout expires; only with a TTL
    {prefix}:{B}:index          zset   FIELD=VALUE, a zero byte and a member of the listing, all with score 0; rollouts only
    {prefix}:{B}:repair         hash   how far the index is checked, while it may lack what 0.1.0 wrote; first bucket only
    {prefix}:{B}:queue          stream only for groups: the queue `default`, with a note in each entry
    {prefix}:{B}:queue:NAME     stream only for groups: any other queue
    {prefix}:{B}:notices        hash   announcements: NAME -> bytes, number:NAME -> integer; the same in each bucket
    {prefix}:{B}:processes      hash   NAME of a process -> POLICY NUMBER CALLS for each policy: its calls in flight, and the
                                       number of the latest pause that it knows
    {prefix}:{B}:processes-ends zset   NAME of a process -> Unix ms at which it counts as dead
    {prefix}:{B}:processes-counts hash calls POLICY -> calls in flight, NUMBER POLICY -> processes; sums of the values above
    {prefix}:{B}:beats          hash   NAME -> Unix ms at which it expires (15 digits) + bytes: of processes of 0.1.0, and the
                                       sums of all others under the name `~`
    {prefix}:{B}:role:NAME      string the process that has the role
    {prefix}:{B}:free:NAME      zset   only for groups: entries of the queue NAME without a holder -> Unix ms
    {prefix}:{B}:leased:NAME    zset   the same for entries with a holder -> Unix ms at which their lease ends
    {prefix}:{B}:notes:NAME     hash   the same entries (entry ID, space, ID) -> `=` + note
    {prefix}:{B}:watched:NAME:CONSUMER  zset  holders -> Unix ms until which they have to extend their leases
    {prefix}:{B}:compared:NAME  string Unix ms at which these three were last compared with the streams
    {prefix}:{B}:timers         zset   ID, space, incarnation -> Unix ms at which a process looks at the rollout
    {prefix}:{B}:turn           string exists while a process looks at expired timers; first bucket only
    {prefix}:{B}:deleted        zset   incarnation of a deleted rollout -> Unix ms at which it is removed; only with a TTL
    {prefix}:{B}:probe          string written when a server is probed that failed; it expires after a second
    {prefix}:{B}:cache          hash   name -> Unix ms at which the value expires (15 digits) + bytes
    {prefix}:{B}:cache-expiry   zset   the same names -> Unix ms; {prefix}:{B}:cache-bytes has the size of all values
Those from `processes` to `compared` are in the first bucket only.
Keys of the store:
    {prefix}:constants          hash   name -> bytes; in a store with another number of buckets than 16: the number (string)
    {prefix}:set-once           hash   the constants of such a store
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
tags are distributed evenly: of N tags, one is in each N-th part of the slots.

The number of buckets is chosen when a store is created (docs/decisions/146). 0.1.0 knows 16 only: its HSETNX of a constant
fails (WRONGTYPE) in a store with another number, so that it cannot start there.
"""

from binascii import crc32, crc_hqx
from functools import cached_property, lru_cache
from itertools import product
from string import ascii_lowercase, digits
from typing import Final
from urllib.parse import quote, unquote

from storage.options import MAX_BUCKETS
from storage.types import DEFAULT_QUEUE

DEFAULT_BUCKETS: Final = 16  # of a store on one server, and of every store of 0.1.0
CLUSTER_BUCKETS: Final = 256  # of a store on a cluster: a bucket is one slot, which cannot be split
AGE_DIGITS: Final = 15  # Unix ms until the year 33658; the scripts contain the same number
GROUPS: Final = ".groups"  # appended to the prefix
BATCHES: Final = ".batches"

_TAGS_OF_16: Final = (
    "18", "5x", "dj", "3r", "d2", "pv", "uh", "iy", "ly", "h9", "uv", "q6", "9s", "5f", "dt", "ha",
)  # fmt: skip
_SLOTS: Final = 16_384
_TAG_CHARACTERS: Final = digits + ascii_lowercase


class Bucket:
    """The keys of a bucket."""

    def __init__(self, prefix: str) -> None:
        start = prefix.encode()
        self.prefix = prefix
        self.listing = start + b"listing"
        self.expiry = start + b"expiry"
        self.indexes = start + b"index"
        self.repair = start + b"repair"
        self.announcements = start + b"notices"
        self.heartbeats = start + b"beats"  # of processes of 0.1.0
        self.timers = start + b"timers"
        self.turn = start + b"turn"
        self.deleted = start + b"deleted"
        self.probe = start + b"probe"
        # the cached values, their expiry times, their size
        self.cache = (start + b"cache", start + b"cache-expiry", start + b"cache-bytes")

    def queue(self, name: str = DEFAULT_QUEUE) -> bytes:
        """Return the key of a queue, in the namespace of groups."""
        suffix = "" if name == DEFAULT_QUEUE else f":{_encoded(name)}"
        return f"{self.prefix}queue{suffix}".encode()

    @property
    def processes(self) -> tuple[bytes, bytes, bytes]:
        """The keys of what each process has sent, of the ends of their lifetimes, and of the counts over all of them."""
        start = f"{self.prefix}processes".encode()
        return start, start + b"-ends", start + b"-counts"

    def queue_index(self, queue: str = DEFAULT_QUEUE) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the keys of the index of a queue: available, leased, notes, the time of the last comparison."""
        keys = (f"{self.prefix}{part}:{_encoded(queue)}".encode() for part in ("free", "leased", "notes", "compared"))
        available, leased, notes, compared = keys
        return available, leased, notes, compared

    def watched(self, queue: str, consumer: str) -> bytes:
        """Return the key of the watched holders of a consumer."""
        return f"{self.prefix}watched:{_encoded(queue)}:{_encoded(consumer)}".encode()

    def role(self, name: str) -> bytes:
        """Return the key of a role that one process has."""
        return f"{self.prefix}role:{name}".encode()


class RolloutKeys:
    """The keys of a rollout and of its bucket. `all`: the seven keys of the rollout in the order in which scripts get them."""

    def __init__(self, encoded: str, bucket: Bucket) -> None:
        own = [
            f"{bucket.prefix}{part}:{encoded}".encode()
            for part in ("rollout", "records", "positions", "blocks", "marks")
        ]
        self.encoded = encoded.encode()
        self.rollout, self.records, self.positions, self.blocks, self.marks = own
        self.listing = bucket.listing
        self.expiry = bucket.expiry
        self.indexes = bucket.indexes
        self.announcements = bucket.announcements
        self.deleted = bucket.deleted
        self.timers = bucket.timers
        self.all = (*own, self.listing, self.expiry)


class Layout:
    """The keys of one namespace of a store, by its prefix and its number of buckets."""

    def __init__(self, prefix: str, buckets: int = DEFAULT_BUCKETS) -> None:
        self.prefix = prefix
        self.buckets = tuple(Bucket(f"{prefix}:{{{tag}}}:") for tag in bucket_tags(buckets))
        self.rollout = lru_cache(maxsize=4096)(self._rollout)

    def __repr__(self) -> str:
        return f"<Layout {self.prefix}, {len(self.buckets)} buckets>"

    @property
    def constants(self) -> bytes:
        """The key of the constants of the store."""
        name = "constants" if len(self.buckets) == DEFAULT_BUCKETS else "set-once"
        return f"{self.prefix}:{name}".encode()

    @cached_property
    def groups(self) -> "Layout":
        """The keys of groups and of their queues."""
        return Layout(self.prefix + GROUPS, len(self.buckets))

    @cached_property
    def batches(self) -> "Layout":
        """The keys of batches."""
        return Layout(self.prefix + BATCHES, len(self.buckets))

    def bucket(self, name: str) -> Bucket:
        """Return the bucket of a name; the same one in each namespace."""
        return self.buckets[crc32(_encoded(name).encode()) % len(self.buckets)]

    def _rollout(self, name: str) -> RolloutKeys:
        """Return the keys of the rollout with this name."""
        return RolloutKeys(_encoded(name), self.bucket(name))

    def in_bucket_of(self, other: str, name: str) -> str:
        """Return `name`, with its last three characters replaced if necessary, so that it is in the bucket of `other`."""
        wanted = self.bucket(other)
        if self.bucket(name) is wanted:
            return name
        head = crc32(_encoded(name[:-3]).encode())  # each tail needs three more steps only
        tails = (tail for tail in _tails() if self.buckets[crc32(tail, head) % len(self.buckets)] is wanted)
        return name[:-3] + next(tails).decode()


@lru_cache
def bucket_tags(count: int) -> tuple[str, ...]:
    """Return the tags of this number of buckets, one in each equal range of slots. They must not change: keys have them."""
    if count == DEFAULT_BUCKETS:
        return _TAGS_OF_16
    found: dict[int, str] = {}
    for length in (2, 3):
        for characters in product(_TAG_CHARACTERS, repeat=length):
            tag = "".join(characters)
            found.setdefault(crc_hqx(tag.encode(), 0) % _SLOTS * count // _SLOTS, tag)
            if len(found) == count:
                return tuple(found[number] for number in range(count))
    raise ValueError(f"{count} buckets: use at most {MAX_BUCKETS}")


@lru_cache
def _tails() -> list[bytes]:
    """Return all texts of three characters of a ULID: 32 for each of 1,024 buckets."""
    return ["".join(characters).encode() for characters in product("0123456789ABCDEFGHJKMNPQRSTVWXYZ", repeat=3)]


def creation_key(prefix: str) -> bytes:
    """Return the key that exists as soon as a store does; its type and value determine the number of buckets."""
    return f"{prefix}:constants".encode()


def _encoded(name: str) -> str:
    # surrogatepass: a name with a lone surrogate is not valid UTF-8, but it must be usable and distinct.
    return quote(name, safe="", errors="surrogatepass")


def decoded_name(encoded: bytes) -> str | None:
    """Return the name that is encoded in a key, a member of a set or an entry; None if it is none."""
    try:
        return unquote(encoded.decode("ascii"), errors="surrogatepass") or None
    except UnicodeError:
        return None
