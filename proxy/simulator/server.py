"""The simulated engine as an aiohttp application.

Holds which shape's routes an engine has, and refusals in that shape; the routes are in `vllm.routes` and
`sglang.routes`.
"""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from proxy.clock import Clock, SystemClock
from proxy.simulator.engine import Engine, as_json
from proxy.simulator.errors import RefusedError
from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.sglang.routes import SglangRoutes
from proxy.simulator.sglang.wire import flat
from proxy.simulator.vllm.routes import VllmRoutes
from proxy.simulator.wire import Answer

_LARGEST_BODY_BYTES: Final = 64 << 20


def make_engine(options: Options, clock: Clock | None = None) -> web.Application:
    """A simulated engine, ready to be served."""
    engine = Engine(options, clock or SystemClock(), load_model())
    if options.shape == "sglang":
        routes, body_of = SglangRoutes(engine).table(), flat
    else:
        routes, body_of = VllmRoutes(engine).table(), _nested
    app = web.Application(middlewares=[_answering_faults(body_of)], client_max_size=_LARGEST_BODY_BYTES)
    app.add_routes(routes)
    return app


def _nested(refusal: RefusedError) -> Answer:
    return refusal.body


def _answering_faults(body_of: Callable[[RefusedError], Answer]) -> Middleware:
    """Refusals, unknown routes and wrong methods in the engine's shapes."""

    @web.middleware
    async def answer_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as refusal:
            return as_json(body_of(refusal), refusal.status)
        except web.HTTPMethodNotAllowed as fault:
            response = as_json({"detail": "Method Not Allowed"}, 405)
            response.headers["Allow"] = ", ".join(sorted(fault.allowed_methods))
            return response
        except web.HTTPException as fault:
            return as_json({"detail": fault.reason}, fault.status)

    return answer_faults
