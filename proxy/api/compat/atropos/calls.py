"""The calls of agents within a session of Atropos' proxy (296a0bc): `/{uuid}/v1/…`.

Completions, models, streams and concurrent calls, which its proxy lacks, are served as well.
"""

from typing import Final

from aiohttp import web

from proxy.api.adapters import CallRoute
from proxy.api.auth import SESSION_API, Caller, check_minted, identify
from proxy.api.body import read_body, read_bytes
from proxy.api.compat.atropos.engines import rendered
from proxy.api.compat.atropos.session import read_session_chat
from proxy.api.compat.atropos.sessions import session_from, session_route
from proxy.api.compat.call_routes import CALL_ROUTES
from proxy.api.context import CONTEXT
from proxy.api.http import json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.calls import handle_call
from proxy.api.model.unrecorded import show_models
from proxy.api.query import Handler
from proxy.protocols.dialects import DIALECTS
from proxy.rollouts.rollout import Rollout
from proxy.upstream import choose
from proxy.upstream.concurrency import LARGE_BYTES, off_loop

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_CHAT_ROUTE: Final = CallRoute(DIALECTS[_CHAT], (read_session_chat,))


async def render(request: web.Request) -> web.Response:
    """`POST …/chat/completions/render`: the prompt of this call. No step is recorded."""
    rollout, _ = await _admitted(request)
    context = request.app[CONTEXT]
    body = await read_bytes(request)
    chat = await off_loop(
        len(body), LARGE_BYTES, lambda: read_session_chat(_CHAT, read_body(body), context.translation)
    )
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    call = chat.native(context.settings.models, endpoint.kind)
    text, ids = await rendered(context, endpoint, call)
    return json_response({"prompt_text": text, "token_ids": ids, "num_tokens": len(ids)})


async def list_models(request: web.Request) -> web.StreamResponse:
    """`GET …/models`: the same as without a session."""
    rollout, caller = await _admitted(request)
    return await show_models(ModelRequest(request, request.app[CONTEXT], "/v1/models", rollout.rollout_id, caller))


def _call_handler(endpoint: str, route: CallRoute) -> Handler:
    """Return the handler of a session's recorded calls to this endpoint."""

    async def call(request: web.Request) -> web.StreamResponse:
        rollout, caller = await _admitted(request)
        return await handle_call(
            ModelRequest(request, request.app[CONTEXT], endpoint, rollout.rollout_id, caller), route
        )

    return call


async def _admitted(request: web.Request) -> tuple[Rollout, Caller]:
    """Return the session and the caller, if the caller has access to it. Raises Unauthorized, Forbidden or NotFound."""
    caller = await identify(request, request.app[CONTEXT])
    check_minted(caller.minted, request.match_info["uuid"])
    return await session_from(request), caller


_chat = _call_handler(_CHAT, _CHAT_ROUTE)
_completions = _call_handler(_COMPLETIONS, CALL_ROUTES[_COMPLETIONS])
SESSION_CALL_ROUTES: Final = (
    session_route("post", f"{SESSION_API}/chat/completions", _chat, "Make a recorded chat call in a session."),
    session_route("post", f"{SESSION_API}/chat/completions/render", render, "Render the prompt of a chat call."),
    session_route("post", f"{SESSION_API}/completions", _completions, "Make a recorded completions call in a session."),
    session_route("get", f"{SESSION_API}/models", list_models, "List the engine's models."),
)
