"""The errors that a store raises."""

from collections.abc import Sequence

from storage.types import StoredEntity


class StorageError(Exception):
    """The store cannot do what was requested. The subclasses are the cases that callers handle."""


class StoreUnreachable(StorageError):
    """The store cannot be reached, or it cannot accept writes at the moment. Retry later.

    `server`: the address of the server that failed; None if no server did, for example while data moves between servers.
    """

    def __init__(self, message: str, server: str | None = None) -> None:
        super().__init__(message)
        self.server = server


class RolloutDeleted(StorageError):
    """The rollout was deleted after it was opened, and possibly opened again. Nothing was stored."""


class RolloutExpired(StorageError):
    """The rollout expired after it was opened. Nothing was stored: append again, with an origin and all blocks."""


class MissingBlocks(StorageError):
    """The record requires blocks that are not in the store. Nothing was stored: append again with these blocks."""

    def __init__(self, names: Sequence[bytes]) -> None:
        super().__init__(f"{len(names)} blocks that the record requires are not in the store")
        self.names = tuple(names)


class FieldsChanged(StorageError):
    """A field does not have the expected value. Nothing was stored; `rollout` is the current state."""

    def __init__(self, rollout: StoredEntity) -> None:
        super().__init__(f"the fields of rollout {rollout.name!r} do not have the expected values")
        self.rollout = rollout
