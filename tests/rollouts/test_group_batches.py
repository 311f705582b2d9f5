"""A batch, written to and read from the store's fields."""

import orjson

from proxy.rollouts.group import read_batch, write_batch
from storage.types import QueuedGroup, StoredEntity


def test_a_batch_is_read_as_it_was_written():
    """Groups keep their entry IDs; notes are dropped."""
    fields = write_batch("trainer", [QueuedGroup("g1", "5-0", b"note"), QueuedGroup("a/b", "6-1", b"")])
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert ("b", "trainer", None, None) == (batch.batch_id, batch.consumer, batch.ended, batch.answer)
    assert (QueuedGroup("g1", "5-0", b""), QueuedGroup("a/b", "6-1", b"")) == batch.held


def test_an_ended_batch_has_its_response():
    fields = {**write_batch("t", []), "ended": b'"acked"', "answer": orjson.dumps({"acked": ["g"]})}
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert ("acked", {"acked": ["g"]}) == (batch.ended, batch.answer)
