"""Keys: separate for each name, and in one slot for each rollout."""

from hashlib import sha1

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from storage.redis.keys import CLUSTER_BUCKETS, Layout, decoded_name
from storage.types import DEFAULT_QUEUE

# All characters, including lone surrogates, and short texts of characters with a meaning in keys.
names = st.text(min_size=1, max_size=256) | st.text(st.sampled_from("{}:%a\n/\ud800"), min_size=1, max_size=6)
layouts = st.sampled_from([Layout("tt"), Layout("tt:18"), Layout("a:b", 32), Layout("tt", CLUSTER_BUCKETS)])


def keys_of(bucket):
    """Return all keys of a bucket except those of its rollouts."""
    single = [key for key in vars(bucket).values() if isinstance(key, bytes)]
    assert len(single) == 10
    return [*single, *bucket.cache, *bucket.processes, *bucket.queue_index(), bucket.role("archive")]


@given(layouts, names, names)
def test_no_two_names_share_a_key(layout, first, second):
    """Two rollouts share only the keys of their bucket."""
    own = [set(layout.rollout(name).all[:5]) for name in (first, second)]

    assert (first == second) == bool(own[0] & own[1])


@given(layouts, names)
def test_no_name_reaches_a_common_key(layout, name):
    """No key of a rollout is a key of a bucket or of the store."""
    common = {layout.constants, b"tt:constants"}
    for bucket in layout.buckets:
        common |= {*keys_of(bucket)}

    assert not common & set(layout.rollout(name).all[:5])


@given(layouts, names)
def test_all_keys_of_a_rollout_are_in_one_slot(layout, name):
    """A cluster stores a rollout and the keys of its bucket on one server."""
    bucket = layout.bucket(name)

    assert len({key_slot(key) for key in (*layout.rollout(name).all, *keys_of(bucket))}) == 1


@given(names)
def test_keys_are_plain_ascii(name):
    """Keys have only characters that are safe in protocols, logs and shells, for any name."""
    allowed = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~%:{}")

    assert set(b"".join(Layout("tt").rollout(name).all)) <= allowed


@given(names)
def test_a_member_of_a_listing_decodes_to_its_name(name):
    """The name is unchanged."""
    assert name == decoded_name(Layout("tt").rollout(name).encoded)


@given(layouts, names, names)
def test_each_queue_has_a_key_in_the_slot_of_its_groups(layout, group, queue):
    """The key of the default one has no name."""
    bucket = layout.groups.bucket(group)
    keys = [bucket.queue(), bucket.queue(DEFAULT_QUEUE), bucket.queue(queue)]

    assert keys[0] == keys[1] == layout.groups.bucket(group).prefix.encode() + b"queue"
    assert (queue == DEFAULT_QUEUE) == (keys[0] == keys[2])
    assert (
        len({key_slot(key) for key in (*keys, layout.groups.rollout(group).rollout, layout.rollout(group).rollout)})
        == 1
    )


@pytest.mark.parametrize("count", [16, 32, 64, 128, 256, 512, 1024])
def test_buckets_are_distributed_evenly_over_a_cluster(count):
    """Of N buckets, one is in each N-th part of the slots, for any prefix."""
    slots = sorted(key_slot(bucket.listing) for bucket in Layout("any", count).buckets)

    assert [slot * count // 16_384 for slot in slots] == list(range(count))


@given(layouts, names, names)
def test_a_name_gets_a_tail_so_that_it_is_in_the_bucket_of_another(layout, name, other):
    """Its first characters stay, and a name in the bucket is unchanged."""
    found = layout.in_bucket_of(other, name)

    assert layout.bucket(found) is layout.bucket(other)
    assert name[:-3] == found[:-3]
    assert found == layout.in_bucket_of(other, found)


def test_the_tags_of_a_bucket_never_change():
    """Keys that are stored have them."""
    tags = {count: [bucket.prefix for bucket in Layout("", count).buckets] for count in (16, 256, 1024)}

    assert (tags[16][0], tags[16][-1]) == (":{18}:", ":{ha}:")
    hashes = [sha1("".join(own).encode()).hexdigest()[:16] for own in tags.values()]
    assert hashes == ["2e1ff814ae2c5af4", "fe3356ab50f4d773", "fbd2ed63784c0b4b"]
