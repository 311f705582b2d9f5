"""A group, read from the store's fields and marks."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.rollouts.group import FINISHED_MARK, MEMBER_MARK, STATUSES, read_group, state_fields
from storage.types import StoredEntity


def stored(**fields):
    return StoredEntity("g", "b", 1, 2, {name: orjson.dumps(value) for name, value in fields.items()}, {})


def marks(**members):
    return {kind + name: b"" for name, kinds in members.items() for kind in kinds}


def test_an_opened_group_has_its_rollouts_in_order():
    group = read_group(stored(size=2, members=["z", "a"]), marks(z=[FINISHED_MARK]))

    assert (2, ("z", "a"), {"z"}, "open") == (group.size, group.members, group.finished, group.status_at(0))
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


STATES = st.dictionaries(st.sampled_from(["default", "planner", "a.b"]), st.sampled_from(STATUSES[1:]), min_size=1)


@given(STATES)
def test_a_group_has_the_first_status_that_it_has_for_a_policy(states):
    """In the order open, complete, claimed, done, dropped; a policy that does not have the group has none."""
    written = [state_fields(policy, status=status, lease_ms=5, why=None) for policy, status in states.items()]
    fields = {name: value for own in written for name, value in own.items() if value is not None}
    group = read_group(StoredEntity("g", "b", 1, 2, fields, {}))

    assert next(status for status in STATUSES if status in states.values()) == group.status_at(4)
    assert states == {policy: group.status_for(policy, 4) for policy in states}
    assert (None, False) == (group.status_for("other", 4), group.is_open)


def test_the_state_of_the_default_policy_has_fields_without_a_suffix():
    """As without named policies; an open group has no state, and is open for every policy."""
    assert {"status": b'"done"', "batch_id": None} == state_fields("default", status="done", batch_id=None)
    assert {"status:planner": b'"done"'} == state_fields("planner", status="done")
    assert ("open", "open", True) == (
        read_group(stored(size=1)).status_at(0),
        read_group(stored(size=1)).status_for("planner", 0),
        read_group(stored(size=1)).is_open,
    )
