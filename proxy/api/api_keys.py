"""Keys: who may call models, who may control, and keys minted for one rollout.

Holds hashes of configured keys and the minting of a rollout's own key; never a key in clear. A minted key is a proof, not
a record: an HMAC over the rollout's id and incarnation under the store's secret. So the same rollout always gives the same
key, every replica can check it, nothing about it is stored, and deleting the rollout ends it. The key of a dispatch is
another HMAC, over the dispatch as well: a rollout server can report a result with it, and an agent cannot with its own.

Rule 1: keys are compared in constant time, by hash.
Rule 2: a minted key names its rollout; anything else it asks for is refused.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

MINTED_PREFIX = "tt-"


@dataclass(frozen=True, slots=True)
class MintedKey:
    """What a minted key claims: its rollout, and the proof still to be checked against the rollout's incarnation."""

    rollout_id: str
    proof: str


class KeyRing:
    """The configured keys of one API."""

    __slots__ = ("_hashes",)

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key) for key in keys)

    def __bool__(self) -> bool:
        """Whether any key is configured; without one, the API is open to whoever reaches it."""
        return bool(self._hashes)

    def __contains__(self, key: str) -> bool:
        """Whether this is one of the keys."""
        hashed = _hash(key)
        found = False
        for known in self._hashes:  # all of them, whichever fits: the time tells nothing
            found |= hmac.compare_digest(known, hashed)
        return found


def mint(rollout_id: str, incarnation: str, secret: bytes, *, dispatch: str | None = None) -> str:
    """Return the key that may call models within this rollout and nothing else.

    `dispatch` is the digest of a dispatch of the rollout: its key may also report the rollout's result.
    """
    name = base64.urlsafe_b64encode(rollout_id.encode()).rstrip(b"=").decode()
    return f"{MINTED_PREFIX}{name}.{_proof(rollout_id, incarnation, secret, dispatch)}"


def read_minted(key: str) -> MintedKey | None:
    """What a key claims, if it has the form of a minted one."""
    name, dot, proof = key.removeprefix(MINTED_PREFIX).partition(".")
    if not key.startswith(MINTED_PREFIX) or not dot:
        return None
    try:
        return MintedKey(base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode(), proof)
    except ValueError:
        return None


def proves(key: MintedKey, incarnation: str, secret: bytes, *, dispatch: str | None = None) -> bool:
    """Whether the key was minted for this life of the rollout, and for this dispatch of it if one is given."""
    expected = _proof(key.rollout_id, incarnation, secret, dispatch).encode()
    return hmac.compare_digest(key.proof.encode("utf-8", "replace"), expected)


def bearer(authorization: str | None) -> str | None:
    """The key of an `Authorization` header, if there is one."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _proof(rollout_id: str, incarnation: str, secret: bytes, dispatch: str | None) -> str:
    parts = [incarnation, rollout_id] if dispatch is None else [incarnation, rollout_id, dispatch]
    message = b"\0".join(part.encode() for part in parts)  # no id has a control character
    return base64.urlsafe_b64encode(hmac.digest(secret, message, "sha256")).rstrip(b"=").decode()
