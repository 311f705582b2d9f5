"""API keys: the configured keys of both APIs, and keys minted for one rollout.

Configured keys are kept as hashes and compared in constant time. A minted key is an HMAC over the rollout's ID and incarnation
with the store's secret: a rollout always gets the same key, every replica can verify it, nothing is stored, and the key
becomes invalid when the rollout is deleted. The key of a dispatch is an HMAC over the dispatch as well: a rollout server can
report a result with it, an agent cannot with its own key. A minted key is valid for its own rollout only.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.protocols.dialects.responses.request import rollout_id_from_token, rollout_id_to_token

MINTED_PREFIX = "tt-"


@dataclass(frozen=True, slots=True)
class MintedKey:
    """A parsed minted key: its rollout, and the proof, which is verified with the rollout's incarnation."""

    rollout_id: str
    proof: str


class KeyRing:
    """The configured keys of one API."""

    __slots__ = ("_hashes", "are_required")

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(_hash(key) for key in keys)
        self.are_required = bool(self._hashes)  # without a configured key, the API requires none

    def __contains__(self, key: str) -> bool:
        """Return whether this is one of the keys."""
        hashed = _hash(key)
        found = False
        for known in self._hashes:  # always all of them: constant time
            found |= hmac.compare_digest(known, hashed)
        return found


def mint(rollout_id: str, incarnation: str, secret: bytes, *, dispatch: str | None = None) -> str:
    """Return the key that may call models within this rollout and nothing else.

    `dispatch` is the digest of a dispatch of the rollout: its key may also report the rollout's result.
    """
    return f"{MINTED_PREFIX}{rollout_id_to_token(rollout_id)}.{_proof(rollout_id, incarnation, secret, dispatch)}"


def read_minted(key: str) -> MintedKey | None:
    """Parse a minted key; None if the key does not have its form."""
    token, dot, proof = key.removeprefix(MINTED_PREFIX).partition(".")
    rollout_id = rollout_id_from_token(token) if key.startswith(MINTED_PREFIX) and dot else None
    return None if rollout_id is None else MintedKey(rollout_id, proof)


def proves(key: MintedKey, incarnation: str, secret: bytes, *, dispatch: str | None = None) -> bool:
    """Return whether the key was minted for this incarnation of the rollout, and for this dispatch if one is given."""
    expected = _proof(key.rollout_id, incarnation, secret, dispatch).encode()
    return hmac.compare_digest(key.proof.encode("utf-8", "replace"), expected)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _proof(rollout_id: str, incarnation: str, secret: bytes, dispatch: str | None) -> str:
    parts = [incarnation, rollout_id] if dispatch is None else [incarnation, rollout_id, dispatch]
    message = b"\0".join(part.encode() for part in parts)  # no id has a control character
    return base64.urlsafe_b64encode(hmac.digest(secret, message, "sha256")).rstrip(b"=").decode()
