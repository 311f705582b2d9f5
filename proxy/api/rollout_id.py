"""Names in requests: which rollout a call belongs to, and what its endpoint is.

Holds pure readings of paths, headers and bodies, and the rule of what an id may be. It decides nothing about who may
call: keys are `keys.py`'s.

An id in a path is percent-encoded, slashes too; in a header or a body it stands as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.errors import BadCall
from proxy.rollouts.rollout import checked_id

KEY_PREFIX = "rollout:"
_PREFIXES = ("/rollouts/", "/sessions/")


@dataclass(frozen=True, slots=True)
class RequestPath:
    """Where a call goes: the endpoint as an engine knows it, and the rollout its path names, if any."""

    endpoint: str
    rollout_id: str | None


def id_from_path(segment: str) -> str:
    """The id that a path segment spells. Raises BadCall."""
    try:
        return checked_id(unquote_to_bytes(segment).decode())
    except UnicodeError:
        raise BadCall(f"the rollout id {segment!r} is not percent-encoded UTF-8", param="rollout_id") from None


def parse_path(raw_path: str) -> RequestPath:
    """The endpoint and the rollout that a path names: `/rollouts/{id}/v1/…`, `/sessions/{id}/v1/…` or plain `/v1/…`.

    `raw_path` is the path as it came, still encoded, without its query. Raises BadCall for an id that is none.
    """
    for prefix in _PREFIXES:
        segment, slash, rest = raw_path.removeprefix(prefix).partition("/")
        if raw_path.startswith(prefix) and slash:
            return RequestPath(f"/{rest}", id_from_path(segment))
    return RequestPath(raw_path, None)


def named_rollout(
    *, path: str | None, header: str | None, minted: str | None, key: str | None, body: Mapping[str, Any]
) -> str | None:
    """The rollout a call belongs to, by the first of its namings; None if it names none. Raises BadCall.

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
            raise BadCall(f"rollout_id is a string, not {type(name).__name__}", param="rollout_id")
    return None
