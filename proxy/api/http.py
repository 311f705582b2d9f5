"""Request keys, response statuses and the JSON response that all HTTP modules share."""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from proxy.protocols.dialects.base import ErrorDialect
from proxy.trajectory.json_bytes import to_json_bytes

RESPONSE_STARTED = web.RequestKey(
    "shown", bool
)  # set when the first byte of a response is written: its status is final then
CLIENT_CLOSED_REQUEST = 499  # in the log only, as in nginx
ERROR_DIALECT: Final = web.RequestKey("spoken", ErrorDialect)  # the dialect of a request, set once its path is parsed


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with the value as JSON."""
    return web.Response(status=status, body=to_json_bytes(value), content_type="application/json", headers=headers)
