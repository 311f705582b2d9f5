"""Keys: separate for each name, and in one slot for each rollout."""

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from storage.redis.keys import (
    BUCKETS,
    bucket_for,
    bucket_keys,
    constants_key,
    decoded_name,
    queue_key,
    rollout_keys,
)
from storage.types import DEFAULT_QUEUE

# All characters, including lone surrogates, and short texts of characters with a meaning in keys.
names = st.text(min_size=1, max_size=256) | st.text(st.sampled_from("{}:%a\n/\ud800"), min_size=1, max_size=6)
prefixes = st.sampled_from(["tt", "tt:18", "a:b"])


@given(names, names)
def test_no_two_names_share_a_key(first, second):
    """Two rollouts share only the keys of their bucket."""
    own = [set(rollout_keys("tt", name).all[:5]) for name in (first, second)]

    assert (first == second) == bool(own[0] & own[1])


@given(names)
def test_no_name_reaches_a_common_key(name):
    """No key of a rollout is a listing, an expiry set or the constants."""
    common = {constants_key("tt")}.union(*(bucket_keys("tt", bucket) for bucket in BUCKETS))

    assert not common & set(rollout_keys("tt", name).all[:5])


@given(prefixes, names)
def test_all_keys_of_a_rollout_are_in_one_slot(prefix, name):
    """A cluster stores a rollout and its member of the listing on one server."""
    assert 1 == len({key_slot(key) for key in rollout_keys(prefix, name).all})


@given(names)
def test_keys_are_plain_ascii(name):
    """Keys have only characters that are safe in protocols, logs and shells, for any name."""
    allowed = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~%:{}")

    assert set(b"".join(rollout_keys("tt", name).all)) <= allowed


@given(names, st.integers(0, 10**15 - 1))
def test_a_member_of_a_listing_decodes_to_its_name(name, created_ms):
    """The name is unchanged."""
    assert name == decoded_name(rollout_keys("tt", name).encoded)


@given(names, names)
def test_each_queue_has_a_key_in_the_slot_of_its_groups(group, queue):
    """The key of the default one has no name."""
    bucket = bucket_for(group)
    keys = [queue_key("tt", bucket), queue_key("tt", bucket, DEFAULT_QUEUE), queue_key("tt", bucket, queue)]

    assert keys[0] == keys[1] == f"tt.groups:{{{bucket}}}:queue".encode()
    assert (queue == DEFAULT_QUEUE) == (keys[0] == keys[2])
    assert 1 == len({key_slot(key) for key in (*keys, rollout_keys("tt.groups", group).rollout)})


def test_buckets_are_distributed_evenly_over_a_cluster():
    """Each sixteenth of the slots has one bucket, for any prefix."""
    slots = sorted(key_slot(bucket_keys("any", bucket)[0]) for bucket in BUCKETS)

    assert list(range(16)) == [slot // 1024 for slot in slots]
