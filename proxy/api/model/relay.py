"""The relay of a call: send it to an engine, stream the response to the client, record the step, end the response.

The end of the response is withheld until the step is recorded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.failures import CLIENT_CLOSED_REQUEST, internal_error
from proxy.api.model import resuming
from proxy.api.model.call import Call, ClientStream, plan_for
from proxy.api.model.telling import tell
from proxy.errors import (
    EngineBusy,
    EngineDisconnected,
    EngineError,
    EngineResponseTooLarge,
    EngineUnreachable,
    Paused,
    ProxyError,
    StoreUnavailable,
    UnprocessableRequest,
)
from proxy.protocols.engines.base import QUIRK_CODES, FollowUpRequest
from proxy.protocols.exchange import Exchange
from proxy.protocols.parts import PartsDiffer
from proxy.protocols.plan import Outcome
from proxy.protocols.response import MALFORMED
from proxy.protocols.whole_response import Withheld
from proxy.telemetry.logs import LOG, is_sampled
from proxy.upstream.concurrency import PLAIN_BYTES, in_thread, off_loop
from proxy.upstream.endpoint import can_fail_over, check_status
from proxy.upstream.http_client import HttpResponse

T = TypeVar("T")

_BYTES_PER_LINE = 128  # parsing this many takes as long as handling one line of a stream
_REJECTED = (400, 404, 422)
_INVALID = (400, 422)  # again, it would have the same status
_WITHOUT_IDS = frozenset({"no_token_ids", "retokenized"})
_END_TIMEOUT_S = 0.2  # after [DONE]; uvicorn writes the end of the body at once
_END_BYTES = 2**16
_ABORT_TIMEOUT_S = 2.0  # SGLang responds after its current step: milliseconds, or the prefill of a long prompt
# vLLM's server may be seconds behind its engine: what it has not sent would be sampled again. A pause waits for longer.
_INTERRUPT_TIMEOUT_S = 8.0


async def relay(call: Call) -> web.StreamResponse:
    """Send a call, stream its response, record its step, and end the response."""
    context, client = call.context, ClientStream(call)
    call.task = asyncio.current_task()
    if context.start_trace is not None:
        call.trace = context.start_trace(call)
    context.metrics.in_flight_calls.inc()
    context.memory_limit.add(call)
    try:
        outcome = await _outcome(call, client)
        call.step = outcome.step
        try:
            step, live = outcome.step, call.admitted.live
            await context.recorder.record(step, live, body_bytes=call.body_bytes, work_bytes=call.work_bytes)
        except StoreUnavailable as fault:
            call.note_fault(fault)
            if not client.headers_sent:
                raise
            return client.cut()  # the response must not look complete: its step is not stored
        call.attempt.stored.set()
        if call.trace is not None:
            call.trace.stored(call)
        return await _end(call, client, outcome)
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_CLOSED_REQUEST)  # the client disconnected
    except (EngineBusy, Paused) as busy:
        client.status = busy.status  # for the metrics and the log; nothing was sent or recorded
        call.note_fault(busy)
        raise
    finally:
        context.metrics.in_flight_calls.dec()
        context.memory_limit.remove(call)
        _report(call, client)


async def _outcome(call: Call, client: ClientStream) -> Outcome:
    """Return the outcome of a call.

    If the client disconnects, or an unexpected exception is raised after the request was sent, what arrived until then is
    recorded as a partial step.
    """
    try:
        outcome = await _answered(call, client)
        adapter = None if call.adapter is None else call.adapter_of(outcome.step)
        return outcome if adapter is None else adapter.reshape(outcome)
    except (asyncio.CancelledError, ClientConnectionResetError):
        if call.sent is not None:  # else it was queued: nothing was sent to an engine
            await _record_cut(call)
        raise
    except Exception as error:
        has_response = call.exchange is not None or call.resumed > 0
        if call.sent is None or (isinstance(error, ProxyError) and not has_response):
            raise
        return await _failed(call, client, error)
    finally:
        call.exchange = None  # frees the parsed response while the step is stored


async def _answered(call: Call, client: ClientStream) -> Outcome:
    """Try one endpoint after the other, until one responds, the client received something, or none is left.

    A call that ends early goes on, if it can.
    """
    while True:
        try:
            if call.moves:
                call.moves = False
                await _move(call)
            if call.fault is not None:
                raise call.fault
            call.is_waiting, plan = False, call.plan
            is_plain = plan.abort is None and plan.framing != "replay" and not call.resumed
            exchange = await (_relayed if is_plain else _wrapped)(call, client)
            if exchange is None:
                call.are_ids_refused = True
                await plan_for(call, call.endpoint, as_ids=False)
            elif not (exchange.response.is_aborted and await _goes_on(call, client, "aborted by the engine")):
                return await _finished(call, exchange)
        except asyncio.CancelledError:
            if (outcome := await _interrupted(call, client)) is not None:
                return outcome
        except EngineError as fault:
            if (outcome := await _faulted(call, client, fault)) is not None:
                return outcome


async def _faulted(call: Call, client: ClientStream, fault: EngineError) -> Outcome | None:
    """Return the outcome of a call after an error of its engine; None if it goes on, or moves to the next endpoint."""
    fault.__traceback__ = None  # `call.fault` and the caller's frame refer to each other
    call.note_fault(fault)
    may_move, is_first = can_fail_over(fault), not (client.body_started or call.resumed)
    if may_move and not (is_first and call.left) and await _goes_on(call, client, fault.message, fault):
        return None
    if client.body_started or not call.left or not may_move:
        return await _broken(call, client, fault)
    _note_failed(call, fault)
    call.moves = True
    return None


async def _wrapped(call: Call, client: ClientStream) -> Exchange | None:
    """Relay a call that its engine can abort by an id, or whose client reads comments meanwhile."""
    relayed = _relayed(call, client)
    if call.plan.abort is not None:
        relayed = _abortable(call, call.plan.abort, relayed)
    if call.plan.framing == "replay" or (call.resumed and client.is_stream):
        relayed = _kept_alive(call, client, relayed)
    return await relayed


async def _goes_on(call: Call, client: ClientStream, why: str, fault: EngineError | None = None) -> bool:
    going = resuming.go_on(call, client, why, fault)
    if client.is_stream or call.plan.framing == "replay":
        going = _kept_alive(call, client, going)
    if await going:
        return True
    if fault is None and call.exchange is not None:
        await _follow_up(call, call.exchange)
    return False


async def _interrupted(call: Call, client: ClientStream) -> Outcome | None:
    """Return the outcome of a cancelled call if its response is complete; None if it was interrupted and goes on.

    Raises CancelledError: the client disconnected, or the call was stopped or cannot go on; Paused if it was queued until then.
    """
    why, call.interrupted = call.interrupted, None
    if why is None or call.task is None or call.task.uncancel():
        raise asyncio.CancelledError
    call.is_waiting = True  # so that the next beat of the pause does not cancel what follows
    exchange = call.exchange
    try:
        if exchange is not None and exchange.is_complete:
            await _follow_up(call, exchange)
        if (exchange is None or not exchange.is_complete) and await _goes_on(call, client, why):
            return None
        if exchange is not None and exchange.is_complete:
            return await _finished(call, exchange)
    except EngineError as fault:
        return await _faulted(call, client, fault)
    if call.sent is None:  # it was queued: its client can send it again
        timeout_s = call.context.settings.agents.resume_timeout_s
        raise Paused(f"Calls are paused, and the call was not sent within {timeout_s:g} s (agents.resume_timeout_s).")
    call.cut = why
    raise asyncio.CancelledError


async def _finished(call: Call, exchange: Exchange) -> Outcome:
    context, plan = call.context, call.plan
    timing, versions = call.timing(context.clock.now()), call.policy.version
    version = versions.at(call.endpoint.label)[0] if versions.is_rolling else versions.announced.version
    finish = partial(exchange.finish, timing, version)
    outcome = finish() if call.work_bytes <= PLAIN_BYTES else await in_thread(finish)
    if call.endpoint.engine.hides_ends:
        resuming.note_ends(call, outcome.step)
    if plan.prompt is not None and plan.before is None:
        if "other_prompt" in outcome.step.problems:  # the engine did not use them
            context.continuation.refuse(call.endpoint, plan.rollout_id, "returned_ids")
        elif outcome.step.prompts:
            call.endpoint.continuation_fault.oppose()
    return outcome


async def _record_cut(call: Call) -> None:
    """Record a partial step of a call that was cancelled, with what arrived until then.

    The call was aborted at its engine, or the engine's connection was closed, on which it stops generating.
    """
    exchange = call.exchange or Exchange(call.plan, 0, "")
    abort = partial(
        exchange.abort,
        call.cut or "the client disconnected",
        call.timing(),
        delivered=False,
        policy_version=call.policy.version.at(call.endpoint.label)[0],
        is_aborted=call.is_aborted,
    )
    outcome = abort() if call.body_bytes <= PLAIN_BYTES else await _despite_cancellation(abort)
    call.step = outcome.step
    call.context.recorder.record_detached(call.step, call.admitted.live, body_bytes=call.body_bytes)


async def _relayed(call: Call, client: ClientStream) -> Exchange | None:
    """Send a call once it has a slot, and stream its response; return None if the engine rejects its prompt ids.

    It is then sent as the client sent it. If that succeeds, the ids were the reason.
    """
    context, plan, queue = call.context, call.plan, call.endpoint.queue
    if not queue.acquire_free():
        await _wait_for_slot(call, client)
    try:
        response = await _sent(call)
        try:
            if response.status >= 300:
                check_status(call.endpoint, response.status, is_last=not call.left)
                if plan.view.before is not None:  # the client reads a response with status 200 already
                    error = PartsDiffer if response.status in _INVALID else EngineDisconnected
                    raise error(f"Engine {call.endpoint.label} returned status {response.status} for the rest")
            if plan.prompt is not None and response.status in _REJECTED:
                return None
            if call.are_ids_refused and response.status < 400:
                context.continuation.refuse(call.endpoint, plan.rollout_id, "refused_ids")
            exchange = call.exchange = Exchange(
                plan,
                response.status,
                response.headers.get("Content-Type", ""),
                max_event_bytes=context.settings.engines.max_event_bytes,
                prompt=plan.prompt or call.admitted.live.prompt,
            )
            client.set_head(response.status, response.headers, content_type=exchange.response.content_type)
            await _stream(call, client, exchange, response)
        finally:
            response.close()
    finally:
        queue.release()
    if not exchange.response.is_aborted:
        await _follow_up(call, exchange)
    return exchange


async def _kept_alive(call: Call, client: ClientStream, relayed: Coroutine[Any, Any, T]) -> T:
    """Return the result for a client that reads a stream, with keep-alive comments meanwhile."""
    interval_s = call.context.settings.record.keep_alive_interval_s

    async def keep_alive() -> None:
        with suppress(ClientConnectionResetError):  # the server cancels the call itself
            while True:
                await asyncio.sleep(interval_s)
                await client.keep_alive()

    task = asyncio.get_running_loop().create_task(keep_alive())
    try:
        return await relayed
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _abortable(
    call: Call, abort: FollowUpRequest, relayed: Coroutine[Any, Any, Exchange | None]
) -> Exchange | None:
    """Relay a call; if it is cancelled, abort it at its engine, and receive what the engine sampled until then."""
    before, working = call.sent, asyncio.get_running_loop().create_task(relayed)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        try:
            if call.sent != before and not working.done():  # else it is queued, perhaps after another endpoint failed
                call.is_aborted = not call.interrupted and (call.exchange is None or not call.exchange.response.is_over)
                with suppress(EngineError, TimeoutError):
                    await _abort(call, abort, working)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        raise


async def _abort(call: Call, abort: FollowUpRequest, working: "asyncio.Task[Exchange | None]") -> None:
    """Have the engine abort a call, and wait for the end of its response. Raises EngineError, TimeoutError."""
    headers, body = (("Content-Type", "application/json"),), orjson.dumps(abort.body)
    async with asyncio.timeout(_INTERRUPT_TIMEOUT_S if call.interrupted else _ABORT_TIMEOUT_S):
        sent = await call.context.upstream.send(
            call.endpoint, "POST", abort.path, headers=headers, body=body, is_auxiliary=True
        )
        with closing(sent) as response:
            if response.status == 200:  # a gateway may not have the route
                await asyncio.wait([working])


async def _wait_for_slot(call: Call, client: ClientStream) -> None:
    """Wait for a slot of the call's endpoint.

    Raises:
        EngineBusy: The queue is full or timed out, and the client can still receive the status 429.
        EngineUnreachable: The same, after another endpoint failed or a keep-alive comment was sent.
    """
    if call.trace is not None:
        call.trace.queued(call)
    try:
        await call.context.upstream.wait_for_slot(call.endpoint, call.plan.rollout_id, can_fail_over=bool(call.left))
    except EngineBusy as busy:
        if call.failed or client.only_keepalives_sent:
            public = f"The engine is busy: {busy.message}"
            raise EngineUnreachable(f"Engine {call.endpoint.label} is busy: {busy.message}", public=public) from busy
        raise


async def _sent(call: Call) -> HttpResponse:
    plan = call.plan
    body = orjson.dumps(plan.body) if call.work_bytes <= PLAIN_BYTES else await in_thread(orjson.dumps, plan.body)
    if call.endpoint.label in call.policy.pause.held:  # since it was chosen
        call.interrupt("the weights of its engine change", is_last=True)
        await asyncio.Event().wait()  # until it is cancelled
    call.sent, call.admitted.is_sent = call.context.clock.monotonic(), True
    headers = [*call.request.headers.items(), *plan.headers.items()]
    if call.trace is not None:
        headers = call.trace.sending(call, headers) or headers
    return await call.context.upstream.send(call.endpoint, "POST", plan.endpoint, headers=headers, body=body)


def _note_failed(call: Call, fault: EngineError) -> None:
    label, step_id = call.endpoint.label, call.plan.step_id
    call.are_ids_refused, call.exchange = False, None
    call.context.memory_limit.release(call)
    call.failed.append({"endpoint": label, "fault": fault.message})
    call.context.metrics.failovers.labels(label).inc()
    LOG.warning("Failing over to the next endpoint: %s", fault.message, extra={"fields": {"step_id": step_id}})


async def _move(call: Call) -> None:
    """Plan the call for the next endpoint, which may be of another kind. Raises EngineUnreachable if it cannot serve it."""
    endpoint = call.left.pop(0)
    try:
        await plan_for(call, endpoint)
    except UnprocessableRequest as error:
        raise EngineUnreachable(f"Engine {endpoint.label} cannot serve the call: {error.message}") from error
    call.first_byte = call.last_byte = None  # of the failed endpoint's response


async def _stream(call: Call, client: ClientStream, exchange: Exchange, sent: HttpResponse) -> None:
    """Feed the engine's bytes to the exchange and write what it returns, until the response is complete."""
    context, reads, response = call.context, sent.iter_bytes(), exchange.response
    limit_bytes, is_withheld = context.settings.engines.max_response_bytes, isinstance(response, Withheld)
    try:
        async for read in reads:
            call.last_byte = context.clock.monotonic()
            call.first_byte = call.first_byte or call.last_byte
            context.memory_limit.receive(
                call, read, limit_bytes, is_cumulative=response.is_cumulative, is_withheld=is_withheld
            )
            size = 0
            if not is_withheld:
                lines = read.count(b"\n") + read.count(b"\r")  # each takes as long as a longer text
                size = response.pending + len(read) + _BYTES_PER_LINE * lines
            shown = response.feed(read) if size <= PLAIN_BYTES else await _fed(call, client, response.feed, read)
            if (shown or client.is_stream) and not call.is_aborted:
                await _forward(call, client, shown)
            if response.is_over:
                break
            read = shown = b""  # noqa: PLW2901 - of thousands of open streams, nothing is kept while they wait
        if response.is_over:
            await _read_end(reads, exchange)
    except EngineError:
        if not response.is_over:
            raise
    exchange.is_read = True


async def _fed(call: Call, client: ClientStream, feed: Callable[[bytes], bytes], read: bytes) -> bytes:
    """Feed a long read in a thread. The client of a call that is interrupted meanwhile receives it: the rest lacks it."""
    shown: list[bytes] = []
    try:
        await in_thread(lambda: shown.append(feed(read)))
    except asyncio.CancelledError:
        if call.interrupted and any(shown):
            with suppress(ClientConnectionResetError):  # the server cancels the call itself
                await client.forward(shown[0], 0)
        raise
    return shown[0]


async def _forward(call: Call, client: ClientStream, shown: bytes) -> None:
    """Forward bytes to the client; if it has disconnected, cancel the call, and receive what the engine sampled until then."""
    try:
        await client.forward(shown, call.context.settings.record.keep_alive_interval_s)
    except ClientConnectionResetError:
        if call.plan.abort is None or call.task is None:
            raise
        call.is_aborted = True
        call.task.cancel()


async def _read_end(reads: AsyncIterator[bytes], exchange: Exchange) -> None:
    """Read to the end of the body, so that its connection can be reused; after the timeout the connection is closed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            left = _END_BYTES
            async for read in reads:
                exchange.response.feed(read[:left])  # content after the end is withheld, and recorded as a problem
                left -= len(read)
                if left <= 0:
                    break


async def _missing(call: Call, exchange: Exchange) -> tuple[str | None, FollowUpRequest | None]:
    """Parse a long response, and return what is missing.

    Those of a rollout are parsed one after the other: of calls that arrive together, all but the first one repeat its prompt.
    """
    live, response = call.admitted.live, exchange.response
    async with live.large_work:
        if isinstance(response, Withheld):
            call.work_bytes -= response.repeat(call.plan.prompt or live.prompt)
            weight = await off_loop(call.work_bytes, PLAIN_BYTES, response.weight)
            try:
                call.context.memory_limit.reserve(call, weight, call.context.settings.engines.max_response_bytes)
            except EngineResponseTooLarge:
                exchange.is_read = False  # it is not parsed
                raise
        missing = await off_loop(call.work_bytes, PLAIN_BYTES, exchange.missing)
        live.prompt = response.prompt or call.plan.prompt or live.prompt  # for the next one
    return missing


async def _follow_up(call: Call, exchange: Exchange) -> None:
    """Request from the engine what its response lacks. Without a result, the step has a problem."""
    if exchange.response.forces_usage:
        call.endpoint.forces_usage.show(call.plan.rollout_id, what=True)
    elif call.endpoint.forces_usage.is_open and exchange.response.forces_usage is False:
        call.endpoint.forces_usage.oppose()
    if call.is_told:
        await tell(call, exchange)
    call.work_bytes += call.response_bytes
    if call.work_bytes <= PLAIN_BYTES:
        live = call.admitted.live
        model, request = exchange.missing()
        live.prompt = exchange.response.prompt or call.plan.prompt or live.prompt
    else:
        model, request = await _missing(call, exchange)
    if model is not None:
        exchange.served_models = await call.context.upstream.served_models(call.endpoint, model)
    if request is None:
        return
    body = await off_loop(call.work_bytes, PLAIN_BYTES, orjson.dumps, request.body)
    try:
        _, exchange.follow_up_response = await call.context.upstream.post_json(
            call.endpoint, request.path, body, new_connection=True, is_auxiliary=False
        )
    except EngineError as error:
        LOG.warning("Request to engine %s for %s failed: %s", call.endpoint.label, request.path, error)


async def _despite_cancellation(work: Callable[[], T]) -> T:
    """Run work in a thread, and return its result even if the caller is cancelled meanwhile."""
    working = asyncio.get_running_loop().create_task(asyncio.to_thread(work))
    while not working.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([working])
    return working.result()


async def _failed(call: Call, client: ClientStream, error: Exception) -> Outcome:
    """Return the outcome after an error of TokenTape itself: a partial step with the id of the error, and an error response."""
    plan = call.plan
    fault = internal_error(error, step_id=plan.step_id)
    exchange = call.exchange or Exchange(plan, 0, "")
    fail = partial(exchange.fail, f"internal error {fault.error_id}", call.timing())
    step = fail() if call.body_bytes <= PLAIN_BYTES else await in_thread(fail)
    body = plan.error_dialect.error(fault)
    if not client.headers_sent:
        client.set_head(fault.status, {"Content-Type": "application/json"})
        return Outcome(body, step, broken=False)
    if not client.is_stream:
        return Outcome(b"", step, broken=True)
    try:
        return Outcome(plan.error_events(body), step, broken=False)
    except MALFORMED:  # the renderer of this dialect may be what failed
        return Outcome(b"", step, broken=True)


async def _broken(call: Call, client: ClientStream, fault: EngineError) -> Outcome:
    """Return the outcome after the engine was unreachable or disconnected.

    A client that has received nothing gets an error response. One that has received a part of the response gets its connection
    closed as the engine closed its own, or, in a translated dialect, an error event and the regular end of the stream.
    """
    plan, exchange = call.plan, call.exchange
    LOG.warning("Engine failed: %s", fault.message, extra={"fields": {"step_id": plan.step_id}})
    error = plan.error_dialect.error(fault.for_agents(f"step {plan.step_id}"))
    if exchange is None:
        outcome = _unanswered(call, fault)
    else:
        abort = partial(exchange.abort, fault.message, call.timing(), delivered=True)
        outcome = abort() if call.body_bytes <= PLAIN_BYTES else await in_thread(abort)
    if client.only_keepalives_sent:
        return Outcome(plan.error_events(error), outcome.step, broken=False)
    if client.headers_sent:
        return replace(outcome, broken=plan.translation is None)
    retry = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    client.set_head(fault.status, {"Content-Type": "application/json", **retry})
    return Outcome(error, outcome.step, broken=False)


def _unanswered(call: Call, fault: EngineError) -> Outcome:
    """Return the outcome of a call that no engine answered: its step has the error as an engine's response."""
    exchange = Exchange(call.plan, fault.status, "application/json")
    exchange.response.feed(call.plan.dialect.error(fault))
    return exchange.finish(call.timing())


async def _end(call: Call, client: ClientStream, outcome: Outcome) -> web.StreamResponse:
    """Write the withheld end; if the client has disconnected, mark the step as undelivered."""
    if outcome.status is not None:
        client.status = outcome.status
    is_delivered = False
    try:
        response = await client.end(outcome.end, broken=outcome.broken)
        is_delivered = True
        return response
    finally:
        if not is_delivered:
            call.context.recorder.mark_undelivered(outcome.step, call.rollout.incarnation)


def _report(call: Call, client: ClientStream) -> None:
    """Count the call and log its line: names, counts and durations, never content or keys."""
    if call.trace is not None:
        call.trace.ended(call, client.status)
    context, plan, step = call.context, call.plan, call.step
    metrics, dialect = context.metrics, plan.error_dialect.name
    labels = (dialect, call.endpoint.label, str(client.status))
    total_s = context.clock.monotonic() - call.started
    metrics.calls.labels(*labels).inc()
    metrics.call_duration_seconds.labels(*labels).observe(total_s)
    # A request that causes losses itself (echo, no reasoning) has a problem code of its own, which explains the other codes.
    if step is not None and step.status == "complete" and not (plan.expected - QUIRK_CODES).intersection(step.problems):
        returned = not _WITHOUT_IDS.intersection(step.problems)
        if not (returned and call.endpoint.returns_ids):
            context.upstream.note_ids(call.endpoint, returned=returned)
        for code in QUIRK_CODES.intersection(step.problems) - plan.expected:
            metrics.unexpected_losses.labels(call.endpoint.label, code).inc()
            LOG.warning(
                "Problem that is not expected of engine kind %s: %s",
                call.endpoint.kind,
                code,
                extra={"fields": {"step_id": step.step_id}},
            )
    if call.first_byte is not None and call.last_byte is not None and call.sent is not None:
        metrics.time_to_first_byte_seconds.labels(*labels).observe(call.first_byte - call.started)
        metrics.proxy_overhead_seconds.labels(dialect).observe(max(total_s - (call.last_byte - call.sent), 0))
    if not LOG.isEnabledFor(logging.INFO):
        return
    log = context.settings.log
    is_ordinary = step is not None and step.status == "complete" and client.status < 400 and total_s < log.slow_s
    if log.sample < 1 and is_ordinary and not is_sampled(plan.rollout_id, log.sample):
        return
    fields = {
        "rollout_id": plan.rollout_id,
        "step_id": plan.step_id,
        "dialect": dialect,
        "engine": call.endpoint.label,
        "status": client.status,
        "step": step.status if step else "none",
        "prompt_tokens": sum(map(len, step.prompts)) if step else None,
        "sampled_tokens": step.sampled if step else None,
        "problems": ",".join(step.problems) or None if step else None,
        "seconds": total_s,
    }
    LOG.info("call", extra={"fields": fields})
