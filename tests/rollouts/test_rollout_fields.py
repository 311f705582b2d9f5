"""Stored fields: values of the declared types, or one error that names the entity and the field."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from prometheus_client import CollectorRegistry

from proxy.errors import Damaged
from proxy.rollouts.group import STATUSES, read_batch, read_group, read_note
from proxy.rollouts.rollout import LARGEST, announced_value, left_out, read_claims, read_fields, read_rollout
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.json_bytes import to_json_bytes
from storage.types import Announcement, StoredEntity

ROLLOUT_FIELDS = (
    "status", "reason", "finished_ms", "group_id", "model", "reward", "step_rewards", "thread_rewards", "advantages",
    "claimed_by", "metadata", "sampling", "tools", "limits", "places", "deadline_s", "idle_s", "start_s", "is_over_sampled",
    "osmosis", "result", "reply", "continuation", "task", "began_ms", "drift",
)  # fmt: skip
GROUP_FIELDS = (
    "size", "over_sample", "replace", "members", "complete_ms", "metadata", "status", "oldest", "epoch", "delivery",
    "delivered_to", "requeued", "requeued_ms", "acked", "max_staleness", "lease_ms:p",
)  # fmt: skip
BYTES = st.binary(max_size=20) | st.sampled_from(
    (b"NaN", b"{{{", b'"zzz"', b"1e300", b"1e400", b"9" * 30, b"-1", b"[" * 300 + b"]" * 300,
     b'"\xff"', b'"\\ud800"', b"true", b"[[]]", b'{"a":[1e308]}', b'{"kinds":5,"steps":1}', b'["a"]', b"null", b"", b"0.5")
)  # fmt: skip


def stored(name="r1", fields=None, **facts):
    return StoredEntity(name, "i", 1, 2, {} if fields is None else fields, {}, **facts)


@given(st.dictionaries(st.sampled_from(ROLLOUT_FIELDS), BYTES, max_size=3))
def test_any_fields_are_a_rollout_that_json_can_express_or_damaged(fields):
    try:
        rollout = read_rollout(stored(fields=fields))
    except Damaged as damage:
        assert (damage.entity, damage.name) == ("rollout", "r1")
        assert "'r1' is unreadable" in damage.message
    else:
        assert to_json_bytes(
            [rollout.metadata, rollout.advantages, rollout.reward, rollout.tools, rollout.step_rewards]
        )
        assert rollout.reward is None or abs(rollout.reward) <= LARGEST


@given(
    st.dictionaries(st.sampled_from(GROUP_FIELDS), BYTES, max_size=3),
    st.dictionaries(st.sampled_from(["member:a", "replaced:a", "replaced:b", "finished:a"]), BYTES | st.just(b"a")),
)
def test_any_fields_are_a_group_or_damaged(fields, marks):
    """Also with members that replace each other."""
    try:
        group = read_group(stored(fields=fields), marks)
    except Damaged as damage:
        assert damage.entity == "group"
    else:
        assert group.status_at(5) in STATUSES
        assert group.attempts("a") < 3
        assert len(group.current) <= len(group.members)


@given(
    st.dictionaries(
        st.sampled_from(["consumer", "held", "policy", "ended", "answer", "instance", "heartbeat_ms"]), BYTES
    )
)
def test_a_batch_without_its_groups_is_damaged(fields):
    with pytest.raises(Damaged, match="The stored batch 'r1' is unreadable"):
        read_batch(stored(fields=fields))


@given(BYTES)
def test_a_damaged_note_of_a_queue_has_no_version(note):
    assert read_note(note).oldest in (None, "zzz")


def test_members_that_replace_themselves_are_damaged():
    """Through others, too: their group would have no end of attempts."""
    with pytest.raises(Damaged, match="in place of itself"):
        read_group(stored(), {"replaced:a": b"b", "replaced:b": b"a"})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"metadata": b"{{{"}, "field 'metadata' is no JSON"),
        ({"reward": b'"1"'}, "got `str` - at `reward`"),
        ({"status": b'"zzz"'}, "at `status`"),
        ({"advantages": b'{"a":[1e39]}'}, "range of float32"),
        ({"sampling": b'{"cap":{"max_tokens":1e39}}'}, "range of float32"),
        ({"osmosis": b"{}"}, "`osmosis` must have"),
        ({"osmosis": b'{"server":"s","protocol":"p","asked":"a","state":5}'}, "`osmosis` must have"),
        ({"claimed_by": b'[["policy"]]'}, "at `claimed_by"),
    ],
)
def test_the_error_names_the_field(fields, why):
    """And what to do; it is a conflict, since no retry helps."""
    with pytest.raises(Damaged, match=f"{why}.*Delete it, or correct it") as raised:
        read_rollout(stored(fields=fields))

    assert (raised.value.status, raised.value.code) == (409, "damaged_record")


def test_damage_that_the_store_has_found_and_names_that_are_no_text_are_errors():
    for entity in (stored(damage="created_ms is b'x'"), stored("a\ud800")):
        with pytest.raises(Damaged) as raised:
            read_fields(entity, Struct, "rollout")

        assert raised.value.message.encode()


def test_claims_are_read_beside_other_damage():
    """So that a freeze can be undone."""
    assert [claim.batch_id for claim in read_claims(stored(fields={"claimed_by": b'"b1"', "reward": b"NaN"}))] == ["b1"]
    assert read_claims(stored()) == ()


def test_what_is_omitted_is_counted_logged_and_named(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("tokentape"), "propagate", True)
    registry = CollectorRegistry()
    damage = Damaged("The stored group 'counted' is unreadable.", entity="group", name="counted")
    entries = left_out([damage, damage], make_metrics(registry))

    assert [{"group_id": "counted", "why": damage.message}] * 2 == entries
    assert registry.get_sample_value("tokentape_unreadable_total", {"entity": "group"}) == 2
    assert caplog.text.count("'counted'") == 1


def test_an_unreadable_announcement_leaves_the_value_before():
    assert tuple(announced_value(Announcement(value, 1), str, "a", "6") for value in (b'"7"', b"{")) == ("7", "6")
