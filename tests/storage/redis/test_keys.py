"""Keys: no name can touch another's, and all of a rollout's lie in one slot."""

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from storage.redis.keys import BUCKETS, bucket_keys, constants_key, name_from_member, rollout_keys

# Every character, lone surrogates too; short texts of the characters that mean something in keys, most of all.
names = st.text(min_size=1, max_size=256) | st.text(st.sampled_from("{}:%a\n/\ud800"), min_size=1, max_size=6)
prefixes = st.sampled_from(["tt", "tt:18", "a:b"])


@given(names, names)
def test_no_two_names_share_a_key(one, other):
    """Two rollouts share no key but those of their bucket."""
    own = [set(rollout_keys("tt", name).all()[:5]) for name in (one, other)]

    assert (one == other) == bool(own[0] & own[1])


@given(names)
def test_no_name_reaches_a_common_key(name):
    """No rollout's own key is a listing, an expiry or the constants."""
    common = {constants_key("tt")}.union(*(bucket_keys("tt", bucket) for bucket in BUCKETS))

    assert not common & set(rollout_keys("tt", name).all()[:5])


@given(prefixes, names)
def test_all_keys_of_a_rollout_are_in_one_slot(prefix, name):
    """A cluster keeps a rollout and its place in the listing on one server."""
    assert 1 == len({key_slot(key) for key in rollout_keys(prefix, name).all()})


@given(names)
def test_keys_are_plain_ascii(name):
    """Whatever the name, its keys hold nothing that a protocol, a log or a shell could misread."""
    allowed = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~%:{}")

    assert set(b"".join(rollout_keys("tt", name).all())) <= allowed


@given(names, st.integers(0, 10**15 - 1))
def test_a_member_of_a_listing_gives_its_name(name, created_ms):
    """The name comes back whole out of a listing."""
    assert name == name_from_member(f"{created_ms:015}{rollout_keys('tt', name).encoded.decode()}")


def test_buckets_lie_evenly_over_a_cluster():
    """Each sixteenth of a cluster's slots holds one bucket, whatever the prefix."""
    slots = sorted(key_slot(bucket_keys("any", bucket)[0]) for bucket in BUCKETS)

    assert list(range(16)) == [slot // 1024 for slot in slots]
