"""The simulated engine as an aiohttp application."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from proxy.clock import Clock, SystemClock
from proxy.simulator.engine import Engine, json_response
from proxy.simulator.errors import RequestError, sglang_body
from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.sglang import SglangRoutes
from proxy.simulator.vllm import VllmRoutes

_MAX_BODY_BYTES: Final = 64 << 20


def make_engine(options: Options, clock: Clock | None = None) -> web.Application:
    """Return the application of a simulated engine.

    Raises ValueError if the chat template or the EOS of the options is invalid.
    """
    model = load_model(
        options.template,
        options.eos,
        options.call_eos,
        options.noncanonical_rate,
        has_images=options.image_tokens > 0,
    )
    engine = Engine(options, clock or SystemClock(), model)
    routes = SglangRoutes(engine) if options.shape == "sglang" else VllmRoutes(engine)
    app = web.Application(middlewares=[_error_middleware(options)], client_max_size=_MAX_BODY_BYTES)
    app.add_routes(routes.table())
    return app


def _error_middleware(options: Options) -> Middleware:
    """Return a middleware that sends errors, unknown routes and wrong methods in the engine's form, and counts requests."""

    @web.middleware
    async def send_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        options.requests[request.path] += 1
        try:
            return await handler(request)
        except RequestError as error:
            return json_response(sglang_body(error) if options.shape == "sglang" else error.body, error.status)
        except web.HTTPMethodNotAllowed as error:
            response = json_response({"detail": "Method Not Allowed"}, 405)
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return response
        except web.HTTPException as error:
            return json_response({"detail": error.reason}, error.status)

    return send_errors
