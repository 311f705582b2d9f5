"""Requests without a step: health probes, models, count_tokens, recorded responses by id, and the paths on the allow-list."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError
from pydantic import BaseModel, Field

from proxy.api.auth import check_minted
from proxy.api.body import read_body, read_bytes
from proxy.api.context import Context
from proxy.api.failures import RESPONSE_STARTED
from proxy.api.model.call import ModelRequest
from proxy.api.requests import downstream, json_response, query_from
from proxy.config.sections import ProbeSettings
from proxy.errors import BadRequest, EngineDisconnected, EngineError, NotFound
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import Dialect, DialectName
from proxy.protocols.dialects.gemini import is_gemini
from proxy.protocols.dialects.responses import RESPONSES, input_items, response_object
from proxy.protocols.dialects.responses.request import rollout_of, step_of
from proxy.protocols.plan import CHAT, error_dialect_for, read_translated_call
from proxy.protocols.sampling import bound_of, engine_model
from proxy.rollouts.steps import read_step
from proxy.trajectory.step import Step
from proxy.upstream.client import json_of
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from proxy.upstream.context_window import count_prompt, options_for
from proxy.upstream.endpoint import Endpoint, least_loaded
from proxy.upstream.http_client import HttpResponse

_MAX_MODELS: Final = 10_000  # far more than any gateway lists
_LIST_TIMEOUT_S: Final = 5  # of one of several endpoints


async def forward(request: web.Request, context: Context, path: str, body: bytes) -> web.StreamResponse:
    """Forward a request to an engine and stream its response back, unchanged."""
    endpoints = least_loaded(context.upstream.endpoints, path)
    _, mark, query = request.raw_path.partition("?")
    if is_gemini(path, request.headers):
        query = "&".join(field for field in query.split("&") if unquote(field.partition("=")[0]) != "key")
    headers = list(request.headers.items())
    target = path + mark + query
    async with context.upstream.send_to_any(endpoints, request.method, target, headers=headers, body=body) as answer:
        return await _stream_response(request, answer)


async def _stream_response(request: web.Request, answer: HttpResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=downstream(answer.headers.items()))
    request[RESPONSE_STARTED] = True
    await response.prepare(request)
    try:
        async for read in answer.iter_bytes():
            await response.write(read)
        await response.write_eof()
    except ClientConnectionResetError:
        pass  # the client disconnected; the caller closes the engine's connection as well
    return response


async def show_models(call: ModelRequest) -> web.StreamResponse:
    """`GET /v1/models`: the engine's models and their configured aliases, in the format of the client's dialect."""
    request, context, path = call.request, call.context, call.endpoint.rstrip("/")  # vLLM redirects a path with a slash
    aliases = [alias for alias in context.settings.models if not alias.endswith("*")]
    name = path.removeprefix("/v1/models").removeprefix("/")
    if not names_a_model(name):
        raise NotFound(f"Model {name!r} not found.")
    dialect = error_dialect_for(path, request.headers)
    is_unchanged = not aliases or (name and name not in aliases)
    if dialect is None and is_unchanged and not context.upstream.routes_by_model:
        return await forward(request, context, path, b"")
    endpoints = least_loaded(context.upstream.endpoints, path)
    headers = list(request.headers.items())
    async with context.upstream.send_to_any(endpoints, "GET", "/v1/models", headers=headers, body=None) as answer:
        shown = downstream(answer.headers.items())
        if answer.status != 200:
            return await _stream_response(request, answer)
        models = await json_of(answer)
    listed = await models_and_aliases(context, headers, models)
    if name:
        found = find_model(listed, unquote(name), context.settings.models)
        return web.Response(headers=shown, body=orjson.dumps(found if dialect is None else dialect.model(found)))
    body = {**models, "data": listed} if dialect is None else dialect.models(listed)
    return web.Response(headers=shown, body=orjson.dumps(body))


async def models_and_aliases(context: Context, headers: list[tuple[str, str]], models: Any) -> list[dict[str, Any]]:
    """Return the models of an engine's list, or of all engines if calls are routed by model, and the configured aliases."""
    served = await _served(context, headers) if context.upstream.routes_by_model else _models_of(models)
    known = {model["id"]: model for model in served}
    aliases = {alias: known[name] for alias, name in context.settings.models.items() if name in known}
    return served + [
        {**model, "id": alias} for alias, model in aliases.items() if not alias.endswith("*") and alias not in known
    ]


def find_model(listed: list[dict[str, Any]], name: str, aliases: dict[str, str]) -> dict[str, Any]:
    """Return the model with this name. Raises NotFound."""
    found = next((model for model in listed if model["id"] == name), None)
    if found is None and name in aliases and not name.endswith("*"):
        raise NotFound(f"Model {name!r} is an alias of {aliases[name]!r}, which no engine serves.")
    if found is None:
        raise NotFound(f"Model {name!r} not found.")
    return found


async def _served(context: Context, headers: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the models of all endpoints to which calls of them are sent, each once.

    An endpoint that fails or is ejected has none.
    """

    async def of_endpoint(endpoint: Endpoint) -> list[dict[str, Any]]:
        if endpoint.health.is_ejected:
            return []
        try:
            async with (
                asyncio.timeout(_LIST_TIMEOUT_S),
                context.upstream.send_to_any([endpoint], "GET", "/v1/models", headers=headers, body=None) as answer,
            ):
                return _models_of(await json_of(answer)) if answer.status == 200 else []
        except (EngineError, TimeoutError):
            return []

    endpoints = context.upstream.endpoints
    listed: dict[str, dict[str, Any]] = {}
    for endpoint, models in zip(endpoints, await asyncio.gather(*map(of_endpoint, endpoints)), strict=True):
        for model in models:
            if not endpoint.settings.models or endpoint.lists(model["id"]):
                listed.setdefault(model["id"], model)
    return list(listed.values())


def _models_of(listing_of_engine: Any) -> list[dict[str, Any]]:
    """Return the models of an engine's response. Raises EngineDisconnected for an invalid response."""
    models = listing_of_engine.get("data") if isinstance(listing_of_engine, dict) else None
    if not isinstance(models, list) or len(models) > _MAX_MODELS:
        raise EngineDisconnected("The engine's response to GET /v1/models is not a list of models.")
    if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
        raise EngineDisconnected("The engine's response to GET /v1/models has models without an id.")
    return models


def names_a_model(segments: str) -> bool:
    """Return whether the rest of a path, still encoded, stays below `/v1/models`, even if it is decoded several times."""
    name = unquote(segments)
    return name.isprintable() and "%" not in name and not {".", ".."} & set(re.split(r"[/\\]", name))


COUNT: Final = "/v1/messages/count_tokens"
_MESSAGES: Final = "/v1/messages"


async def count_tokens(call: ModelRequest) -> web.Response:
    """`POST /v1/messages/count_tokens`. Raises BadRequest if the engine cannot count tokens."""
    text = await read_bytes(call.request)
    tokens = await tokens_of(
        call.context, _MESSAGES, lambda: {"max_tokens": 1, **read_body(text)}, body_bytes=len(text)
    )
    return json_response({"input_tokens": tokens})


async def tokens_of(context: Context, endpoint: str, read: Callable[[], dict[str, Any]], *, body_bytes: int) -> int:
    """Return the number of prompt tokens of a translated call; `read` returns its body.

    Raises BadRequest if the engine cannot count tokens.
    """
    translated = await off_loop(
        body_bytes, LARGE_BYTES, lambda: read_translated_call(endpoint, read(), context.translation)
    )
    assert translated is not None
    endpoints = await context.upstream.endpoints_for(
        engine_model(translated.body, context.settings.models, context.sampling)
    )
    chosen, *_ = least_loaded(endpoints, COUNT)
    if (fault := await context.upstream.ensure_detected(chosen)) is not None:
        raise fault
    options = await options_for(context.upstream, chosen, translated, context.settings.models)
    chat = await off_loop(body_bytes, LARGE_BYTES, translated.read_for, options)
    counted = await count_prompt(context.upstream, chosen, DIALECTS[CHAT], chat, body_bytes=body_bytes)
    if counted is None:
        raise BadRequest(
            f"Counting the tokens of messages is not supported by {chosen.settings.public_label} ({chosen.kind})."
        )
    return counted.tokens


def unknown_path(method: str, endpoint: str) -> NotFound:
    """Return the error for a path that is not served."""
    return NotFound(
        f"{method} {endpoint} is not supported: it is neither a recorded endpoint nor listed in engines.passthrough."
    )


# Recorded responses by id, which every process that shares the store serves. The key of a rollout gives no access to others.
# Deleting a response hides it from agents; its step is kept for training.

STORED: Final = "/v1/responses/"
_DELETED_MARK: Final = "deleted:"


class _ListItems(BaseModel):
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


async def find_response_step(context: Context, name: str, owner: str | None, param: str) -> Step:
    """Return the step of a response, which `param` names, in the rollout `owner`. Raises NotFound."""
    step_id = step_of(name)
    step = None if owner is None or step_id is None else await read_step(context.store, owner, step_id)
    is_complete = (
        step is not None and step.dialect == RESPONSES.name and step.status == "complete" and step.response is not None
    )
    if step is None or not is_complete or step.request.get("store") is False:
        raise NotFound(f"Response {name[:200]!r} not found.", param=param)
    return step


async def answer_stored(call: ModelRequest) -> web.Response:
    """`GET` and `DELETE /v1/responses/{id}`, `GET /v1/responses/{id}/input_items`. Raises NotFound."""
    request, context, minted = call.request, call.context, call.caller.minted
    name, _, rest = unquote(call.endpoint.removeprefix(STORED)).partition("/")
    named = call.rollout_id or (minted.rollout_id if minted else None)
    check_minted(minted, rollout_of(name))
    if (request.method, rest) not in {("GET", ""), ("DELETE", ""), ("GET", "input_items")}:
        raise NotFound(
            f"{request.method} {call.endpoint} is not supported; responses can be retrieved, listed and deleted."
        )
    step = await find_response_step(context, name, rollout_of(name) or named, "response_id")
    mark = _DELETED_MARK + step.step_id
    if await context.store.marks(step.rollout_id, [mark]):
        raise NotFound(f"Response {name[:200]!r} was deleted.", param="response_id")
    if request.method == "DELETE":
        stored = await context.store.get(step.rollout_id)
        if stored is not None:
            await context.store.mark(step.rollout_id, stored.incarnation, {mark: b"1"}, now_ms=context.clock.now_ms())
        return json_response({"id": name, "object": "response", "deleted": True})
    return json_response(response_object(step) if rest == "" else _listed(request, step))


def _listed(request: web.Request, step: Step) -> dict[str, Any]:
    """Return a page of the input items of a call, by default the latest first."""
    items = input_items(step)
    asked = query_from(request, _ListItems, takes_others=True)
    if asked.order == "desc":
        items.reverse()
    after, ids = asked.after, [item["id"] for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"Item {after[:200]!r} not found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + asked.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = start + asked.limit < len(items)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


# Health probes: calls that only check whether the server responds

_MAX_BYTES: Final = 512  # a probe's message and fields fit; an agent's prompt is longer


def _user_message(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


# By dialect, the whole body but the model, as these versions send it; docs/http-api.md has the same table.
KNOWN: Final[Mapping[DialectName, tuple[dict[str, Any], ...]]] = {
    "chat": (
        # atroposlib 0.4.0, OpenAIServer and SGLangServer.check_server_status_task: every second
        _user_message("hi", max_tokens=1),
        # verifiers 0.1.9, RLMEnv._test_logprobs_support: once for an environment
        _user_message("hi", max_tokens=1, logprobs=True),
        # litellm 1.106.2, proxy/health_check.py: every 300 s for a model, one of the two
        _user_message("Hey how's it going?", max_tokens=16),
        _user_message("What's 1 + 1?", max_tokens=16),
    ),
    "completions": (
        # atroposlib 0.4.0, the same classes if the environment uses completions or tokens
        {"prompt": "hi", "max_tokens": 1},
    ),
}


def is_probe(
    probes: ProbeSettings, dialect: Dialect, headers: Mapping[str, str], body: Mapping[str, Any], *, body_bytes: int
) -> bool:
    """Return whether a call that names no rollout is a probe: by its user agent, a known body, or a limit of one token."""
    agent = headers.get("User-Agent", "").lower()
    if any(name.lower() in agent for name in probes.user_agents):
        return True
    if body_bytes > _MAX_BYTES:
        return False
    if probes.known and {key: value for key, value in body.items() if key != "model"} in KNOWN.get(dialect.name, ()):
        return True
    if not probes.one_token:
        return False
    bound = bound_of(dialect.sampling(body))
    return type(bound) is int and bound == 1
