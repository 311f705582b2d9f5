"""Frozen rewards: rewards of a rollout cannot be changed while a claim of its group relies on them.

The field `claimed_by` has these claims. It exists as long as there is one, and changes of rewards expect that it is absent. A
claim adds itself before it reads the rewards, and removes only itself if it is undone, so that claims of several policies, and
claims whose lease has expired, do not undo each other's freeze.
"""

from collections.abc import Callable
from typing import TypeAlias

from proxy.clock import Clock
from proxy.rollouts.rollout import ClaimId, Rollout, read_claims, read_rollout, write_claims
from storage.errors import FieldsChanged
from storage.store import Store
from storage.types import StoredEntity

Claims: TypeAlias = tuple[ClaimId, ...]


async def freeze(store: Store, clock: Clock, rollout: Rollout, claim: ClaimId) -> Rollout | None:
    """Freeze the rewards of a rollout for a claim; return it as it is since then, or None if it was deleted."""
    if claim in rollout.claims:
        return rollout

    def with_claim(known: Claims) -> Claims:
        return known if claim in known else (*known, claim)

    stored = await _change(store, clock, rollout.rollout_id, rollout.claims, with_claim)
    return None if stored is None else read_rollout(stored)


async def unfreeze(store: Store, clock: Clock, rollout_id: str, claim: ClaimId) -> None:
    """Remove a claim that is undone. The rewards stay frozen if there are others."""

    def without_claim(known: Claims) -> Claims:
        return tuple(other for other in known if other != claim)

    await _change(store, clock, rollout_id, (claim,), without_claim)


async def supersede(store: Store, clock: Clock, rollout_id: str, known: Claims, claim: ClaimId) -> None:
    """Remove the claims of the policy between the first and this one, so that their number is bounded.

    `known` are the claims of the rollout when it was frozen. Only for a claim that is never undone: others may rely on its
    freeze from now on.
    """

    def without_earlier(known: Claims) -> Claims:
        of_policy = [other for other in known if other.policy == claim.policy]
        earlier = of_policy[1 : of_policy.index(claim)] if claim in of_policy else []
        return tuple(other for other in known if other not in earlier)

    await _change(store, clock, rollout_id, known, without_earlier)


async def _change(
    store: Store, clock: Clock, rollout_id: str, known: Claims, change: Callable[[Claims], Claims]
) -> StoredEntity | None:
    """Change the claims of a rollout; return its last known state."""
    stored: StoredEntity | None = None
    while (claims := change(known)) != known:
        expect, fields = write_claims(known), write_claims(claims)
        try:
            return await store.update_if(rollout_id, fields, expect=expect, now_ms=clock.now_ms())
        except FieldsChanged as changed:
            stored, known = changed.rollout, read_claims(changed.rollout)
    return stored
