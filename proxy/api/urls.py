"""The URLs of the model API that are given to agents and rollout servers."""

from urllib.parse import quote

from aiohttp import web
from yarl import URL

from proxy.api.context import Context
from proxy.config.addresses import split_listen

_DOTS = (".", "..")


_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - addresses to compare with, not to listen on


def path_prefix(rollout_id: str) -> str:
    """Return the path prefix of a rollout. It is empty for the IDs `.` and `..`, which clients resolve as folders."""
    return "" if rollout_id in _DOTS else f"/rollouts/{quote(rollout_id, safe='')}"


def model_url(request: web.Request, context: Context) -> str:
    """Return the base URL of the model API: the configured one, or that of this request."""
    settings = context.settings
    if settings.agents.url is not None:
        return settings.agents.url
    host = request.host if settings.control.listen is None else model_host(settings.listen, request.url)
    return f"{request.scheme}://{host}"


def model_host(listen: str, request_url: URL) -> str:
    """Return host and port of a model API on a separate port; if it listens on all addresses, the host of the request."""
    host, port = split_listen(listen)
    return f"{request_url.host_subcomponent}:{port}" if host in _ALL_ADDRESSES else listen
