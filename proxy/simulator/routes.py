"""The routes that both engines have."""

import asyncio
from typing import ClassVar, Final

from aiohttp import web

from proxy.simulator.engine import Engine, json_response, read_body
from proxy.simulator.errors import RequestError
from proxy.simulator.requests import Body, ids_to_detokenize
from proxy.simulator.wire import JsonObject

VERSION: Final = "simulator-0.1"
_HANG_POLL_S: Final = 0.05  # how soon a request that hangs notices that its client has disconnected


class EngineRoutes:
    """The base of an engine's routes.

    `owned_by`: the owner in the model list. `text_key`: the key of the text in the response of `/detokenize`,
    which `skips_special_tokens` by default.
    """

    __slots__ = ("_engine",)

    owned_by: ClassVar[str]
    text_key: ClassVar[str]
    skips_special_tokens: ClassVar[bool] = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def table(self) -> list[web.RouteDef]:
        """Return the routes; a subclass adds its own."""
        return [
            web.post("/detokenize", self.detokenize),
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
        ]

    async def detokenize(self, request: web.Request) -> web.Response:
        """Handle `POST /detokenize`: ids to text."""
        body = await read_body(request)
        ids = ids_to_detokenize(body)
        self._engine.model.check_ids(ids)
        skips = self.skips_special_tokens and body.get("skip_special_tokens", True) is True
        return json_response({self.text_key: self._engine.model.tokenizer.decode(ids, skip_special=skips)})

    async def body_to_tokenize(self, request: web.Request) -> Body:
        """Return the body of a `/tokenize` request, unless the endpoint has a fault."""
        body = await read_body(request)
        fault = self._engine.options.faults.tokenize
        while fault == "hangs" and request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(_HANG_POLL_S)
        if isinstance(fault, int):
            raise RequestError("The tokenizer endpoint has a fault.", status=fault, kind="InternalServerError")
        return body

    async def models(self, request: web.Request) -> web.Response:
        """Handle `GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def health(self, request: web.Request) -> web.Response:
        """Handle `GET /health`."""
        return web.Response()

    def _model_card(self) -> JsonObject:
        options = self._engine.options
        return {
            "id": options.model,
            "object": "model",
            "created": self._engine.started_s,
            "owned_by": self.owned_by,
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
        }
