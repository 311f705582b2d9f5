"""Who calls a model: the key of a call, and the rollout that it proves.

Holds the checks of agents' keys, configured and minted. What a call may do beyond that is `calls`'.
"""

from dataclasses import dataclass

from aiohttp import web

from proxy.errors import Forbidden, StoreFault, Unauthorized
from proxy.keys import MintedKey, bearer, proves, read_minted
from proxy.parts import Parts
from storage.store import StorageError


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the key as it came, and the rollout a minted key proves."""

    key: str | None
    minted: MintedKey | None


async def identify(request: web.Request, parts: Parts) -> Caller:
    """Who calls. Raises Unauthorized for a missing or wrong key."""
    key = bearer(request.headers.get("Authorization")) or request.headers.get("X-Api-Key")
    minted = read_minted(key) if key else None
    if minted is not None:
        await prove(parts, minted)
    elif parts.agent_keys and (key is None or key not in parts.agent_keys):
        raise Unauthorized("the API key is missing or not one of ours" if key else "an API key is needed")
    return Caller(key, minted)


async def prove(parts: Parts, minted: MintedKey) -> None:
    """Check a minted key against its rollout. Raises Unauthorized."""
    try:
        stored = await parts.store.look(minted.rollout_id)
    except StorageError as error:
        raise StoreFault(f"the store cannot be reached: {error}") from error
    if stored is None or not proves(minted, stored.birth, parts.secret):
        raise Unauthorized("the API key is of no rollout that is there (any more)")


def check_minted(minted: MintedKey | None, rollout_id: str | None) -> None:
    """A minted key is good for its own rollout. Raises Forbidden."""
    if minted is not None and rollout_id not in (None, minted.rollout_id):
        raise Forbidden(f"the API key is of another rollout than {rollout_id!r}")
