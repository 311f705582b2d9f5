"""The announced policy version."""

import orjson

from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, Policy, read_policy
from storage.types import Announcement


def notices(version, number):
    return {POLICY_ANNOUNCEMENT: Announcement(orjson.dumps(version), number)}


def test_a_version_is_read_from_announcements():
    """It is None if none was announced."""
    assert None is read_policy({})
    assert "7" == read_policy(notices("7", 1))


def test_an_older_announcement_does_not_replace_a_newer_one():
    """Replies of the store may arrive out of order."""
    policy = Policy()
    versions = [policy.version]
    for announcements in ({}, notices("2", 2), notices("1", 1), notices("3", 3), {}):
        policy.apply(announcements)
        versions.append(policy.version)

    assert [None, None, "2", "2", "3", "3"] == versions
