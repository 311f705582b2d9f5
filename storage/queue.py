"""The protocol of the queues of groups.

A group in a queue is available until a holder claims it for the time of a lease. When the lease expires, it is available
again. A group can be in several queues, and is claimed in each of them independently. The queues have names, bytes and
milliseconds; they do not interpret them.
"""

from collections.abc import Mapping
from typing import Protocol

from storage.types import DEFAULT_QUEUE, QueueCounts, QueuedGroup, StoredEntity


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
