"""The verbs of the store and what each promises.

It deals in bytes, names and counts only: nothing here knows what a step, a token or an HTTP request is. A *rollout* is to this
file just a name with fields, counts, an ordered list of named records, a set of named blocks that records lean on, and marks.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from storage.queue import Queue
from storage.types import (
    Announcement,
    Appended,
    Change,
    FullRollout,
    Page,
    Reservation,
    ServerWarning,
    StepWrite,
    StoredEntity,
)


class Announcements(Protocol):
    """Small values that every `Store.open` tells along, whoever opens whatever. They live for ever."""

    async def announce(self, name: str, value: bytes) -> Announcement:
        """Set one, and give it back. Every `open` that begins after this returned tells it, or what was announced after it."""
        ...

    async def read(self) -> dict[str, Announcement]:
        """All of them."""
        ...

    async def heartbeat(
        self, name: str, value: bytes, *, lifetime_ms: int
    ) -> tuple[dict[str, Announcement], dict[str, bytes]]:
        """Say a value that is forgotten after its life (0: at once); give back all notices, and all values that are alive.

        A value is kept in memory only: no durability is waited for.
        """
        ...


class Reservations(Protocol):
    """Places for records to come, of rollouts that take only so many: those with a field `places`, a number.

    `Store.open` gives one, the record of its name takes it up, and it comes free when its lease is over.
    """

    async def extend(self, rollout: str, incarnation: str, reservation: Reservation) -> None:
        """Hold a place for so long from now; 0: no more. Nothing happens if that life of the rollout is over."""
        ...


class Changes(Protocol):
    """The changes of a store's rollouts, by whatever process."""

    def subscribe(self) -> AbstractAsyncContextManager[AsyncIterator[Change | None]]:
        """Listen. Every change after the context was entered is given, in the order of each rollout; it never ends.

        None says that nothing was heard for some seconds, and that the store is still there. Raises `StoreUnreachable` when it
        is not, on entering or later: what changes from then on is not told, so look anew after following again.
        """
        ...


class Store(Protocol):
    """Rollouts kept durably. Every verb raises `StoreUnreachable` when the store cannot be reached in time.

    Every verb may safely be asked again when its answer was lost. What is written to a rollout renews its lifetime, if
    the store gives it one; reading does not.
    """

    async def open(
        self, rollout: str, fields: Mapping[str, bytes], *, now_ms: int, reservation: Reservation | None = None
    ) -> StoredEntity:
        """Give back the rollout of this name, making it with `fields` if there is none. One round trip.

        With a place, it is held for the record of that name, if the rollout has one left.
        """
        ...

    @property
    def reservations(self) -> Reservations:
        """The places that are held for records to come."""
        ...

    @property
    def announcements(self) -> Announcements:
        """What is announced to everybody who opens a rollout of this store."""
        ...

    @property
    def changes(self) -> Changes:
        """What is told of rollouts as they change."""
        ...

    @property
    def groups(self) -> "Store":
        """The groups of this store: named things with fields and marks, kept as rollouts are, in a space of their own."""
        ...

    @property
    def batches(self) -> "Store":
        """The batches of this store, kept like groups, but for a week at the most."""
        ...

    @property
    def queue(self) -> Queue:
        """The queue of this store's groups."""
        ...

    def same_slot(self, group: str, rollout: str) -> bool:
        """Whether a group and a rollout of these names can be opened together: one name in sixteen can."""
        ...

    async def open_group(
        self,
        group: str,
        fields: Mapping[str, bytes],
        rollouts: Mapping[str, Mapping[str, bytes]],
        *,
        now_ms: int,
    ) -> StoredEntity:
        """Make a group and its rollouts, all with their fields, at once or not at all; give back the group.

        A group that is there already stays as it is, and nothing is made. Raises `ValueError` for a rollout that is not
        `beside` the group.
        """
        ...

    async def get(self, rollout: str) -> StoredEntity | None:
        """The rollout of this name, or None. Makes nothing."""
        ...

    async def update_if(
        self,
        rollout: str,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields (None removes one), if all of `expect` hold (None: absent); give back the rollout as it is then.

        None if there is no such rollout. Raises `FieldsChanged`, and writes nothing, if an expectation fails; asked
        again after a lost answer, it may fail by its own first try, so look at how the rollout stands.
        """
        ...

    async def append(self, entry: StepWrite, *, now_ms: int) -> Appended:
        """Store a record with its blocks and counts, all or nothing, as durably as the store is set to.

        One round trip. Appending a name that is there already changes nothing but `touched_ms` and gives its first
        index, so that a caller who lost the answer may simply repeat it. A rollout that expired since it was opened is
        restored, with the same incarnation, by an entry with an origin; if it was opened anew, that life gets the record.

        Raises:
            RolloutDeleted: the rollout was deleted.
            RolloutExpired: it expired, and the entry has no origin.
            MissingBlocks: blocks that the record leans on are not stored.
        """
        ...

    async def renew(self, rollout: str, incarnation: str | None) -> bool:
        """Begin the lifetime of a rollout anew, or of any life of it; whether it is there. No durability is waited for."""
        ...

    @property
    def ttl_s(self) -> int | None:
        """For how many seconds a rollout lives that nothing is written to; None: for ever."""
        ...

    async def mark(self, rollout: str, incarnation: str, marks: Mapping[str, bytes], *, now_ms: int) -> None:
        """Set small facts learnt after a record was stored (a reward, a lost client).

        Raises `RolloutDeleted` if the rollout was deleted, or has expired and was not opened again.
        """
        ...

    async def marks(self, rollout: str, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """The marks of these names that exist; all marks of the rollout when `names` is None."""
        ...

    async def read(self, rollout: str, start: int, limit: int) -> list[bytes]:
        """Up to `limit` records from index `start` on, in the order they were appended."""
        ...

    async def read_all(self, rollout: str, limit: int) -> FullRollout | None:
        """Up to `limit` records and all else of a rollout, in one round trip; None if there is no such rollout."""
        ...

    async def find(self, rollout: str, name: str) -> tuple[int, bytes] | None:
        """The index and the record of this name, or None."""
        ...

    async def blocks(self, rollout: str, names: Sequence[bytes] | None = None) -> dict[bytes, bytes]:
        """The blocks of these names that exist; all blocks of the rollout when `names` is None."""
        ...

    async def list(self, *, cursor: str | None = None, limit: int = 100, since_ms: int | None = None) -> Page:
        """Rollout names, newest first. Raises `ValueError` for a cursor that is not one of ours.

        Stable under concurrent writes: paging through neither repeats nor skips a rollout that existed throughout.
        """
        ...

    def names(self) -> AsyncIterator[str]:
        """All rollout names, newest first, in constant memory."""
        ...

    async def delete(self, rollout: str) -> bool:
        """Delete everything of a rollout; whether there was anything. Appends under its incarnation fail from then on."""
        ...

    async def set_once(self, name: str, value: bytes) -> bytes:
        """Set a constant of the whole store if it is not set yet; give back what holds."""
        ...

    async def info(self) -> dict[str, str]:
        """What is there: server, version, durability, and anything an operator should know. Reaches the store."""
        ...

    async def warnings(self) -> Sequence[ServerWarning]:
        """What speaks against the servers, each with what to do about it. Reaches the store."""
        ...

    async def ping(self) -> None:
        """Return if the store answers; else raise `StoreUnreachable`."""
        ...

    async def close(self) -> None:
        """Let go of connections; for an embedded store, stop its server cleanly."""
        ...
