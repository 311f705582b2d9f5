"""Request keys, response statuses and headers that all HTTP modules share; the endpoints that sample, and their adapters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from aiohttp import web

from proxy.protocols.dialects.base import ErrorDialect, TranslationOptions
from proxy.protocols.plan import CallAdapter
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.step import Step
from proxy.upstream.http_client import HOP_BY_HOP, ROLLOUT_HEADER, STEP_HEADER, end_to_end

RESPONSE_STARTED = web.RequestKey(
    "shown", bool
)  # set when the first byte of a response is written: its status is final then
CLIENT_CLOSED_REQUEST = 499  # in the log only, as in nginx
ERROR_DIALECT: Final = web.RequestKey("spoken", ErrorDialect)  # the dialect of a request, set once its path is parsed


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with the value as JSON."""
    return web.Response(status=status, body=to_json_bytes(value), content_type="application/json", headers=headers)


# Headers that TokenTape sets itself, and headers about the engine's own address: addresses behind TokenTape, credentials for
# them, and the permissions that the engine gives to web pages, also to pages of other origins.
_NOT_SHOWN: Final = HOP_BY_HOP | {
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
    "location", "content-location", "refresh", "link", "alt-svc", "via", "x-served-by", "x-backend-server",
    "x-accel-redirect", "x-sendfile",
    "set-cookie", "set-cookie2", "www-authenticate", "authentication-info",
    "timing-allow-origin", "strict-transport-security", "clear-site-data", "service-worker-allowed", "origin-agent-cluster",
    "report-to", "reporting-endpoints", "nel", "sourcemap", "x-sourcemap",
}  # fmt: skip
_NOT_SHOWN_PREFIXES: Final = ("access-control-", "content-security-policy", "cross-origin-")


# Returns the headers of an engine's response that its client gets.
downstream: Final = partial(end_to_end, dropped=_NOT_SHOWN, prefixes=_NOT_SHOWN_PREFIXES)


def adapter_of(adapter: CallAdapter | None, step: Step) -> CallAdapter | None:
    """Return the adapter if it was applied to the call of a step."""
    return None if adapter is None or step.endpoint in adapter.own.values() else adapter


# Reads the body of a call to an endpoint; None if the body has the endpoint's own shape. Raises UnprocessableRequest.
ReadAdapter: TypeAlias = Callable[[str, Mapping[str, Any], TranslationOptions], CallAdapter | None]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """An endpoint that samples: the dialect of its errors, and its adapters, which are tried in order."""

    errors: ErrorDialect
    adapters: tuple[ReadAdapter, ...] = ()

    def read(self, endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> CallAdapter | None:
        """Return the adapter of a body; None if the body has the endpoint's own format. Raises UnprocessableRequest."""
        for read in self.adapters:
            if (adapter := read(endpoint, body, options)) is not None:
                return adapter
        return None
