"""A group, read from the store's fields and marks."""

import orjson

from proxy.rollouts.group import FINISHED_MARK, MEMBER_MARK, read_group
from storage.types import StoredEntity


def stored(**fields):
    return StoredEntity("g", "b", 1, 2, {name: orjson.dumps(value) for name, value in fields.items()}, {})


def marks(**members):
    return {kind + name: b"" for name, kinds in members.items() for kind in kinds}


def test_an_opened_group_has_its_rollouts_in_order():
    group = read_group(stored(size=2, members=["z", "a"]), marks(z=[FINISHED_MARK]))

    assert (2, ("z", "a"), {"z"}, "open") == (group.size, group.members, group.finished, group.status)
    assert not group.is_full


def test_a_group_created_by_calls_has_its_members_by_name():
    """Without a size it is never full."""
    group = read_group(stored(), marks(b=[MEMBER_MARK, FINISHED_MARK], a=[MEMBER_MARK, FINISHED_MARK]))

    assert (None, ("a", "b")) == (group.size, group.members)
    assert not group.is_full


def test_a_group_is_full_when_all_its_own_members_are_finished():
    members = {"size": 2, "members": ["a", "b"]}

    assert read_group(stored(**members), marks(a=[FINISHED_MARK], b=[FINISHED_MARK])).is_full
    assert not read_group(stored(**members), marks(a=[FINISHED_MARK], c=[FINISHED_MARK])).is_full


def test_after_its_lease_expired_a_claimed_group_is_complete():
    group = read_group(stored(status="claimed", lease_ms=100))

    assert ["claimed", "complete"] == [group.status_at(99), group.status_at(100)]
    assert "done" == read_group(stored(status="done", lease_ms=100)).status_at(1000)
