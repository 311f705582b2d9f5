"""Configured and minted API keys."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.api.api_keys import KeyRing, mint, proves, read_minted

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)


@given(NAMES, st.text("0123456789abcdef", min_size=16, max_size=16))
def test_a_minted_key_is_valid_for_its_rollout_only(name, incarnation):
    """It is not valid for another incarnation, ID or store."""
    key = read_minted(mint(name, incarnation, b"secret"))

    assert name == key.rollout_id
    assert proves(key, incarnation, b"secret")
    assert not proves(key, incarnation + "0", b"secret")
    assert not proves(key, incarnation, b"other")
    assert not proves(
        read_minted(mint(name + "x", incarnation, b"secret")).__class__(name, key.proof + "x"), incarnation, b"secret"
    )


@given(NAMES, st.text(min_size=1, max_size=32))
def test_the_key_of_a_dispatch_is_valid_for_that_dispatch_only(name, dispatch):
    """It is not valid as the rollout's own key or for another dispatch, and the rollout's own key is not valid for a
    dispatch.
    """
    own, dispatched = (read_minted(mint(name, "incarnation", b"secret", dispatch=key)) for key in (None, dispatch))

    assert name == dispatched.rollout_id
    assert proves(dispatched, "incarnation", b"secret", dispatch=dispatch)
    assert not proves(dispatched, "incarnation", b"secret")
    assert not proves(dispatched, "incarnation", b"secret", dispatch=dispatch + "x")
    assert not proves(own, "incarnation", b"secret", dispatch=dispatch)


@given(st.text(max_size=40))
def test_a_forged_key_is_not_valid(text):
    """Any text is parsed without an exception."""
    for key in (read_minted(text), read_minted(f"tt-{text}"), read_minted(f"tt-cg.{text}")):
        assert key is None or not proves(key, "incarnation", b"secret")


def test_a_key_ring_stores_only_hashes():
    ring = KeyRing(["one", "two"])

    assert ("one" in ring, "two" in ring, "three" in ring, "\udc80" in ring) == (True, True, False, False)
    assert (ring.are_required, KeyRing([]).are_required) == (True, False)
    assert "one" not in str(ring._hashes)
