"""Calls that sample: read, admitted and planned here, then sent and recorded by `relay`.

A call that is rejected here is neither sent nor recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import structs

from proxy.api.auth import check_minted
from proxy.api.body import read_body, read_bytes
from proxy.api.context import Context
from proxy.api.http import CLIENT_CLOSED_REQUEST, CallRoute
from proxy.api.memory_limit import check_connection
from proxy.api.model.call import Call, ModelRequest, endpoints_of, model_of, plan_for
from proxy.api.model.playing import answer, name_playback, respond
from proxy.api.model.references import followed_rollout, with_references
from proxy.api.model.relay import relay
from proxy.api.model.unrecorded import forward, is_probe
from proxy.api.rollout_id import KEY_PREFIX, named_rollout
from proxy.clock import new_id
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import Dialect
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.json_texts import LONG_TEXT, LongText, fresh_bytes, read_long
from proxy.protocols.plan import CallAdapter, TranslatedCall, edit
from proxy.protocols.response import TokenAnnotations
from proxy.rollouts.idempotency import COUNT, KEY, Attempt, StoredAnswer, retry_fields
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import read_steps
from proxy.trajectory.json_bytes import size_of
from proxy.trajectory.thread_rules import AGENT_NAME
from proxy.upstream import Endpoint, choose, least_loaded, ranked
from proxy.upstream.concurrency import LARGE_BYTES, in_thread, off_loop
from proxy.upstream.context_window import expected_options
from proxy.upstream.http_client import AGENT_HEADER, GROUP_HEADER, ROLLOUT_HEADER

_MOST_HISTORY: Final = 2**19  # bytes of a history that are counted: so many are processed in threads


async def handle_call(request: ModelRequest, route: CallRoute) -> web.StreamResponse:
    """Receive, admit, plan, relay and record a call; or forward it unrecorded, or replay the response of an earlier attempt."""
    call = await receive(request, route)
    if not isinstance(call, Call):
        return call
    context, headers = call.context, call.request.headers
    if context.served_tapes is not None:
        await name_playback(call, context.served_tapes)
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
            retry = retry_fields(headers[COUNT]) if COUNT in headers else {}
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
    check_connection(request.request)
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
    if not route.adapters:
        return body, None, digest, long
    options = expected_options(request.context.translation, request.context.upstream.endpoints)
    return body, route.read(request.endpoint, body, options), digest, long


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
    followed = followed_rollout(adapter, minted) if isinstance(adapter, TranslatedCall) else None
    return rollout_id or followed


async def _send(call: Call, attempt: Attempt) -> web.StreamResponse:
    """Check the limits of the rollout, then plan the call and relay it."""
    if AGENT_HEADER in call.request.headers:
        attempt = replace(attempt, extra={**attempt.extra, "agent": _agent(call.request.headers[AGENT_HEADER])})
    admission = call.context.admission
    if call.rollout.playback is not None:
        await admission.check(structs.replace(call.rollout, has_reservation=None))  # the tape needs none
        await _resolve(call)
        if (answered := await answer(call, attempt)) is not None:
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
    response = await respond(call, stored, {"X-Idempotent-Replayed": "true"})
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
        adapter = await with_references(context, call.admitted, replace(adapter, received=call.received))
        resolved = adapter.resolved
        history_bytes = size_of((resolved.messages, resolved.items, resolved.calls), _MOST_HISTORY)
        call.body_bytes += history_bytes
        call.work_bytes += history_bytes
    call.adapter = adapter


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
