"""Tokens counted for clients, before anything is sampled.

Holds the route of `/v1/messages/count_tokens`. The engine counts, by its own template: it leaves no step.
"""

from typing import Final

import orjson
from aiohttp import web

from proxy.bodies import read_body
from proxy.by_chat import CHAT, read_by_chat
from proxy.dialects import DIALECTS
from proxy.errors import NotValid
from proxy.parts import Parts
from proxy.reading import off_loop
from proxy.systems import for_engine
from proxy.upstream import least_loaded
from proxy.window import count_prompt

COUNT: Final = "/v1/messages/count_tokens"
_MESSAGES: Final = "/v1/messages"


async def count_tokens(parts: Parts, text: bytes) -> web.Response:
    """`POST /v1/messages/count_tokens`. Raises NotValid where the engine cannot count."""
    form = await off_loop(len(text), lambda: read_by_chat(_MESSAGES, {"max_tokens": 1, **read_body(text)}, parts.ways))
    assert form is not None
    endpoint, *_ = least_loaded(parts.upstream.endpoints, COUNT)
    if (fault := await parts.upstream.know(endpoint)) is not None:
        raise fault
    form = await for_engine(parts, endpoint, form, parts.settings.models)
    chat = await off_loop(len(text), form.native, {}, endpoint.kind)
    counted = await count_prompt(parts, endpoint, DIALECTS[CHAT], chat, body_bytes=len(text))
    if counted is None:
        raise NotValid(f"{endpoint.settings.public_label} ({endpoint.kind}) cannot count the tokens of messages")
    return web.Response(body=orjson.dumps({"input_tokens": counted.tokens}), content_type="application/json")
