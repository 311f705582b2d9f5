"""The verbs of the queue of groups, and what each promises.

A group that was offered waits until somebody holds it, for as
long as a lease; whose lease ran out waits again. It deals in names, bytes and milliseconds only: nothing here knows what a
policy, a trainer or a rollout is.
"""

from collections.abc import Mapping
from typing import Protocol

from storage.types import QueuedGroup, StoredEntity


class Queue(Protocol):
    """Groups, each held by at most one holder at a time. Every verb raises `StoreUnreachable` like those of `Store`.

    Each verb moves a group and sets fields of it at once or not at all (None removes a field), and may safely be asked
    again when its answer was lost. A holder's name must be used for one taking only.
    """

    async def enqueue(
        self,
        group: str,
        note: bytes,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields as `Store.update_if` does, and put the group in the queue, once, if all of `expect` hold.

        None if there is no such group. Raises `FieldsChanged` if an expectation fails.
        """
        ...

    async def list_available(self, limit: int) -> list[QueuedGroup]:
        """Groups that nobody holds, the longest waiting first (to the millisecond): at least the first `limit` of them."""
        ...

    async def claim(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Hold a group that nobody holds, for up to `MAX_LEASE_MS`; whether it is held now."""
        ...

    async def extend(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Hold it for so long from now on; False if it is somebody else's, or nobody's any more."""
        ...

    async def release(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int
    ) -> bool:
        """Let it wait again, in its old place; False if it was not this holder's."""
        ...

    async def remove(self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int) -> bool:
        """Take it out of the queue for good; False if it was not this holder's, also the second time."""
        ...
