"""What all HTTP modules share: JSON responses, request keys, statuses."""

from typing import Final

from aiohttp import web

from proxy.protocols.dialects.base import ErrorDialect

RESPONSE_STARTED = web.RequestKey(
    "shown", bool
)  # set once a byte of an answer is written: no other answer can be given then


CLIENT_CLOSED_REQUEST = 499  # in the log only, as nginx has it


ERROR_DIALECT: Final = web.RequestKey("spoken", ErrorDialect)  # the dialect of a request, once its path was read
