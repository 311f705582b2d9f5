"""The model face: a call is accepted, that is read, named, let in, guarded and planned. Then `relay` has it.

Holds what happens before anything is sent. Whatever is refused here is refused with nothing recorded and nothing sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from aiohttp import web

from proxy import naming
from proxy.bodies import read_body
from proxy.clientside import Call
from proxy.clock import new_id
from proxy.dialects import DIALECTS, Dialect
from proxy.errors import BadCall, Forbidden, LimitReached, NotFound, StoreFault, TooLarge, Unauthorized
from proxy.guards import GUARDS
from proxy.keys import MintedKey, bearer, proves, read_minted
from proxy.parts import PARTS, Parts
from proxy.passthrough import pass_on, show_models
from proxy.relay import relay
from proxy.rollouts import Rollout, read_rollout, write_fields
from proxy.upstream import Endpoint, choose
from proxy.wire.plan import Terms, make_plan
from storage.store import FieldsChanged, StorageError

DIALECT = web.RequestKey("dialect", Dialect)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the key as it came, and the rollout a minted key proves."""

    key: str | None
    minted: MintedKey | None


async def answer(request: web.Request) -> web.StreamResponse:
    """Every path that is not the control face's comes here."""
    parts = request.app[PARTS]
    raw_path, _, _ = request.raw_path.partition("?")
    target = naming.read_target(raw_path)
    dialect = DIALECTS.get(target.endpoint)
    if dialect is not None:
        request[DIALECT] = dialect
    caller = await identify(request, parts)
    check_minted(caller.minted, target.rollout_id)
    if dialect is not None and request.method == "POST":
        return await answer_dialect(request, parts, target, dialect, caller)
    if request.method == "GET" and (target.endpoint == "/v1/models" or target.endpoint.startswith("/v1/models/")):
        return await show_models(request, parts, target.endpoint)
    if target.endpoint in parts.settings.engines.passthrough:
        return await pass_on(request, parts, target.endpoint, await read_bytes(request))
    raise _unknown(request.method, target.endpoint, known=dialect is not None)


async def answer_dialect(
    request: web.Request, parts: Parts, target: naming.Target, dialect: Dialect, caller: Caller
) -> web.StreamResponse:
    """A call that samples: recorded, unless the configuration lets calls without a rollout pass."""
    received, started = parts.clock.now(), parts.clock.monotonic()
    text = await read_bytes(request)
    body = read_body(text)
    rollout_id = naming.named_rollout(
        path=target.rollout_id,
        header=request.headers.get("X-Rollout-Id"),
        minted=caller.minted.rollout_id if caller.minted else None,
        key=caller.key,
        body=body,
    )
    check_minted(caller.minted, rollout_id)
    if rollout_id is None:
        if parts.settings.agents.unkeyed == "pass":
            return await pass_on(request, parts, target.endpoint, text)
        if parts.settings.agents.unkeyed == "reject":
            raise BadCall(
                "the call names no rollout: use the base URL of one, the header X-Rollout-Id, its API key, or rollout_id "
                "in the body",
                param="rollout_id",
            )
        rollout_id = new_id(parts.clock)
    rollout = await open_rollout(parts, rollout_id, request.headers.get("X-Rollout-Group"))
    await guard(parts, rollout)
    endpoint = choose(parts.upstream.endpoints, rollout_id)
    fault = await parts.upstream.know(endpoint)
    plan = make_plan(
        body,
        terms=terms_of(parts, rollout, endpoint),
        step_id=new_id(parts.clock),
        rollout_id=rollout_id,
        endpoint=target.endpoint,
        dialect=dialect,
        engine=endpoint.engine,
        engine_facts=endpoint.facts,
        logprobs_mode=endpoint.settings.logprobs_mode,
        traits=endpoint.traits,
        headers={name.lower(): value for name, value in request.headers.items()},
        extra={"request_key": _digest(text)},
    )
    return await relay(parts, Call(request, plan, endpoint, rollout.birth, received, started, len(text), fault))


async def identify(request: web.Request, parts: Parts) -> Caller:
    """Who calls. Raises Unauthorized for a missing or wrong key."""
    key = bearer(request.headers.get("Authorization")) or request.headers.get("X-Api-Key")
    minted = read_minted(key) if key else None
    if minted is not None:
        await prove(parts, minted)
    elif parts.agent_keys and (key is None or key not in parts.agent_keys):
        raise Unauthorized("the API key is missing or not one of ours" if key else "an API key is needed")
    return Caller(key, minted)


async def prove(parts: Parts, minted: MintedKey) -> None:
    """Check a minted key against its rollout. Raises Unauthorized."""
    try:
        stored = await parts.store.look(minted.rollout_id)
    except StorageError as error:
        raise StoreFault(f"the store cannot be reached: {error}") from error
    if stored is None or not proves(minted, stored.birth, parts.secret):
        raise Unauthorized("the API key is of no rollout that is there (any more)")


def check_minted(minted: MintedKey | None, rollout_id: str | None) -> None:
    """A minted key is good for its own rollout. Raises Forbidden."""
    if minted is not None and rollout_id not in (None, minted.rollout_id):
        raise Forbidden(f"the API key is of another rollout than {rollout_id!r}")


async def read_bytes(request: web.Request) -> bytes:
    """The body, inflated. Raises TooLarge, or BadCall for one that cannot be inflated."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        most = request.app[PARTS].settings.agents.max_body_bytes
        raise TooLarge(f"the body is longer than {most} bytes (agents.max_body_bytes)") from None
    except web.RequestPayloadError as error:
        coding = request.headers.get("Content-Encoding", "none")
        raise BadCall(f"the body cannot be read (Content-Encoding: {coding}): {error}") from None


async def open_rollout(parts: Parts, rollout_id: str, group_id: str | None) -> Rollout:
    """The rollout of this id, which comes into being with its first call. Raises StoreFault."""
    if group_id is not None:
        naming.checked_id(group_id, what="group id")
    started = parts.clock.monotonic()
    try:
        fields = write_fields({"group_id": group_id})
        return read_rollout(await parts.store.open(rollout_id, fields, now_ms=parts.clock.now_ms()))
    except StorageError as error:
        parts.metrics.store_failures.labels("open").inc()
        raise StoreFault(f"the call could not be recorded, so it was not made: {error}") from error
    finally:
        parts.metrics.store_latency.labels("open").observe(parts.clock.monotonic() - started)


async def guard(parts: Parts, rollout: Rollout) -> None:
    """Pass every guard; a rollout that has reached a limit is marked so."""
    try:
        for check in GUARDS:
            check(rollout, parts.clock.now_ms())
    except LimitReached:
        if rollout.status == "open":
            await _mark_limited(parts, rollout.rollout_id)
        raise


async def _mark_limited(parts: Parts, rollout_id: str) -> None:
    try:
        fields = write_fields({"status": "limited"})
        await parts.store.amend(rollout_id, fields, expect={"status": None}, now_ms=parts.clock.now_ms())
    except FieldsChanged:
        pass  # somebody finished or marked it meanwhile
    except StorageError as error:
        raise StoreFault(f"the store cannot be reached: {error}") from error


def terms_of(parts: Parts, rollout: Rollout, endpoint: Endpoint) -> Terms:
    """The configuration, and the rollout's own terms on top."""
    models: Mapping[str, str] = parts.settings.models
    return Terms(
        sampling=rollout.sampling.over(parts.sampling),
        tools=rollout.tools,
        models={"*": rollout.model} if rollout.model else models,
        keep_reasoning=parts.settings.record.include_reasoning == "override",
        streaming=endpoint.settings.streaming or parts.settings.record.streaming,
    )


def _digest(text: bytes) -> str:
    """A name for a request: equal for equal bytes."""
    return blake2b(text, digest_size=16).hexdigest()


def _unknown(method: str, endpoint: str, *, known: bool) -> BadCall:
    if known:
        return NotFound(f"{endpoint} takes POST, not {method}")
    return NotFound(
        f"{method} {endpoint} is not served here: it is neither recorded nor on the allow-list (engines.passthrough), "
        "and nothing is passed on unrecorded by accident"
    )
