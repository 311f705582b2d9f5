"""A batch as the proxy knows it: which groups a consumer was given, and whether it is done with them.

Holds the frozen `Batch` and how it lies in the store's fields. Whether a group is still held is not written here: only the
queue knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from storage.types import QueuedGroup, StoredEntity

Ending = Literal["acked", "released"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: its groups as they waited. `ended` and `answer` are set once it was settled."""

    batch_id: str
    consumer: str
    held: tuple[QueuedGroup, ...]
    ended: Ending | None = None
    answer: Mapping[str, Any] | None = None


def read_batch(stored: StoredEntity) -> Batch:
    """The batch that these fields describe."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items()}
    return Batch(
        batch_id=stored.name,
        consumer=fields["consumer"],
        held=tuple(QueuedGroup(group, place, b"") for group, place in fields["held"]),
        ended=fields.get("ended"),
        answer=fields.get("answer"),
    )


def write_batch(consumer: str, held: list[QueuedGroup]) -> dict[str, bytes]:
    """The fields of a new batch."""
    return {
        "consumer": orjson.dumps(consumer),
        "held": orjson.dumps([(waiting.group, waiting.entry_id) for waiting in held]),
    }
