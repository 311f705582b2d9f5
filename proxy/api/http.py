"""What all HTTP modules share: JSON responses, request keys, statuses."""

from typing import Final

from aiohttp import web

from proxy.protocols.dialects.base import Spoken

SHOWN = web.RequestKey("shown", bool)  # set once a byte of an answer is written: no other answer can be given then


CLIENT_LEFT = 499  # in the log only, as nginx has it


SPOKEN: Final = web.RequestKey("spoken", Spoken)  # the dialect of a request, once its path was read
