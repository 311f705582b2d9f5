"""The protocol of the cache: values that can be computed again, under names that identify their content."""

from typing import Protocol


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
