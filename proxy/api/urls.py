"""The URLs at which agents reach the model API, as rollouts and rollout servers receive them."""

from urllib.parse import quote

from aiohttp import web
from yarl import URL

from proxy.api.context import Context
from proxy.config.addresses import split_listen

_DOTS = (".", "..")


_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - addresses to compare with, not to listen on


def prefix_of(rollout_id: str) -> str:
    """The path that names a rollout. Clients take one of dots for a folder, however encoded: its key alone names it."""
    return "" if rollout_id in _DOTS else f"/rollouts/{quote(rollout_id, safe='')}"


def model_url(request: web.Request, context: Context) -> str:
    """The base URL of the model API, as agents reach it: as configured, or as whoever sent this request."""
    settings = context.settings
    if settings.agents.url is not None:
        return settings.agents.url
    host = request.host if settings.control.listen is None else model_host(settings.listen, request.url)
    return f"{request.scheme}://{host}"


def model_host(listen: str, seen: URL) -> str:
    """Host and port of a model API on a port of its own; bound to every address, it is where the request was sent."""
    host, port = split_listen(listen)
    return f"{seen.host_subcomponent}:{port}" if host in _EVERYWHERE else listen
