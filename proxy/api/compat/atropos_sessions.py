"""Atropos' proxy (296a0bc): routes that create, list and delete sessions, and calls of agents within a session.

A session is a rollout in the store, so every replica serves it: its ID is a UUID, and its metadata contain its terms. Only
configured engines serve it: a request cannot add one, and a URL in a request is never called. Unknown keys of requests are
allowed: Atropos' proxy drops them, TokenTape forwards them. Completions, models, streams and concurrent calls, which Atropos'
proxy lacks, are served as well. Errors in bodies are reported in FastAPI's format.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.api.auth import SESSION_API, Caller, check_minted, identify
from proxy.api.body import FIRST_FAULT, faults_of, read_body, read_bytes
from proxy.api.compat.atropos_generate import with_any_model
from proxy.api.context import CONTEXT, Context
from proxy.api.failures import RESPONSE_STARTED, error_headers, visible_error
from proxy.api.health import healthy_engines
from proxy.api.model.call import ModelRequest
from proxy.api.model.routes import CALLS, CallRoute, handle_call
from proxy.api.model.unrecorded import show_models
from proxy.api.requests import Handler, Route, json_response, route, update_rollout
from proxy.config.addresses import base_url
from proxy.errors import BadRequest, Conflict, EngineError, NotFound, ProxyError, StoreUnavailable, UnprocessableRequest
from proxy.export import FORMATS, Inexpressible
from proxy.export.atropos import IGNORED, NOT_SAMPLED
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import TranslationOptions, is_on
from proxy.protocols.engines.base import read_ids, render_request
from proxy.protocols.plan import CHAT, CallAdapter, Outcome, Plan
from proxy.rollouts.rollout import Rollout, read_rollout, read_rollouts, write_fields
from proxy.rollouts.steps import aside, facts_of, read_steps
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step, is_unlogged
from proxy.upstream.client import body_of, json_of
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from proxy.upstream.endpoint import Endpoint, choose, preferred
from proxy.upstream.tokenizers import detokenize_at_engine
from storage.errors import StorageError


class SchemaFault(UnprocessableRequest):
    """A body that does not match its schema; `detail` is FastAPI's description of the errors."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail))
        self.detail = detail


class ServerNamed(BaseModel):
    """A server of `POST /setup`. Only its URL is used; the rest is configured."""

    base_url: str | None = None


class Setup(BaseModel):
    """`POST /setup`."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str | None = None
    tokenizer_name: str | None = None
    servers: Annotated[list[ServerNamed], FIRST_FAULT] = []


class CreateSession(BaseModel):
    """`POST /sessions/create`."""

    tool_parser: Annotated[str, Field(max_length=256)] = "hermes"  # kept in the metadata of its rollout
    track_tree: bool = False
    base_url: str | None = None


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class SessionCall(BaseModel):
    """`POST /{uuid}/v1/chat/completions`, and its `/render`."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], FIRST_FAULT]
    max_tokens: int | None = 1024
    temperature: float | None = 1.0
    n: int | None = 1
    stop: Annotated[list[str], FIRST_FAULT] | str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None


Read = TypeVar("Read", bound=BaseModel)


def read_as(model: type[Read], body: Mapping[str, Any]) -> Read:
    """Return the body as this model. Raises SchemaFault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise SchemaFault([{**fault, "loc": ["body", *fault["loc"]]} for fault in faults_of(error)]) from None


TERMS: Final = "atropos"  # in the metadata of its rollout
_DEFAULTS: Final = {name: SessionCall.model_fields[name].default for name in ("max_tokens", "temperature", "n")}
# UUIDs of version 8 are application-specific (RFC 9562): sessions are distinguished from other rollouts by their ids alone.
_SESSION_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def session_id(entropy: bytes) -> str:
    """Return the session id made of 16 random bytes."""
    digits = entropy.hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def is_session_id(name: str) -> bool:
    """Return whether a rollout with this id may be a session."""
    return _SESSION_ID.fullmatch(name) is not None


def terms_from(rollout: Rollout) -> Mapping[str, Any] | None:
    """Return the terms that a session was created with; None if the rollout is not a session, or a deleted one."""
    terms = rollout.metadata.get(TERMS) if is_session_id(rollout.rollout_id) else None
    return terms if isinstance(terms, Mapping) and not terms.get("deleted") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChat(CallAdapter):
    """One chat call of a session."""

    returns_logprobs: bool = True  # its nodes do

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the chat call. Most of its clients send no model."""
        return with_any_model(self.body, models)

    def recorded(self, plan: Plan) -> Plan:
        plan = CallAdapter.recorded(self, plan)
        return replace(plan, extra={**plan.extra, "form": "atropos_session"})

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end in the client's format. A stream, which its proxy lacks, is the engine's own."""
        if is_on(self.body.get("stream")):
            return outcome
        response = self.answer(outcome.step)
        if response is not None:
            return replace(outcome, end=response)
        message = f"Completion failed: {_reason(outcome.step)}"
        return replace(outcome, end=error_body(500, message), status=500)

    def answer(self, step: Step) -> bytes | None:
        response = step.response or {}
        choices = response.get("choices")
        if is_on(self.body.get("stream")) or step.status != "complete" or not isinstance(choices, list) or not choices:
            return None
        payload = {
            "id": f"chatcmpl-{blake2b(step.step_id.encode(), digest_size=6).hexdigest()}",
            "object": "chat.completion",
            "created": int(response.get("created") or step.timing.received),
            "model": response.get("model"),
            "choices": [
                {"index": choice["index"], "message": _message(choice), "finish_reason": choice.get("finish_reason")}
                for choice in choices
            ],
        }
        return orjson.dumps(payload)


def read_session_chat(_endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> SessionChat:
    """Parse the body of a chat call. Raises SchemaFault, or BadRequest if it has no messages."""
    call = read_as(SessionCall, body)
    if not call.messages:
        raise BadRequest("messages must not be empty.", param="messages")
    fields = {name: value for name, value in body.items() if value is not None}
    if not fields.get("tools"):
        fields = {name: value for name, value in fields.items() if name not in {"tools", "tool_choice"}}
    messages = [{key: value for key, value in message.items() if value is not None} for message in body["messages"]]
    if "max_completion_tokens" in fields:
        fields = {"max_tokens": fields["max_completion_tokens"], **fields}  # instead of the default of max_tokens
    return SessionChat(request=body, body={**_DEFAULTS, **fields, "messages": messages})


def nodes_from(facts: RolloutFacts, steps: Sequence[Step], *, as_tree: bool) -> list[dict[str, Any]]:
    """Return the nodes of a session without their texts.

    A tree has one node per completion, and masks its whole prompt; otherwise the nodes equal the rows of the `nodes` export.
    """
    options = Options()
    if not as_tree:
        return FORMATS["nodes"].rows(facts, steps, options).rows
    trained = [step for step in steps if step.trainable and options.trains(step)]
    if any(map(is_unlogged, trained)):
        raise Inexpressible(
            "Nodes require the logprob of each sampled token, and none were requested (record.logprobs: off)."
        )
    return [
        {
            "full_text": None,
            "tokens": [*step.prompts[choice.prompt], *choice.ids],
            "masked_tokens": [*[IGNORED] * len(step.prompts[choice.prompt]), *choice.ids],
            "logprobs": [*[NOT_SAMPLED] * len(step.prompts[choice.prompt]), *choice.logprobs],
            "metadata": {"finish_reason": choice.finish_reason},
        }
        for step in trained
        for choice in step.choices
    ]


def error_body(status: int, message: str) -> bytes:
    """Return an error in its format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    more = {name: value for name, value in message.items() if name not in {"role", "content"} and value}
    return {"role": message.get("role") or "assistant", "content": message.get("content"), **more}


def _reason(step: Step) -> str:
    """Return why there is no response: the engine's message if it sent one."""
    text = (step.response or {}).get("body")
    if not isinstance(text, str):
        return step.reason or "the engine returned no response"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or text)


_COUNT_TIMEOUT_S: Final = 2
_MODEL_TIMEOUT_S: Final = 2
_CHAT_ROUTE: Final = CallRoute(DIALECTS[CHAT], read_session_chat)


class NoBaseUrl(ProxyError):
    """A server without a URL; Atropos' proxy responds with 500."""


class NotRendered(BadRequest):
    """A prompt could not be rendered; the message has the reason."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Failed to render prompt: {reason}")


async def show_health(request: web.Request) -> web.Response:
    """`GET /health`: the response of TokenTape with the fields of Atropos' proxy."""
    context = request.app[CONTEXT]
    engines, model, sessions = await asyncio.gather(healthy_engines(context), _model(context), _count_sessions(context))
    healthy = sum(engines.values())
    payload = {
        "status": "ok",
        "model": model,
        "sessions": sessions,
        "servers": len(engines),
        "healthy_servers": healthy,
    }
    return json_response(payload)


async def set_up(request: web.Request) -> web.Response:
    """`POST /setup`: check that the named servers are configured engines. Other servers are never used."""
    context = request.app[CONTEXT]
    text = await read_bytes(request)
    setup = await off_loop(len(text), LARGE_BYTES, lambda: read_as(Setup, read_body(text)))
    for server in setup.servers:
        if server.base_url is None:
            raise NoBaseUrl("base_url is missing in one of the servers")
        _endpoint_named(context, server.base_url)
    model = await _model(context) or setup.model_name
    return json_response({"status": "ok", "servers": len(context.upstream.endpoints), "model_name": model})


async def list_servers(request: web.Request) -> web.Response:
    """`GET /servers`."""
    context = request.app[CONTEXT]
    healthy = await healthy_engines(context)
    servers = [
        {
            "index": index,
            "base_url": endpoint.settings.url,
            "healthy": healthy[endpoint.label],
            "model_name": await _served_model(context, endpoint),
            "server_type": endpoint.kind,
        }
        for index, endpoint in enumerate(context.upstream.endpoints)
    ]
    return json_response({"servers": servers})


async def create_session(request: web.Request) -> web.Response:
    """`POST /sessions/create`: create a rollout. With a `base_url`, its id is one that every replica routes to that engine."""
    context = request.app[CONTEXT]
    text = await read_bytes(request)
    body = await off_loop(len(text), LARGE_BYTES, lambda: read_as(CreateSession, read_body(text or b"{}")))
    engine = None if body.base_url is None else _endpoint_named(context, body.base_url)
    name = session_id(context.clock.entropy(16))
    while engine is not None and preferred(context.upstream.endpoints, name).settings.url != engine.settings.url:
        name = session_id(context.clock.entropy(16))
    model = await _served_model(context, choose(context.upstream.endpoints, name))
    terms = {**body.model_dump(), "model_name": model}
    stored = await context.store.open(name, write_fields({"metadata": {TERMS: terms}}), now_ms=context.clock.now_ms())
    payload = {
        "uuid": name,
        "model_name": model,
        "tool_parser": body.tool_parser,
        "base_url": body.base_url,
        "created_at": stored.created_ms / 1000,
    }
    return json_response(payload)


async def list_sessions(request: web.Request) -> web.Response:
    """`GET /sessions`: all sessions, newest first."""
    context = request.app[CONTEXT]
    sessions = []
    async for name in context.store.names():
        found, _ = read_rollouts([await context.store.get(name)] if is_session_id(name) else [], context.metrics)
        sessions += [
            await _session(context, rollout, terms) for rollout in found if (terms := terms_from(rollout)) is not None
        ]
    return json_response({"sessions": sessions})


async def _session(context: Context, rollout: Rollout, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a session. `num_nodes` is null if its steps cannot be nodes: all others are listed."""
    try:
        count = len(await _nodes(context, rollout, terms))
    except (Conflict, NotFound):
        count = None
    return {
        "uuid": rollout.rollout_id,
        "model_name": terms.get("model_name"),
        "base_url": terms.get("base_url"),
        "created_at": rollout.created_ms / 1000,
        "last_accessed": rollout.touched_ms / 1000,
        "num_nodes": count,
    }


async def show_nodes(request: web.Request) -> web.Response:
    """`GET /{uuid}/nodes`. `full_text` is null unless a tokenizer is configured or the engine detokenizes."""
    context = request.app[CONTEXT]
    rollout = await _session_from(request)
    nodes = await _nodes(context, rollout, terms_from(rollout) or {})
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    texts = await _detokenized(context, endpoint, [node["tokens"] for node in nodes])
    return json_response({"nodes": [{**node, "full_text": text} for node, text in zip(nodes, texts, strict=True)]})


async def delete_session(request: web.Request) -> web.Response:
    """`DELETE /{uuid}`: mark the session as deleted and finish its rollout; an earlier status of it is not changed.

    With `atropos.keep_sessions: false` the rollout and its steps are deleted as well.
    """
    context, rollout = request.app[CONTEXT], await _session_from(request)
    name, is_marked = rollout.rollout_id, False
    if not context.settings.atropos.keep_sessions:
        await context.store.delete(name)
        return json_response({"status": "deleted", "uuid": name})
    if not rollout.is_finished:
        with suppress(Conflict):  # another request has finished it
            rollout = await context.finisher.finish(rollout, "completed")
    with suppress(NotFound):  # deleted meanwhile
        while not is_marked:
            terms = rollout.metadata.get(TERMS)
            deleted = {**(terms if isinstance(terms, Mapping) else {}), "deleted": True}
            fields = write_fields({"metadata": {**rollout.metadata, TERMS: deleted}})
            expect = {"metadata": rollout.origin.fields.get("metadata")}
            is_marked, rollout = await update_rollout(context, rollout, fields, expect)
    return json_response({"status": "deleted", "uuid": name})


async def _count_sessions(context: Context) -> int | None:
    """Return the number of sessions, from their ids alone; None if the store fails or times out."""
    try:
        async with asyncio.timeout(_COUNT_TIMEOUT_S):
            return len([name async for name in context.store.names() if is_session_id(name)])
    except (TimeoutError, StorageError):
        return None


async def _nodes(context: Context, rollout: Rollout, terms: Mapping[str, Any]) -> list[dict[str, Any]]:
    read = await read_steps(context.store, rollout, whole=False)
    steps = [step for step in read if context.policies.exports(None, step.policy)]
    as_tree = bool(terms.get("track_tree"))
    try:
        return await aside(len(steps), lambda: nodes_from(facts_of(rollout), steps, as_tree=as_tree))
    except Inexpressible as error:
        raise Conflict(str(error)) from None


async def render(request: web.Request) -> web.Response:
    """`POST …/chat/completions/render`: the prompt of this call, as the engine renders it. No step is recorded."""
    rollout, _ = await _admitted(request)
    context = request.app[CONTEXT]
    body = await read_bytes(request)
    chat = await off_loop(len(body), LARGE_BYTES, lambda: read_session_chat(CHAT, read_body(body), context.translation))
    endpoint = choose(context.upstream.endpoints, rollout.rollout_id)
    call = chat.native(context.settings.models, endpoint.kind)
    await context.upstream.ensure_detected(endpoint)
    lookup = render_request(endpoint.engine, call, call["messages"])
    if lookup is None:
        raise NotRendered(f"{endpoint.settings.public_label} ({endpoint.kind}) does not support /tokenize for messages")
    try:
        ids = read_ids(await _fetch_json(context, endpoint, "POST", lookup.path, lookup.body))
    except EngineError as fault:
        raise NotRendered(fault.public) from fault
    if ids is None:
        raise NotRendered("The engine's response to POST /tokenize has no token ids")
    (text,) = await _detokenized(context, endpoint, [ids])
    return json_response({"prompt_text": text, "token_ids": ids.tolist(), "num_tokens": len(ids)})


async def call_chat(request: web.Request) -> web.StreamResponse:
    """`POST …/chat/completions`: a recorded call."""
    return await handle_call(await _model_request(request, CHAT), _CHAT_ROUTE)


async def call_completions(request: web.Request) -> web.StreamResponse:
    """`POST …/completions`: a recorded call."""
    endpoint = "/v1/completions"
    return await handle_call(await _model_request(request, endpoint), request.app[CALLS][endpoint])


async def list_models(request: web.Request) -> web.StreamResponse:
    """`GET …/models`: the same as without a session."""
    return await show_models(await _model_request(request, "/v1/models"))


async def _model_request(request: web.Request, endpoint: str) -> ModelRequest:
    rollout, caller = await _admitted(request)
    return ModelRequest(request, request.app[CONTEXT], endpoint, rollout.rollout_id, caller)


async def _admitted(request: web.Request) -> tuple[Rollout, Caller]:
    """Return the session and the caller, if the caller has access to it. Raises Unauthorized, Forbidden or NotFound."""
    caller = await identify(request, request.app[CONTEXT])
    check_minted(caller.minted, request.match_info["uuid"])
    return await _session_from(request), caller


async def _session_from(request: web.Request) -> Rollout:
    name = request.match_info["uuid"]
    stored = await request.app[CONTEXT].store.get(name) if is_session_id(name) else None
    rollout = None if stored is None else read_rollout(stored)
    if rollout is None or terms_from(rollout) is None:
        raise NotFound(f"Session {name} not found")
    return rollout


def _endpoint_named(context: Context, url: str) -> Endpoint:
    """Return the configured engine with this base URL, with or without `/v1` and slashes. Raises NotFound, which lists all."""
    known = {endpoint.settings.url: endpoint for endpoint in context.upstream.endpoints}
    try:
        return known[base_url(url)]
    except (KeyError, ValueError):
        raise NotFound(
            f"No server with base_url {url!r}. Available: {list(known)}. Only configured engines "
            "(engines.endpoints) can be used."
        ) from None


async def _model(context: Context) -> str | None:
    """Return the model of the first engine: Atropos' proxy has one model."""
    return await _served_model(context, context.upstream.endpoints[0]) if context.upstream.endpoints else None


async def _served_model(context: Context, endpoint: Endpoint) -> str | None:
    """Return the model that an engine serves; None if it is unknown."""
    try:
        async with asyncio.timeout(_MODEL_TIMEOUT_S):
            listed = await _fetch_json(context, endpoint, "GET", "/v1/models", None)
        return str(listed["data"][0]["id"])
    except (EngineError, NotRendered, TimeoutError, KeyError, IndexError, TypeError):
        return None


async def _detokenized(context: Context, endpoint: Endpoint, id_lists: Sequence[Sequence[int]]) -> list[str | None]:
    """Return the texts of lists of ids, special tokens included, from the endpoint's tokenizer or else from the engine.

    A text is None if neither is available.
    """
    tokenizer = await context.tokenizers.get(endpoint.label)
    if tokenizer is not None:
        return await asyncio.to_thread(lambda: [tokenizer.decode(ids) for ids in id_lists])
    await context.upstream.ensure_detected(endpoint)
    return list(await asyncio.gather(*(detokenize_at_engine(context.upstream, endpoint, ids) for ids in id_lists)))


async def _fetch_json(context: Context, endpoint: Endpoint, method: str, path: str, body: Any) -> Any:
    """Send a request to an engine and return the JSON of its response.

    Raises EngineError, or NotRendered for a status other than 200.
    """
    headers = () if body is None else (("Content-Type", "application/json"),)
    text = None if body is None else orjson.dumps(body)
    with closing(await context.upstream.send(endpoint, method, path, headers=headers, body=text)) as response:
        if response.status == 200:
            return await json_of(response)
        error = (await body_of(response))[:300].decode("utf-8", "replace")
    raise NotRendered(f"{endpoint.settings.name or 'the engine'} returned status {response.status}: {error}")


def _with_errors(handler: Handler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ProxyError, StorageError) as failure:
            if request.get(RESPONSE_STARTED):
                raise  # a part of the response is already sent
            error = (
                failure if isinstance(failure, ProxyError) else StoreUnavailable(f"The store is unavailable: {failure}")
            )
        if isinstance(error, SchemaFault):
            return json_response({"detail": error.detail}, status=422)
        error = visible_error(request, error)
        body = error_body(error.status, error.message)
        return web.Response(status=error.status, body=body, headers=error_headers(request, error))

    return handle


def _route(method: str, path: str, handler: Handler, summary: str) -> Route:
    statuses = (200, 400, 401, 403, 404, 422, 500, 503)
    return route(method, path, _with_errors(handler), f"{summary} Only with atropos.enabled.", *statuses)


_DELETE: Final = "Delete a session; its rollout is finished and kept (`atropos.keep_sessions`)."
SESSION_ROUTES: Final = (
    _route("post", "/setup", set_up, "Check that the named engines are configured."),
    _route("get", "/servers", list_servers, "List the engines, in the format of Atropos' proxy."),
    _route("post", "/sessions/create", create_session, "Open a session, which is a rollout."),
    _route("get", "/sessions", list_sessions, "List all sessions."),
    _route("get", "/{uuid}/nodes", show_nodes, "List the nodes of a session."),
    _route("delete", "/{uuid}", delete_session, _DELETE),
)
# Of the model API: agents call them.
SESSION_CALL_ROUTES: Final = (
    _route("post", f"{SESSION_API}/chat/completions", call_chat, "Make a recorded chat call in a session."),
    _route("post", f"{SESSION_API}/chat/completions/render", render, "Render the prompt of a chat call."),
    _route("post", f"{SESSION_API}/completions", call_completions, "Make a recorded completions call in a session."),
    _route("get", f"{SESSION_API}/models", list_models, "List the engine's models."),
)
# Served instead of the other `/health`, with the fields of Atropos' proxy.
SESSION_HEALTH: Final = route("get", "/health", _with_errors(show_health), "Check that the process is alive.")
