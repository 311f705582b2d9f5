"""Parsing of IDs, numbers and choices in the paths and queries of the control API."""

from collections.abc import Collection
from typing import Final

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.rollout_id import id_from_path
from proxy.errors import BadRequest
from proxy.rollouts.rollout import Rollout, no_rollout, read_rollout

_GREATEST: Final = 10**12 - 1  # more than any count, index or unix time in seconds, and safe for the store


def rollout_id_from(request: web.Request) -> str:
    """Return the rollout ID of the raw path: routers decode too much or too little."""
    return id_from_path(request.raw_path.partition("?")[0].split("/")[2])


async def rollout_from(request: web.Request) -> Rollout:
    """Return the rollout that the path names. Raises NotFound."""
    name = rollout_id_from(request)
    stored = await request.app[CONTEXT].store.get(name)
    if stored is None:
        raise no_rollout(name)
    return read_rollout(stored)


def int_param(
    request: web.Request, name: str, default: int | None, *, minimum: int, maximum: int = _GREATEST
) -> int | None:
    """Return an integer of the query. Raises BadRequest."""
    text = request.query.get(name)
    if text is None:
        return default
    # Its length first: Python refuses to read a number of thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_GREATEST))
    if not is_number or not minimum <= int(text) <= maximum:
        raise BadRequest(f"{name} must be an integer from {minimum} to {maximum}, not {text[:40]!r}.", param=name)
    return int(text)


def enum_param(request: web.Request, name: str, known: Collection[str], default: str) -> str:
    """Return one of the `known` words of the query. Raises BadRequest, which names them."""
    word = request.query.get(name, default)
    if word not in known:
        raise BadRequest(f"Invalid value {name}={word!r}; use one of {', '.join(known)}.", param=name)
    return word


def reject_unknown_params(request: web.Request, known: Collection[str]) -> None:
    """Raise BadRequest for an unknown query parameter."""
    for name in request.query:
        if name not in known:
            raise BadRequest(f"Unknown query parameter {name!r}; use one of {', '.join(sorted(known))}.", param=name)
