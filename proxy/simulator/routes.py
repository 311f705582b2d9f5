"""The routes that engines of both shapes have in common."""

from typing import Any, ClassVar

from aiohttp import web

from proxy.simulator.engine import Engine, as_json, read_body
from proxy.simulator.requests import ids_to_detokenize

VERSION = "simulator-0.1"


class EngineRoutes:
    """Base of a shape's routes; `owned_by` and `text_key` are the shape's own words."""

    __slots__ = ("_engine",)

    owned_by: ClassVar[str]
    text_key: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def table(self) -> list[web.RouteDef]:
        """Return the common routes; a shape adds its own."""
        return [
            web.post("/detokenize", self.detokenize),
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
        ]

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: the text of ids."""
        ids = ids_to_detokenize(await read_body(request))
        self._engine.model.check_ids(ids)
        return as_json({self.text_key: self._engine.model.tokenizer.decode(ids)})

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return as_json({"object": "list", "data": [self._model_card()]})

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`."""
        return web.Response()

    def _model_card(self) -> dict[str, Any]:
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
