"""The model API: a call is accepted, that is read, named, let in, guarded and planned. Then `relay` has it.

Holds what happens before anything is sent. Whatever is refused here is refused with nothing recorded and nothing sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api import rollout_id as naming
from proxy.api.adapters import Form, ReadForm
from proxy.api.auth import Caller, check_minted, identify, may_report
from proxy.api.body import read_body
from proxy.api.body_reader import off_loop, read_bytes
from proxy.api.compat.osmosis.callbacks import COMPLETED, complete, naming_retries, with_steps_before, with_tools
from proxy.api.compat.osmosis.schemas import read_result
from proxy.api.compat.registry import dialect_of, read_form
from proxy.api.context import PARTS, Parts
from proxy.api.health import show_health
from proxy.api.http import CLIENT_LEFT, SPOKEN
from proxy.api.model.admission import admitted, guard
from proxy.api.model.call import Call
from proxy.api.model.probes import is_probe
from proxy.api.model.references import followed_rollout, with_earlier
from proxy.api.model.relay import relay
from proxy.api.model.stored_responses import STORED, answer_stored
from proxy.api.model.token_options import read_token_reply
from proxy.api.model.unrecorded import COUNT, count_tokens, pass_on, show_models
from proxy.clock import new_id
from proxy.errors import BadCall, EngineFault, NotFound
from proxy.protocols.dialects import DIALECTS, Dialect
from proxy.protocols.dialects.translation import Ways
from proxy.protocols.plan import Plan, Terms, edit, make_plan
from proxy.protocols.token_annotations import TokenReply
from proxy.protocols.translated_call import ByChat, spoken_at
from proxy.rollouts.idempotency import Attempt, GivenAnswer
from proxy.rollouts.rollout import Rollout
from proxy.upstream import Endpoint, least_loaded, ranked
from proxy.upstream.context_window import room_left
from proxy.upstream.headers import downstream
from proxy.upstream.system_messages import for_engine


@dataclass(frozen=True, slots=True)
class Asked:
    """A call as it was read: its endpoint and dialect, its body, when it came (wall time, then monotonic).

    `digest` is equal for equal bytes of bodies. `tokens` is what the reply has of token ids and texts; `form` is None where
    the body has the dialect's own form; `names_rollout` is false for a call that got a new rollout because it named none.
    """

    endpoint: str
    dialect: Dialect
    digest: str
    body_bytes: int
    body: dict[str, Any]
    received: float
    started: float
    tokens: TokenReply | None = None
    form: Form | None = None
    names_rollout: bool = True


async def answer(request: web.Request) -> web.StreamResponse:
    """Every path that is not the control API's comes here."""
    parts = request.app[PARTS]
    raw_path, _, _ = request.raw_path.partition("?")
    target = naming.read_target(raw_path)
    dialect = dialect_of(target.endpoint)
    if (spoken := dialect or spoken_at(target.endpoint, request.headers)) is not None:
        request[SPOKEN] = spoken
    caller = await identify(request, parts, takes_control_keys=target.endpoint == COMPLETED)
    check_minted(caller.minted, target.rollout_id)
    if dialect is not None and request.method == "POST":
        return await answer_dialect(request, parts, target, caller)
    if target.endpoint.startswith(STORED):
        return await answer_stored(request, parts, target, caller)
    if request.method == "POST" and target.endpoint == COUNT:
        return await count_tokens(parts, await read_bytes(request))
    if request.method == "POST" and target.endpoint == COMPLETED:
        return await take_result(request, parts, target, caller)
    if request.method == "GET" and target.endpoint == "/health":
        return await show_health(request)  # below a rollout's base URL: Atropos' VLLMServer asks there, once a second
    if request.method == "GET" and (target.endpoint == "/v1/models" or target.endpoint.startswith("/v1/models/")):
        return await show_models(request, parts, target.endpoint)
    if target.endpoint in parts.settings.engines.passthrough:
        return await pass_on(request, parts, target.endpoint, await read_bytes(request))
    raise _unknown(request.method, target.endpoint, known=dialect is not None)


async def answer_dialect(
    request: web.Request,
    parts: Parts,
    target: naming.Target,
    caller: Caller,
    read: ReadForm = read_form,
) -> web.StreamResponse:
    """A call that samples: recorded, unless the configuration lets calls without a rollout pass."""
    received, started = parts.clock.now(), parts.clock.monotonic()
    text = await read_bytes(request)
    body_bytes = len(text)
    body, form, digest = await off_loop(body_bytes, _read, text, read, target.endpoint, parts.ways)
    endpoint = target.endpoint if form is None else form.endpoint
    dialect = DIALECTS[endpoint]
    rollout_id = _rollout_named(request, caller, target, body, form)
    probes = parts.settings.agents.probes
    if rollout_id is None and form is None and is_probe(probes, dialect, request.headers, body, body_bytes=body_bytes):
        parts.metrics.health_probes.labels(dialect.name).inc()
        passed = await off_loop(body_bytes, _for_engine, parts, dialect, body)
        return await pass_on(request, parts, target.endpoint, passed)
    if (
        rollout_id is None
        and parts.settings.agents.unnamed_rollouts == "pass"
        and (form is None or isinstance(form, ByChat))
    ):
        return await pass_on(request, parts, target.endpoint, text)
    if rollout_id is None and parts.settings.agents.unnamed_rollouts != "new":
        raise BadCall(
            "the call names no rollout: use the base URL of one, the header X-Rollout-Id, its API key, or rollout_id in the "
            "body",
            param="rollout_id",
        )
    body = body if form is None else form.body
    del text  # it is as long as the body, and no one needs it while the call is made
    is_named = rollout_id is not None
    asked = Asked(endpoint, dialect, digest, body_bytes, body, received, started, form=form, names_rollout=is_named)
    return await _answer_in(request, parts, rollout_id or new_id(parts.clock), asked)


def _read(text: bytes, read: ReadForm, endpoint: str, ways: Ways) -> tuple[dict[str, Any], Form | None, str]:
    """Parse a body, read its form, and compute its digest. Raises BadCall."""
    body = read_body(text)
    return body, read(endpoint, body, ways), blake2b(text, digest_size=16).hexdigest()


def _rollout_named(
    request: web.Request, caller: Caller, target: naming.Target, body: Mapping[str, Any], form: Form | None
) -> str | None:
    """The rollout that a call names, itself or by what it follows. Raises Forbidden if its key is of another one."""
    rollout_id = naming.named_rollout(
        path=target.rollout_id,
        header=request.headers.get("X-Rollout-Id"),
        minted=caller.minted.rollout_id if caller.minted else None,
        key=caller.key,
        body=body,
    )
    check_minted(caller.minted, rollout_id)
    followed = followed_rollout(form, caller.minted) if isinstance(form, ByChat) else None
    return rollout_id or followed


async def _answer_in(request: web.Request, parts: Parts, rollout_id: str, asked: Asked) -> web.StreamResponse:
    """A call of this rollout: made, or answered again."""
    step_id = new_id(parts.clock)
    async with admitted(parts, rollout_id, request.headers.get("X-Rollout-Group"), step_id) as opened:
        rollout = await with_tools(parts, opened)
        if not isinstance(asked.form, ByChat):
            tokens = await read_token_reply(parts, rollout, request.headers, asked.dialect, asked.body)
            asked = replace(asked, tokens=tokens)
        headers = naming_retries(request.headers, rollout, asked.form, asked.digest)
        async with parts.attempts.attempt(rollout, headers, asked.digest, step_id) as attempt:
            if attempt.again is not None:
                return await give_again(request, parts, rollout, asked, attempt.again)
            await guard(parts, rollout)
            await parts.attempts.begin(rollout, attempt)
            return await make_call(request, parts, rollout, asked, attempt)


async def take_result(request: web.Request, parts: Parts, target: naming.Target, caller: Caller) -> web.StreamResponse:
    """A rollout server reports the result of a rollout."""
    text = await read_bytes(request)
    result = await off_loop(len(text), read_result, text)
    rollout_id = target.rollout_id or naming.checked_id(result.rollout_id)
    check_minted(caller.minted, rollout_id)
    if result.rollout_id != rollout_id:
        raise BadCall(
            f"the body reports the result of {result.rollout_id!r}, and the path names {rollout_id!r}",
            param="rollout_id",
        )
    return await complete(parts, rollout_id, result, is_claim=not may_report(caller, parts))


async def give_again(
    request: web.Request, parts: Parts, rollout: Rollout, asked: Asked, again: GivenAnswer
) -> web.StreamResponse:
    """Answer from the store: nothing is asked of the engine and nothing is recorded, but that it was delivered."""
    shown = downstream(
        {"Content-Type": again.content_type, "X-Idempotent-Replayed": "true"},
        rollout_id=rollout.rollout_id,
        step_id=again.step.step_id,
    )
    body = asked.form.answer(again.step) if asked.form is not None else None
    response = web.Response(headers=shown, body=again.body if body is None else body)
    await response.prepare(request)
    try:
        await response.write_eof()
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_LEFT)  # nobody is there to read it
    parts.recorder.delivered(rollout.rollout_id, rollout.incarnation, again.step.step_id)
    parts.metrics.idempotent_replays.labels(again.step.dialect).inc()
    return response


async def make_call(
    request: web.Request, parts: Parts, rollout: Rollout, asked: Asked, attempt: Attempt
) -> web.StreamResponse:
    """Plan a call for the engine of its rollout, and have it relayed."""
    form = None if asked.form is None else await with_steps_before(parts, rollout, asked.form)
    if isinstance(form, ByChat):
        form = await with_earlier(parts, rollout, replace(form, received=asked.received))

    async def plan_for(endpoint: Endpoint, failed: Sequence[Mapping[str, Any]]) -> tuple[Plan, EngineFault | None]:
        extra = {**attempt.extra, "attempts": list(failed)} if failed else attempt.extra
        fault = await parts.upstream.know(endpoint)
        terms = terms_of(parts, rollout, endpoint, asked.tokens)
        if form is not None and form.tells_logprobs:
            terms = replace(terms, logprobs="full")
        body = asked.body
        if form is not None:
            body = await _native(parts, endpoint if fault is None else None, form, terms.models, asked.body_bytes)
        left = await room_left(parts, endpoint, terms, asked.dialect, body, body_bytes=asked.body_bytes)
        plan = await off_loop(
            asked.body_bytes,
            make_plan,
            body,
            terms=terms if left is None else replace(terms, room_left=left),
            step_id=attempt.step_id,
            rollout_id=rollout.rollout_id,
            endpoint=asked.endpoint,
            dialect=asked.dialect,
            engine=endpoint.engine,
            engine_facts=endpoint.facts,
            logprobs_mode=endpoint.settings.logprobs_mode,
            traits=endpoint.known,
            headers={name.lower(): value for name, value in request.headers.items()},
            policy_version=rollout.policy_version,
            extra=extra,
        )
        return plan if form is None else await off_loop(asked.body_bytes, form.recorded, plan), fault

    # Chosen with no wait before its turn, so that calls which come at once are spread. Tokens are told by the tokenizer of
    # the rollout's own endpoint.
    order = ranked if asked.names_rollout or asked.tokens is not None else least_loaded
    endpoint, *others = order(parts.upstream.endpoints, rollout.rollout_id)
    plan, fault = await plan_for(endpoint, ())
    times = (asked.received, asked.started)
    call = Call(request, plan, endpoint, rollout.incarnation, *times, asked.body_bytes, fault, attempt.stored)
    call.reshape = None if form is None else form.reshape
    call.plan_for, call.elsewhere = plan_for, others[: parts.settings.engines.max_attempts - 1]
    parts.places.use(attempt.step_id)
    return await relay(parts, call)


async def _native(
    parts: Parts, endpoint: Endpoint | None, form: Form, models: Mapping[str, str], body_bytes: int
) -> dict[str, Any]:
    """The body of a form for this engine; None: one that cannot be reached."""
    if endpoint is not None and isinstance(form, ByChat):
        form = await for_engine(parts, endpoint, form, models)
    return await off_loop(body_bytes, form.native, models, None if endpoint is None else endpoint.kind)


def terms_of(parts: Parts, rollout: Rollout, endpoint: Endpoint, tokens: TokenReply | None = None) -> Terms:
    """The configuration, and the rollout's own terms on top."""
    models: Mapping[str, str] = parts.settings.models
    return Terms(
        sampling=rollout.sampling.over(parts.sampling),
        tools=rollout.tools,
        models={"*": rollout.model} if rollout.model else models,
        keep_reasoning=parts.settings.record.include_reasoning == "override",
        streaming=endpoint.settings.streaming or parts.settings.record.streaming,
        logprobs=parts.settings.record.logprobs,
        tokens=tokens,
    )


def _for_engine(parts: Parts, dialect: Dialect, body: dict[str, Any]) -> bytes:
    """A body of no rollout, with the engine's own name of the model."""
    fields, unset = edit(body, Terms(models=parts.settings.models), dialect)
    return orjson.dumps({key: value for key, value in body.items() if key not in unset} | fields)


def _unknown(method: str, endpoint: str, *, known: bool) -> BadCall:
    if known:
        return NotFound(f"{endpoint} takes POST, not {method}")
    return NotFound(
        f"{method} {endpoint} is not served here: it is neither recorded nor on the allow-list (engines.passthrough), "
        "and nothing is passed on unrecorded by accident"
    )
