"""The protocols of a store: its methods and their guarantees.

A store has names, bytes and counts; it does not interpret them. A *rollout* is a name with fields, counts, an ordered list of
named records, a set of named blocks that records share, and marks.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from storage.types import (
    DEFAULT_QUEUE,
    Announcement,
    Appended,
    Change,
    FullRollout,
    Page,
    QueueCounts,
    QueuedGroup,
    Reservation,
    ServerWarning,
    StepWrite,
    StoredEntity,
    Timer,
)


class Queue(Protocol):
    """Queues of groups; in each queue a group has at most one holder at a time.

    Every method raises `StoreUnreachable` as those of `Store` do.

    Each method moves a group and sets fields of it (None removes a field) in one transaction, and is safe to repeat if its
    response was lost. A holder name must be used for one claim only.
    """

    async def enqueue(
        self,
        group: str,
        notes: Mapping[str, bytes],
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields as `Store.update_if` does and add the group to the queues, if all fields have the expected values.

        `notes`: the queues by name, each with the note of its entry.
        Returns None if the group does not exist. Raises `FieldsChanged` if a field does not have the expected value.
        """
        ...

    async def list_available(self, limit: int, queue: str = DEFAULT_QUEUE) -> list[QueuedGroup]:
        """Return groups of a queue without a holder, oldest first (to the millisecond): at least the first `limit` of them."""
        ...

    async def counts(self, queue: str = DEFAULT_QUEUE) -> QueueCounts:
        """Return how many groups of a queue have no holder, how many have one, and the age of the oldest one without one."""
        ...

    async def holders(self, queue: str = DEFAULT_QUEUE) -> dict[str, int]:
        """Return the holders of groups of a queue, and for how many ms (by the server's clock) each did not claim or extend."""
        ...

    async def claim(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Claim a group that has no holder, for at most `MAX_LEASE_MS`; return whether this holder has it now."""
        ...

    async def extend(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Set the lease to end this long from now; return False if another holder, or none, has the group."""
        ...

    async def release(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int, silent_ms: int = 0
    ) -> bool:
        """Return the group to its old position in its queue; return False if this holder does not have it.

        With `silent_ms`, also False if the holder has claimed or extended groups within this time.
        """
        ...

    async def remove(self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int) -> bool:
        """Remove the group from its queue; return False if this holder does not have it (also on a repeated call)."""
        ...


class Timers(Protocol):
    """The timers of rollouts. They do not wait for durability, and every method is safe to repeat."""

    async def claim(self, limit: int, *, now_ms: int, until_ms: int) -> list[Timer]:
        """Return timers that have expired, and set each to `until_ms`, so that no other claim returns it before.

        The earliest are first within each of the store's sixteen parts, of which each returns up to `limit` timers. Parts that
        fail return none; raises `StorageError` if one failed and the others have none.
        """
        ...

    async def move(self, times: Mapping[Timer, int | None], *, from_ms: int) -> None:
        """Set timers to new times (None removes one), except those that are not at `from_ms`."""
        ...

    async def remove(self, timer: Timer) -> None:
        """Remove a timer; one that does not exist is no error."""
        ...


class Cache(Protocol):
    """Values that any process of the store may have written. They do not wait for durability, and may be gone at any time."""

    async def get(self, name: str) -> bytes | None:
        """Return a value that was put at most its lifetime ago, or None."""
        ...

    async def put(self, name: str, value: bytes, *, lifetime_s: int, limit: int) -> None:
        """Set a value. If all values have more than `limit` bytes, the oldest are removed first.

        The limit applies to each of the store's sixteen parts by its share. A value above the share is not kept.
        """
        ...


class Announcements(Protocol):
    """Small values that every `Store.open` returns together with the rollout. They do not expire."""

    async def announce(self, name: str, value: bytes) -> Announcement:
        """Set a value and return it. Each `open` that starts after this returned gets this value or a later one."""
        ...

    async def announce_if(self, name: str, value: bytes, number: int) -> Announcement | None:
        """Set a value if the present one has this number (0: there is none); return None if it has another."""
        ...

    async def read(self) -> dict[str, Announcement]:
        """Return all announcements."""
        ...

    async def heartbeat(
        self, name: str, value: bytes, *, lifetime_ms: int
    ) -> tuple[dict[str, Announcement], dict[str, bytes]]:
        """Set a value that expires after its lifetime (0: at once); return all announcements and all values not expired.

        Heartbeats do not wait for durability.
        """
        ...


class Reservations(Protocol):
    """Reservations for records of rollouts that have a limit on records (a field `places` with a number).

    `Store.open` makes a reservation, `Store.append` of the record with its name uses it up, and it ends with its lease.
    """

    async def extend(self, rollout: str, incarnation: str, reservation: Reservation) -> None:
        """Set the lease to end this long from now; 0 releases the reservation.

        Does nothing if the rollout has another incarnation now.
        """
        ...


class Changes(Protocol):
    """Notifications about changes of rollouts, made by any process. They are not stored."""

    def subscribe(self) -> AbstractAsyncContextManager[AsyncIterator[Change | None]]:
        """Iterate over the changes after the context was entered, in order for each rollout, without end.

        None means that nothing was received for some seconds and that the store still responds. Raises `StoreUnreachable` if
        it does not, on entering or later. Changes made while not subscribed are lost: read the rollouts after subscribing
        again.
        """
        ...


class Store(Protocol):
    """Rollouts in durable storage. Every method raises `StoreUnreachable` if the store does not respond in time.

    Every method is safe to repeat if its response was lost. Each write to a rollout restarts its lifetime (TTL), if the store
    has one; a read does not.
    """

    async def open(
        self,
        rollout: str,
        fields: Mapping[str, bytes],
        *,
        now_ms: int,
        reservation: Reservation | None = None,
        timer_ms: int | None = None,
    ) -> StoredEntity:
        """Return the rollout with this name; create it with `fields` if it does not exist. One round trip.

        A rollout that is created gets a timer at `timer_ms`, in the same transaction.
        A reservation is made if one is requested and the rollout has fewer records and reservations than its limit.
        """
        ...

    @property
    def reservations(self) -> Reservations:
        """The reservations for records."""
        ...

    @property
    def announcements(self) -> Announcements:
        """The announcements that `open` returns."""
        ...

    @property
    def changes(self) -> Changes:
        """Notifications about changes of rollouts."""
        ...

    @property
    def groups(self) -> "Store":
        """The groups: entities with fields and marks, in a namespace separate from rollouts."""
        ...

    @property
    def batches(self) -> "Store":
        """The batches, stored like groups, with a lifetime of at most one week."""
        ...

    @property
    def queue(self) -> Queue:
        """The queues of groups."""
        ...

    @property
    def timers(self) -> Timers:
        """The timers of rollouts."""
        ...

    @property
    def cache(self) -> Cache:
        """The cache of values that can be computed again."""
        ...

    def same_slot(self, group: str, rollout: str) -> bool:
        """Return whether a group and a rollout with these names can be opened together (1 in 16 pairs of names can)."""
        ...

    async def open_group(
        self,
        group: str,
        fields: Mapping[str, bytes],
        rollouts: Mapping[str, Mapping[str, bytes]],
        *,
        now_ms: int,
        timer_ms: int | None = None,
    ) -> StoredEntity:
        """Create a group and its rollouts with their fields in one transaction; return the group.

        Each rollout that is created gets a timer at `timer_ms`. If the group exists, nothing is changed. Raises `ValueError`
        for a rollout that is not in the `same_slot`.
        """
        ...

    async def get(self, rollout: str) -> StoredEntity | None:
        """Return the rollout with this name, or None. Creates nothing."""
        ...

    async def update_if(
        self,
        rollout: str,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
        touched_ms: int | None = None,
    ) -> StoredEntity | None:
        """Set fields (None removes one) if all fields have the expected values (None: absent); return the new state.

        If `touched_ms` is given, it must be the expected one, too. Returns None if the rollout does not exist. Raises
        `FieldsChanged`, without writing, if a field has another value. If the response was lost, a repeated call can fail
        because of its own first attempt: compare the current state.
        """
        ...

    async def append(self, entry: StepWrite, *, now_ms: int) -> Appended:
        """Store a record with its blocks and counts in one transaction, with the durability that the store is set to.

        One round trip. Appending the same name again only updates `touched_ms` and returns the position of the first append,
        so a call whose response was lost can be repeated. If the rollout has expired since it was opened, an entry with an
        origin restores it with the same incarnation; if it was opened again since, the record is added to the new incarnation.

        Raises:
            RolloutDeleted: the rollout was deleted.
            RolloutExpired: the rollout has expired and the entry has no origin.
            MissingBlocks: required blocks are not stored.
        """
        ...

    async def renew(self, rollout: str, incarnation: str | None, *, now_ms: int = 0) -> bool:
        """Restart the lifetime of a rollout (None: of any incarnation); return whether it exists. Not durable.

        If `now_ms` is not 0, it also becomes `touched_ms`. Nothing else changes, and no change is published.
        """
        ...

    @property
    def ttl_s(self) -> int | None:
        """The lifetime of a rollout after its last write, in seconds; None: rollouts do not expire."""
        ...

    async def mark(self, rollout: str, incarnation: str, marks: Mapping[str, bytes], *, now_ms: int) -> None:
        """Set marks: small values that become known after a record was stored (a reward, a disconnected client).

        Raises:
            RolloutDeleted: the rollout was deleted, or it has expired and was not opened again.
        """
        ...

    async def marks(self, rollout: str, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """Return the existing marks with these names, or all marks of the rollout if `names` is None."""
        ...

    async def read(self, rollout: str, start: int, limit: int) -> list[bytes]:
        """Return up to `limit` records from position `start`, in the order in which they were appended."""
        ...

    async def read_all(self, rollout: str, limit: int) -> FullRollout | None:
        """Return a rollout with up to `limit` records and all its other data in one round trip, or None."""
        ...

    async def find(self, rollout: str, name: str) -> tuple[int, bytes] | None:
        """Return the position and the bytes of the record with this name, or None."""
        ...

    async def blocks(self, rollout: str, names: Sequence[bytes] | None = None) -> dict[bytes, bytes]:
        """Return the existing blocks with these names, or all blocks of the rollout if `names` is None."""
        ...

    async def list(self, *, cursor: str | None = None, limit: int = 100, since_ms: int | None = None) -> Page:
        """Return a page of rollout names, newest first. Raises `ValueError` for an invalid cursor.

        Paging is stable under concurrent writes: rollouts that exist throughout are listed exactly once.
        """
        ...

    def names(self) -> AsyncIterator[str]:
        """Iterate over all rollout names, newest first, in constant memory."""
        ...

    async def delete(self, rollout: str, *, touched_ms: int | None = None) -> bool:
        """Delete all data of a rollout; return whether it was deleted. Appends to its incarnation fail from then on.

        If `touched_ms` is given, a rollout that was touched at another time is not deleted.
        """
        ...

    async def set_once(self, name: str, value: bytes) -> bytes:
        """Set a constant of the whole store unless it has a value; return its value."""
        ...

    async def info(self) -> dict[str, str]:
        """Return facts for operators: servers, version, durability, memory. Connects to the store."""
        ...

    async def warnings(self) -> Sequence[ServerWarning]:
        """Return the problems of the servers and how to fix them. Connects to the store."""
        ...

    async def ping(self) -> None:
        """Return if the store responds. Raises `StoreUnreachable` otherwise."""
        ...

    async def close(self) -> None:
        """Close all connections and stop the embedded server, if there is one."""
        ...
