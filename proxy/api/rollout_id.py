"""The rollout of a request, from its path, headers, API key and body.

A rollout ID is percent-encoded in a path, slashes included, and unencoded in a header or a body.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.errors import BadRequest
from proxy.rollouts.rollout import checked_id

KEY_PREFIX = "rollout:"


@lru_cache(1024)
def id_from_path(segment: str) -> str:
    """Return the decoded ID of a path segment. Raises BadRequest."""
    try:
        return checked_id(unquote_to_bytes(segment).decode())
    except UnicodeError:
        raise BadRequest(
            f"Invalid rollout id {segment!r}: expected percent-encoded UTF-8.", param="rollout_id"
        ) from None


def named_rollout(
    *, path: str | None, header: str | None, minted: str | None, key: str | None, body: Mapping[str, Any]
) -> str | None:
    """Return the rollout of a call, from the first of these that is present; None if there is none. Raises BadRequest.

    `minted` is the rollout of a minted key, `key` the API key itself (which may be `rollout:<id>`).
    """
    if path is not None:
        return path
    if header is not None:
        return checked_id(header)
    if minted is not None:
        return minted
    if key is not None and key.startswith(KEY_PREFIX):
        return checked_id(key.removeprefix(KEY_PREFIX))
    metadata = body.get("metadata")
    for name in (body.get("rollout_id"), metadata.get("rollout_id") if isinstance(metadata, dict) else None):
        if isinstance(name, str):
            return checked_id(name)
        if name is not None:
            raise BadRequest(f"rollout_id must be a string, not {type(name).__name__}.", param="rollout_id")
    return None
