"""The rollout of a request, from its path, headers, API key and body; the URLs of the model API for a rollout.

A rollout ID is percent-encoded in a path, slashes included, and unencoded in a header or a body.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from aiohttp import web
from yarl import URL

from proxy.api.context import Context
from proxy.config.addresses import split_listen
from proxy.errors import BadRequest
from proxy.rollouts.rollout import checked_id

KEY_PREFIX = "rollout:"
_DOTS = (".", "..")
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - addresses to compare with, not to listen on


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


def path_prefix(rollout_id: str) -> str:
    """Return the path prefix of a rollout. It is empty for the IDs `.` and `..`, which clients resolve as folders."""
    return "" if rollout_id in _DOTS else f"/rollouts/{quote(rollout_id, safe='')}"


def model_url(request: web.Request, context: Context) -> str:
    """Return the base URL of the model API: the configured URL, or else the URL of this request."""
    settings = context.settings
    if settings.agents.url is not None:
        return settings.agents.url
    host = request.host if settings.control.listen is None else model_host(settings.listen, request.url)
    return f"{request.scheme}://{host}"


def model_host(listen: str, request_url: URL) -> str:
    """Return host and port of a model API on a separate port; if it listens on all addresses, the host of the request."""
    host, port = split_listen(listen)
    return f"{request_url.host_subcomponent}:{port}" if host in _ALL_ADDRESSES else listen
