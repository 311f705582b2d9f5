"""The errors that a store may raise."""

from collections.abc import Sequence

from storage.types import StoredEntity


class StorageError(Exception):
    """Something the store could not do, in one sentence. The kinds below say what to do about it."""


class StoreUnreachable(StorageError):
    """The store cannot be reached, or answered that it cannot write now. Try again later."""


class RolloutDeleted(StorageError):
    """The rollout was deleted since it was opened (and maybe opened anew). Nothing was stored."""


class RolloutExpired(StorageError):
    """The rollout has expired since it was opened. Nothing was stored: append again, with its origin and all blocks."""


class MissingBlocks(StorageError):
    """Blocks that a record leans on are not in the store; nothing was written. Send them along."""

    def __init__(self, names: Sequence[bytes]) -> None:
        super().__init__(f"{len(names)} blocks that the record leans on are not in the store")
        self.names = tuple(names)


class FieldsChanged(StorageError):
    """A field did not have the expected value; nothing was written. `rollout` is how it stands now."""

    def __init__(self, rollout: StoredEntity) -> None:
        super().__init__(f"the fields of rollout {rollout.name!r} are not as expected")
        self.rollout = rollout
