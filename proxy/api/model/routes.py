"""The routes of the model API, and calls that sample: read, admitted and planned here, then sent and recorded by `relay`.

Every path that is not a route of the control API is handled here. Calls that sample have a `CallRoute`, all others a
`ModelRoute`. Other paths are 404, unless `engines.passthrough` lists them. A call that is rejected here is neither sent nor
recorded.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import orjson
from aiohttp import web
from msgspec import structs

from proxy.api.auth import KEY_PREFIX, check_minted, google_key, identify
from proxy.api.body import read_body, read_bytes
from proxy.api.context import CONTEXT, Context
from proxy.api.failures import CLIENT_CLOSED_REQUEST, ERROR_DIALECT
from proxy.api.health import show_health
from proxy.api.model import playing
from proxy.api.model.call import Call, ModelRequest, endpoints_of, model_of, plan_for
from proxy.api.model.relay import relay
from proxy.api.model.unrecorded import (
    COUNT,
    STORED,
    answer_stored,
    count_tokens,
    find_model,
    find_response_step,
    forward,
    is_probe,
    models_and_aliases,
    show_models,
    tokens_of,
    unknown_path,
)
from proxy.api.requests import id_from_path, json_response
from proxy.clock import new_id
from proxy.errors import BadRequest, NotFound, Overloaded, UnprocessableRequest, UpgradeRequired
from proxy.protocols.dialects import DIALECTS, gemini
from proxy.protocols.dialects.base import Dialect, ErrorDialect, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES, resolve_references
from proxy.protocols.dialects.responses.request import rollout_of, step_of
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.json_texts import LONG_TEXT, LongText, fresh_bytes, read_long
from proxy.protocols.plan import CallAdapter, TranslatedCall, edit, error_dialect_for
from proxy.protocols.response import TokenAnnotations
from proxy.rollouts.admission import Admitted
from proxy.rollouts.idempotency import COUNT as COUNT_HEADER
from proxy.rollouts.idempotency import KEY, Attempt, StoredAnswer, retry_fields
from proxy.rollouts.rollout import Rollout, checked_id
from proxy.rollouts.steps import read_step, read_steps
from proxy.trajectory.json_bytes import size_of
from proxy.trajectory.thread_rules import AGENT_NAME
from proxy.upstream.client import body_of, json_of
from proxy.upstream.concurrency import LARGE_BYTES, in_thread, off_loop
from proxy.upstream.context_window import expected_options
from proxy.upstream.endpoint import Endpoint, choose, least_loaded, ranked
from proxy.upstream.http_client import AGENT_HEADER, GROUP_HEADER, ROLLOUT_HEADER

Handler: TypeAlias = Callable[[ModelRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """An endpoint that samples: the dialect of its errors, and what makes the adapter of a body in another format than its own.

    `adapt` returns None for a body in the endpoint's own format, and raises UnprocessableRequest.
    """

    errors: ErrorDialect
    adapt: Callable[[str, Mapping[str, Any], TranslationOptions], CallAdapter | None] | None = None


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """An endpoint that does not sample: its method (None: any), its handler, and whether control keys may call it."""

    method: str | None
    handle: Handler
    takes_control_keys: bool = False


MODEL_ROUTES: Final[Mapping[str, ModelRoute]] = {
    COUNT: ModelRoute("POST", count_tokens),
    # Of a rollout: Atropos' VLLMServer requests it once a second.
    "/health": ModelRoute("GET", lambda call: show_health(call.request)),
    "/v1/models": ModelRoute("GET", show_models),
}
_ROLLOUTS: Final = ("/rollouts/", "/sessions/")  # before the id of a rollout
_PREFIXES: Final[Mapping[str, ModelRoute]] = {
    STORED: ModelRoute(None, answer_stored),
    "/v1/models/": ModelRoute("GET", show_models),
}
_MOST_HISTORY: Final = 2**19  # bytes of a history that are counted: so many are processed in threads

# What an application serves: the endpoints that sample, and the others.
CALLS = web.AppKey("call_routes", Mapping[str, CallRoute])
OTHERS = web.AppKey("model_routes", Mapping[str, ModelRoute])


async def answer(request: web.Request) -> web.StreamResponse:
    """Handle a request of the model API. Raises ProxyError."""
    app = request.app
    context, call_routes = app[CONTEXT], app[CALLS]
    raw_path, _, _ = request.raw_path.partition("?")
    endpoint, segment = parse_path(raw_path)
    calls, route = call_routes.get(endpoint), None
    if calls is None and gemini.is_gemini(endpoint, request.headers):
        return await _answer_gemini(request, context, endpoint, segment, call_routes)
    errors = calls.errors if calls is not None else error_dialect_for(endpoint, request.headers)
    if errors is not None:
        request[ERROR_DIALECT] = errors
    if calls is None:
        below = (route for prefix, route in _PREFIXES.items() if endpoint.startswith(prefix))
        route = app[OTHERS].get(endpoint) or next(below, None)
    caller = await identify(
        request,
        context,
        takes_control_keys=route is not None and route.takes_control_keys,
        other_key=google_key(request) if errors is gemini.GEMINI else None,
    )
    rollout_id = None if segment is None else id_from_path(segment)
    if caller.minted is not None:
        check_minted(caller.minted, rollout_id)
    call = ModelRequest(request, context, endpoint, rollout_id, caller)
    if calls is not None and request.method == "POST":
        return await handle_call(call, calls)
    if route is not None and route.method in (None, request.method):
        return await route.handle(call)
    if endpoint in context.settings.engines.passthrough:
        return await forward(request, context, endpoint, await read_bytes(request))
    raise (unknown_path(request.method, endpoint) if calls is None else _other_method(request, endpoint))


def parse_path(raw_path: str) -> tuple[str, str | None]:
    """Return the endpoint as engines know it, and the segment of a path that names the rollout, still encoded, if any.

    Paths are `/rollouts/{id}/v1/…`, `/sessions/{id}/v1/…` or `/v1/…`; `raw_path` is encoded and without the query.
    """
    for prefix in _ROLLOUTS:
        if raw_path.startswith(prefix):
            segment, slash, rest = raw_path.removeprefix(prefix).partition("/")
            if slash:
                return f"/{rest}", segment
    return raw_path, None


def _other_method(request: web.Request, endpoint: str) -> BadRequest:
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return UpgradeRequired(f"{endpoint} has no WebSocket; use POST.")
    return NotFound(f"{request.method} {endpoint} is not supported; use POST.")


async def _answer_gemini(
    request: web.Request, context: Context, path: str, segment: str | None, calls: Mapping[str, CallRoute]
) -> web.StreamResponse:
    """Handle a request of the Gemini API; `segment` of its path names the rollout. Raises ProxyError."""
    target, alt = gemini.read_target(path, request.method), gemini.alt_from(request.query)
    is_array = target is not None and target.method == gemini.STREAM and alt != "sse"
    request[ERROR_DIALECT] = gemini.GEMINI_ARRAY if is_array else gemini.GEMINI
    caller = await identify(request, context, other_key=google_key(request))
    rollout_id = None if segment is None else id_from_path(segment)
    check_minted(caller.minted, rollout_id)
    if path in context.settings.engines.passthrough:
        return await forward(request, context, path, await read_bytes(request))
    if target is None:
        raise unknown_path(request.method, path)
    if request.method == "GET":
        return await _show_gemini_models(request, context, target.model)
    if request.method != "POST" or target.method not in gemini.METHODS:
        raise unknown_path(request.method, path)
    gemini.check_alt(alt, target.method)
    if target.method == gemini.COUNT:
        text = await read_bytes(request)
        tokens = await tokens_of(
            context, gemini.GENERATE, lambda: gemini.body_to_count(read_body(text), target), body_bytes=len(text)
        )
        return json_response({"totalTokens": tokens})
    endpoint = gemini.STREAM_ARRAY if is_array else target.method
    call = ModelRequest(request, context, endpoint, rollout_id, caller, gemini.bound_fields(target, alt))
    return await handle_call(call, calls[endpoint])


async def _show_gemini_models(request: web.Request, context: Context, name: str) -> web.Response:
    headers = list(request.headers.items())
    endpoints = least_loaded(context.upstream.endpoints, "/v1/models")
    async with context.upstream.send_to_any(endpoints, "GET", "/v1/models", headers=headers, body=None) as answer:
        if answer.status != 200:
            text = (await body_of(answer)).decode("utf-8", "replace")
            body = gemini.GEMINI.engine_error(answer.status, text)
            return web.Response(status=answer.status, body=body, content_type="application/json")
        models = await json_of(answer)
    listed = await models_and_aliases(context, headers, models)
    if not name:
        return json_response(gemini.GEMINI.models(listed))
    return json_response(gemini.GEMINI.model(find_model(listed, name, context.settings.models)))


async def handle_call(request: ModelRequest, route: CallRoute) -> web.StreamResponse:
    """Receive, admit, plan, relay and record a call; or forward it unrecorded, or replay the response of an earlier attempt."""
    call = await receive(request, route)
    if not isinstance(call, Call):
        return call
    context, headers = call.context, call.request.headers
    if context.served_tapes is not None:
        await playing.name_playback(call, context.served_tapes)
    step_id = new_id(context.clock)
    admitted = call.admitted = await context.admission.admit(
        call.rollout_id, headers.get(GROUP_HEADER), step_id, partial(model_of, call)
    )
    try:
        rollout, call.rollout, call.policy = admitted.rollout, admitted.rollout, admitted.policy
        if call.long is not None:
            admitted.live.text = call.long
        if (rollout.reply or TOKENS in headers or IDS in headers) and not isinstance(call.adapter, TranslatedCall):
            endpoints = await endpoints_of(call)
            call.tokens = await read_token_annotations(context, endpoints, rollout, headers, call.dialect, call.body)
        # A rollout server's clients retry without a key.
        is_retried = rollout.osmosis or (call.adapter is not None and call.adapter.retries_by_body)
        key = headers.get(KEY) or (call.digest if is_retried else None)
        if not key:
            retry = retry_fields(headers[COUNT_HEADER]) if COUNT_HEADER in headers else {}
            return await _send(call, Attempt(step_id, {"request_key": call.digest, **retry}))
        async with context.idempotency_keys.attempt(rollout, key, call.digest, step_id) as attempt:
            if attempt.stored_answer is not None:
                return await replay(call, attempt.stored_answer)
            return await _send(call, attempt)
    finally:
        context.admission.leave(admitted)


async def receive(request: ModelRequest, route: CallRoute) -> Call | web.StreamResponse:
    """Return the call, or the response to a call that is forwarded unrecorded. Raises BadRequest or a subclass."""
    context = request.context
    received, started = context.clock.now(), context.clock.monotonic()
    if limit := getattr(request.request.protocol, "surplus", 0):  # see `server.connections`
        raise Overloaded(
            f"This process has more than {limit} connections (agents.max_connections). Close unused ones, or try again later."
        )
    await context.pacing.turn()
    text = await read_bytes(request.request)
    live = context.rollouts.get(_text_rollout(request)) if len(text) >= LONG_TEXT else None
    before = None if live is None else live.text
    work_bytes = len(text) if before is None else fresh_bytes(text, before)
    read = partial(_read, text, route, request, before)
    body, adapter, digest, long = read() if work_bytes <= LARGE_BYTES else await in_thread(read)
    path = request.endpoint if adapter is None else adapter.endpoint
    dialect = DIALECTS[path]
    rollout_id = request.rollout_id if adapter is None else None
    if rollout_id is None:
        rollout_id = _named_rollout(request, body, adapter)
    if rollout_id is None and (forwarded := await _forward(request, dialect, text, body, adapter)) is not None:
        return forwarded
    return Call(
        context=context,
        request=request.request,
        rollout_id=rollout_id or new_id(context.clock),
        is_named=rollout_id is not None,
        path=path,
        dialect=dialect,
        body=body if adapter is None else adapter.body,
        body_bytes=len(text),
        work_bytes=work_bytes,
        digest=digest,
        received=received,
        started=started,
        adapter=adapter,
        long=long,
    )


async def _forward(
    request: ModelRequest, dialect: Dialect, text: bytes, body: dict[str, Any], adapter: CallAdapter | None
) -> web.StreamResponse | None:
    """Forward a call that names no rollout, if it is a health probe or the configuration requires it. Raises BadRequest."""
    context = request.context
    agents = context.settings.agents
    headers = request.request.headers
    if adapter is None and is_probe(agents.probes, dialect, headers, body, body_bytes=len(text)):
        context.metrics.health_probes.labels(dialect.name).inc()
        passed = await off_loop(len(text), LARGE_BYTES, _with_engine_model, context, dialect, body)
        return await forward(request.request, context, request.endpoint, passed)
    is_served = request.fields is None and (  # by engines
        adapter is None
        or isinstance(adapter, TranslatedCall)
        or all(endpoint.kind in adapter.own for endpoint in context.upstream.endpoints)
    )
    if agents.unnamed_rollouts == "pass" and is_served:
        return await forward(request.request, context, request.endpoint, text)
    if agents.unnamed_rollouts != "new":
        raise BadRequest(
            "The call names no rollout. Use the base URL or the API key of a rollout, the header "
            f"{ROLLOUT_HEADER}, or rollout_id in the request body.",
            param="rollout_id",
        )
    return None


def _text_rollout(request: ModelRequest) -> str:
    """Return the rollout of a call as far as it is known before its body is parsed; empty if nothing names it."""
    caller = request.caller
    minted = None if caller.minted is None else caller.minted.rollout_id
    key = caller.key if caller.key is not None and caller.key.startswith(KEY_PREFIX) else ""
    named = request.rollout_id or request.request.headers.get(ROLLOUT_HEADER) or minted
    return named or key.removeprefix(KEY_PREFIX)


def _read(
    text: bytes, route: CallRoute, request: ModelRequest, before: LongText | None
) -> tuple[dict[str, Any], CallAdapter | None, str, LongText | None]:
    """Parse a body, choose its adapter, and compute its digest. Raises BadRequest, UnprocessableRequest."""
    long = read_long(text, before) if len(text) >= LONG_TEXT else None
    body = read_body(text, None if long is None else long.weight)
    digest = blake2b(text, digest_size=16).hexdigest() if long is None else long.digest
    if request.fields is not None:
        body |= request.fields
        digest = blake2b(digest.encode() + orjson.dumps(request.fields), digest_size=16).hexdigest()
    if route.adapt is None:
        return body, None, digest, long
    options = expected_options(request.context.translation, request.context.upstream.endpoints)
    return body, route.adapt(request.endpoint, body, options), digest, long


def _named_rollout(request: ModelRequest, body: Mapping[str, Any], adapter: CallAdapter | None) -> str | None:
    """Return the rollout that a call names, directly or by the response that it continues.

    Raises Forbidden if the API key was minted for another rollout.
    """
    minted = request.caller.minted
    rollout_id = named_rollout(
        path=request.rollout_id,
        header=request.request.headers.get(ROLLOUT_HEADER),
        minted=minted.rollout_id if minted else None,
        key=request.caller.key,
        body=body,
    )
    check_minted(minted, rollout_id)
    previous = adapter.references.previous_response if isinstance(adapter, TranslatedCall) else None
    followed = None if previous is None else rollout_of(previous)
    check_minted(minted, followed)
    return rollout_id or followed


def named_rollout(
    *, path: str | None, header: str | None, minted: str | None, key: str | None, body: Mapping[str, Any]
) -> str | None:
    """Return the rollout of a call, from the first of these that is present; None if there is none. Raises BadRequest.

    `minted` is the rollout of a minted key, `key` the API key itself (which may be `rollout:<id>`).
    """
    if path is not None:
        return path
    if header is not None:
        return checked_id(header)
    if minted is not None:
        return minted
    if key is not None and key.startswith(KEY_PREFIX):
        return checked_id(key.removeprefix(KEY_PREFIX))
    metadata = body.get("metadata")
    for name in (body.get("rollout_id"), metadata.get("rollout_id") if isinstance(metadata, dict) else None):
        if isinstance(name, str):
            return checked_id(name)
        if name is not None:
            raise BadRequest(f"rollout_id must be a string, not {type(name).__name__}.", param="rollout_id")
    return None


async def _send(call: Call, attempt: Attempt) -> web.StreamResponse:
    """Check the limits of the rollout, then plan the call and relay it."""
    if AGENT_HEADER in call.request.headers:
        attempt = replace(attempt, extra={**attempt.extra, "agent": _agent(call.request.headers[AGENT_HEADER])})
    admission = call.context.admission
    if call.rollout.playback is not None:
        await admission.check(structs.replace(call.rollout, has_reservation=None))  # the tape needs none
        await _resolve(call)
        if (answered := await playing.answer(call, attempt)) is not None:
            return answered
        await admission.sample(call.admitted)
    await admission.check(call.rollout)
    if attempt.marks:
        await call.context.idempotency_keys.begin(call.rollout, attempt)
    call.attempt = attempt
    await _plan(call)
    return await relay(call)


def _agent(name: str) -> str:
    if not AGENT_NAME.fullmatch(name):
        raise BadRequest(
            f"{AGENT_HEADER} must have 1 to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit.",
            param=AGENT_HEADER,
        )
    return name


async def replay(call: Call, stored: StoredAnswer) -> web.StreamResponse:
    """Respond from the store: nothing is sent to an engine, and only the delivery is recorded."""
    context, rollout = call.context, call.rollout
    response = await playing.respond(call, stored, {"X-Idempotent-Replayed": "true"})
    if response is None:
        return web.Response(status=CLIENT_CLOSED_REQUEST)  # the client is gone
    context.recorder.mark_delivered(rollout.rollout_id, rollout.incarnation, stored.step.step_id)
    context.metrics.idempotent_replays.labels(stored.step.dialect).inc()
    return response


async def _resolve(call: Call) -> None:
    """Read what an adapted call refers to. Raises NotFound."""
    context, rollout, adapter = call.context, call.rollout, call.adapter
    if adapter is not None and adapter.needs_steps:
        adapter = adapter.with_steps(await read_steps(context.store, rollout, whole=False))
    if isinstance(adapter, TranslatedCall):
        adapter = await _with_references(context, call.admitted, replace(adapter, received=call.received))
        resolved = adapter.resolved
        history_bytes = size_of((resolved.messages, resolved.items, resolved.calls), _MOST_HISTORY)
        call.body_bytes += history_bytes
        call.work_bytes += history_bytes
    call.adapter = adapter


async def _with_references(context: Context, admitted: Admitted, call: TranslatedCall) -> TranslatedCall:
    """Return the call with the responses, items and tool calls that it refers to. Raises NotFound for an unknown response."""
    rollout, references = admitted.rollout, call.references
    sampled = await context.continuation.sampled_calls(admitted, references.calls)
    previous = references.previous_response
    if not (sampled or references.items or previous is not None):
        return call
    if call.translation.name != RESPONSES.name:
        return replace(call, resolved=ResolvedReferences(calls=sampled))
    before = None
    # A playback has the steps that it repeats: names of its source's responses are theirs.
    owner = (None if rollout.playback is not None else rollout_of(previous)) or rollout.rollout_id
    if previous is not None:
        before = await find_response_step(context, previous, owner, "previous_response_id")
    steps = dict.fromkeys(step for name in references.items if (step := step_of(name)) is not None)
    read = [await read_step(context.store, owner, step_id) for step_id in steps]
    named = [step for step in read if step is not None and step.dialect == RESPONSES.name]
    return replace(call, resolved=resolve_references(before, named, sampled))


async def _plan(call: Call) -> None:
    """Plan a call for the first endpoint of its rollout."""
    context, rollout = call.context, call.rollout
    if call.adapter is not None and rollout.playback is None:  # else it is resolved already
        await _resolve(call)
    endpoints = await endpoints_of(call) if context.upstream.routes_by_model else context.upstream.endpoints
    if call.policy.pause.held:
        endpoints = await _not_held(call, endpoints)
    # There is no await between this choice and the queue, so that concurrent calls are spread over the endpoints. Token texts
    # come from the tokenizer of the rollout's own endpoint.
    order = ranked if call.is_named or call.tokens is not None else least_loaded
    call.left = order(endpoints, rollout.rollout_id)[: context.settings.engines.max_attempts]
    await plan_for(call, call.left.pop(0))


async def _not_held(call: Call, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
    """Return the endpoints that are not held for an update of their weights; wait while all are. Raises Paused."""
    pause, labels = call.policy.pause, [endpoint.label for endpoint in endpoints]
    if pause.held.issuperset(labels):
        await pause.passed(labels=labels)
    return [endpoint for endpoint in endpoints if endpoint.label not in pause.held]


def _with_engine_model(context: Context, dialect: Dialect, body: dict[str, Any]) -> bytes:
    """Return a body without a rollout, with the model's name as the engine has it."""
    fields, unset = edit(body, CallOptions(models=context.settings.models), dialect)
    return orjson.dumps({key: value for key, value in body.items() if key not in unset} | fields)


TOKENS: Final = "X-Reply-Tokens"
IDS: Final = "X-Reply-Ids"
_KNOWN: Final = {TOKENS: "pieces", IDS: "choices"}
_RETURNS_ALL: Final = tuple(kind for kind, engine in ENGINES.items() if engine.returns_prompt_ids)


async def read_token_annotations(
    context: Context,
    endpoints: Sequence[Endpoint],
    rollout: Rollout,
    headers: Mapping[str, str],
    dialect: Dialect,
    body: Mapping[str, Any],
) -> TokenAnnotations | None:
    """Return the token annotations that a call requests, None for none. `endpoints` are those that serve its model.

    Raises UnprocessableRequest if a value is unknown, or the engine or its tokenizer cannot provide the annotations.
    """
    tokens = headers.get(TOKENS) or rollout.reply.get("tokens")
    ids = headers.get(IDS) or rollout.reply.get("ids")
    if tokens is None and ids is None:
        return None
    for header, value in ((TOKENS, tokens), (IDS, ids)):
        if value not in (None, _KNOWN[header]):
            raise UnprocessableRequest(
                f"Invalid {header} {value!r}; the only valid value is {_KNOWN[header]!r}.", param=header
            )
    endpoint = choose(endpoints, rollout.rollout_id)
    fault = await context.upstream.ensure_detected(endpoint)
    if fault is None and endpoint.kind not in _RETURNS_ALL:
        raise UnprocessableRequest(
            f"{TOKENS} and {IDS} require an engine that returns all token ids "
            f"({' or '.join(_RETURNS_ALL)}); {endpoint.settings.public_label} is {endpoint.kind}.",
            param=IDS if tokens is None else TOKENS,
        )
    if tokens is None:
        return TokenAnnotations(ids=True)
    _check_pieces(endpoint, dialect, body)
    tokenizer = await context.tokenizers.get(endpoint.label)
    if tokenizer is None:
        raise UnprocessableRequest(
            f"{TOKENS} requires a tokenizer for {endpoint.settings.public_label}: set "
            "engines.endpoints[].tokenizer, and install transformers.",
            param=TOKENS,
        )
    return TokenAnnotations(tokenizer.pieces, ids=ids is not None)


def _check_pieces(endpoint: Endpoint, dialect: Dialect, body: Mapping[str, Any]) -> None:
    if dialect.name != "chat":
        raise UnprocessableRequest(
            f"{TOKENS} is supported for /v1/chat/completions only, not for {dialect.name}.", param=TOKENS
        )
    if not endpoint.engine.names_alternatives and body.get("top_logprobs"):
        raise UnprocessableRequest(
            f"{TOKENS} with top_logprobs requires vLLM; SGLang returns alternatives as text only.",
            param="top_logprobs",
        )
