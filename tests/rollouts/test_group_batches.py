"""A batch as it lies in the store's fields."""

import orjson

from proxy.rollouts.group import read_batch, write_batch
from storage.types import QueuedGroup, StoredEntity


def test_a_batch_is_read_as_it_was_written():
    """Its groups with their places; notes are of no use any more."""
    fields = write_batch("trainer", [QueuedGroup("g1", "5-0", b"note"), QueuedGroup("a/b", "6-1", b"")])
    batch = read_batch(StoredEntity("b", "birth", 1, 1, fields, {}))

    assert ("b", "trainer", None, None) == (batch.batch_id, batch.consumer, batch.ended, batch.answer)
    assert (QueuedGroup("g1", "5-0", b""), QueuedGroup("a/b", "6-1", b"")) == batch.held


def test_a_batch_that_was_settled_knows_its_answer():
    """For whoever asks again."""
    fields = {**write_batch("t", []), "ended": b'"acked"', "answer": orjson.dumps({"acked": ["g"]})}
    batch = read_batch(StoredEntity("b", "birth", 1, 1, fields, {}))

    assert ("acked", {"acked": ["g"]}) == (batch.ended, batch.answer)
