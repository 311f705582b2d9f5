"""Keys: configured ones, and minted ones."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.api.api_keys import KeyRing, bearer, mint, proves, read_minted

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)


@given(NAMES, st.text("0123456789abcdef", min_size=16, max_size=16))
def test_a_minted_key_proves_its_own_rollout(name, incarnation):
    """And no other life, id or store."""
    key = read_minted(mint(name, incarnation, b"secret"))

    assert name == key.rollout_id
    assert proves(key, incarnation, b"secret")
    assert not proves(key, incarnation + "0", b"secret")
    assert not proves(key, incarnation, b"other")
    assert not proves(
        read_minted(mint(name + "x", incarnation, b"secret")).__class__(name, key.proof + "x"), incarnation, b"secret"
    )


@given(NAMES, st.text(min_size=1, max_size=32))
def test_the_key_of_a_dispatch_proves_that_dispatch(name, dispatch):
    """It is not the rollout's own key, nor that of another dispatch, and neither of them is it."""
    own, dispatched = (read_minted(mint(name, "birth", b"secret", dispatch=one)) for one in (None, dispatch))

    assert name == dispatched.rollout_id
    assert proves(dispatched, "birth", b"secret", dispatch=dispatch)
    assert not proves(dispatched, "birth", b"secret")
    assert not proves(dispatched, "birth", b"secret", dispatch=dispatch + "x")
    assert not proves(own, "birth", b"secret", dispatch=dispatch)


@given(st.text(max_size=40))
def test_any_text_is_read_as_a_key(text):
    """Or as none; a forged one proves nothing."""
    for key in (read_minted(text), read_minted(f"tt-{text}"), read_minted(f"tt-cg.{text}")):
        assert key is None or not proves(key, "birth", b"secret")


def test_a_ring_knows_its_keys_and_shows_none():
    """Only hashes are kept."""
    ring = KeyRing(["one", "two"])

    assert ("one" in ring, "two" in ring, "three" in ring, "\udc80" in ring) == (True, True, False, False)
    assert (bool(ring), bool(KeyRing([]))) == (True, False)
    assert "one" not in str(ring._hashes)


def test_a_bearer_key_is_read_from_its_header():
    """Whatever the scheme's case; another scheme has none."""
    assert ["k", "k", None, None, None] == [
        bearer(text) for text in ("Bearer k", "bearer  k", "Basic k", "Bearer", None)
    ]
