"""A batch, written to and read from the store's fields."""

import orjson

from proxy.rollouts.group import read_batch, write_batch
from storage.types import QueuedGroup, StoredEntity


def test_a_batch_is_read_as_it_was_written():
    """Groups keep their entry IDs; notes are dropped."""
    fields = write_batch("trainer", "default", [QueuedGroup("g1", "5-0", b"note"), QueuedGroup("a/b", "6-1", b"")])
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert ("b", "trainer", None, None) == (batch.batch_id, batch.consumer, batch.ended, batch.answer)
    assert (QueuedGroup("g1", "5-0", b""), QueuedGroup("a/b", "6-1", b"")) == batch.held


def test_a_batch_of_a_named_policy_has_its_groups_in_the_queue_of_the_policy():
    """That of the default policy is stored without its name."""
    batch = read_batch(StoredEntity("b", "i", 1, 1, write_batch("t", "planner", [QueuedGroup("g", "5-0", b"")]), {}))

    assert ("planner", (QueuedGroup("g", "5-0", b"", "planner"),)) == (batch.policy, batch.held)
    assert {"consumer", "held"} == write_batch("t", "default", []).keys()


def test_an_ended_batch_has_its_response():
    fields = {**write_batch("t", "default", []), "ended": b'"acked"', "answer": orjson.dumps({"acked": ["g"]})}
    batch = read_batch(StoredEntity("b", "incarnation", 1, 1, fields, {}))

    assert ("acked", {"acked": ["g"]}) == (batch.ended, batch.answer)
