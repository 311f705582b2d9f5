"""The relay of a call: send it to an engine, stream the response to the client, record the step, end the response.

The end of the response is withheld until the step is recorded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.context import Context
from proxy.api.failures import internal_error
from proxy.api.http import CLIENT_CLOSED_REQUEST
from proxy.api.model.call import CallState, ClientStream, keeping_alive
from proxy.api.model.references import keep_calls
from proxy.errors import EngineBusy, EngineError, EngineUnreachable, ProxyError, StoreUnavailable, UnprocessableRequest
from proxy.protocols.engines.quirks import QUIRK_CODES
from proxy.protocols.exchange import Exchange, Outcome
from proxy.protocols.response import MALFORMED
from proxy.telemetry.logs import LOG
from proxy.upstream import EngineResponse

T = TypeVar("T")

_ASIDE_FROM_BYTES = 2**18  # parsing and writing so much JSON takes milliseconds
_END_WITHIN_S = 0.2  # the body of an answer that is whole ends at once; uvicorn writes its end right behind [DONE]


async def relay(context: Context, call: CallState) -> web.StreamResponse:
    """Carry a call through, to its end on whichever side it ends first."""
    client = ClientStream(call)
    call.task = asyncio.current_task()
    context.metrics.in_flight_calls.inc()
    context.in_flight[call.plan.rollout_id] += 1
    context.memory_limit.calls.add(call)
    try:
        outcome = await _outcome(context, call, client)
        call.step = outcome.step
        try:
            await context.recorder.record(outcome.step, call.incarnation, body_bytes=call.body_bytes)
        except StoreUnavailable:
            if not client.has_seen_something:
                raise
            return client.cut()  # what is not stored may not be told to be over
        call.stored.set()
        return await _end(context, call, client, outcome)
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_CLOSED_REQUEST)  # nobody is there to read it
    except EngineBusy as busy:
        client.status = busy.status  # as it will be told: nothing was sent, and nothing is recorded
        raise
    finally:
        context.metrics.in_flight_calls.dec()
        context.memory_limit.calls.discard(call)
        context.in_flight[call.plan.rollout_id] -= 1
        if not context.in_flight[call.plan.rollout_id]:
            del context.in_flight[call.plan.rollout_id]
        _report(context, call, client)


async def _outcome(context: Context, call: CallState, client: ClientStream) -> Outcome:
    """The engines' part: at one endpoint after the other, until one answers, the client saw something or none is left.

    Once something was sent, an exception that nobody named costs no step: what came until then is recorded.
    """
    try:
        while (outcome := await _at_endpoint(context, call, client)) is None:
            pass
        return call.planner.reshape(outcome)
    except (ProxyError, ClientConnectionResetError):
        raise
    except Exception as error:
        if call.sent is None:
            raise
        return _failed(call, client, error)
    finally:
        call.exchange = None  # its parsed answer need not stay in memory while the step is stored


async def _at_endpoint(context: Context, call: CallState, client: ClientStream) -> Outcome | None:
    """One endpoint's part: from sending to the last byte, whoever breaks off; None if the next one is to be tried."""
    exchange: Exchange | None = None
    try:
        if call.failed:
            await _move(call)
        plan = call.plan
        if call.fault is not None:
            raise call.fault
        async with keeping_alive(call, client, every_s=context.settings.record.keep_alive_interval_s):
            async with _in_turn(context, call, client) as answer:
                call.failover.check_status(call.endpoint, answer.status)
                exchange = call.exchange = Exchange(
                    plan,
                    answer.status,
                    answer.content_type,
                    max_event_bytes=context.settings.engines.max_event_bytes,
                )
                client.set_head(answer.status, answer.headers, content_type=exchange.content_type)
                await _carry(context, call, client, exchange, answer)
            await _look_up(context, call, exchange)
        return await _aside(call.body_bytes, partial(exchange.finish, call.timing(), context.policy.version))
    except EngineError as fault:
        if not client.has_seen_answer and call.failover.can_retry(fault):
            _note_failed(context, call, fault)
            return None
        return _broken(call, client, exchange, fault)
    except (asyncio.CancelledError, ClientConnectionResetError):
        if call.sent is None:
            raise  # it waited for its turn: nothing was asked of an engine
        # The context above has closed the engine's connection: that is how the engine learns to stop.
        exchange = exchange or Exchange(call.plan, 0, "")
        call.step = exchange.abort(
            call.cut or "the client disconnected", call.timing(), delivered=False, policy_version=context.policy.version
        ).step
        context.recorder.record_detached(call.step, call.incarnation, body_bytes=call.body_bytes)
        raise


@asynccontextmanager
async def _in_turn(context: Context, call: CallState, client: ClientStream) -> AsyncIterator[EngineResponse]:
    """The engine's answer, asked for when it is the call's turn. Raises EngineBusy where that can still be told."""
    plan = call.plan
    try:
        async with context.upstream.slot(call.endpoint, plan.rollout_id, can_fail_over=call.failover.has_next):
            body = await _aside(call.body_bytes, lambda: orjson.dumps(plan.body))
            call.sent = context.clock.monotonic()
            sending = context.upstream.send(
                call.endpoint,
                "POST",
                plan.endpoint,
                headers=[*call.request.headers.items(), *plan.headers.items()],
                body=body,
            )
            async with sending as answer:
                yield answer
    except EngineBusy as busy:
        if call.failed or client.has_heard_only_comments:
            public = f"The engine is busy: {busy.message}"
            label = call.endpoint.settings.label
            raise EngineUnreachable(f"Engine {label} is busy: {busy.message}", public=public) from busy
        raise


def _note_failed(context: Context, call: CallState, fault: EngineError) -> None:
    """The step will say where it was tried in vain."""
    label = call.endpoint.settings.label
    call.failed.append({"endpoint": label, "fault": fault.message})
    context.metrics.failovers.labels(label).inc()
    LOG.warning(
        "Failing over to the next endpoint: %s", fault.message, extra={"fields": {"step_id": call.plan.step_id}}
    )


async def _move(call: CallState) -> None:
    """Plan the call for the next endpoint, which may be of another kind. Raises EngineUnreachable if it cannot serve it."""
    endpoint = call.failover.next()
    try:
        plan, fault = await call.planner.plan(endpoint, call.failed)
    except UnprocessableRequest as error:
        raise EngineUnreachable(f"Engine {endpoint.settings.label} cannot serve the call: {error.message}") from error
    call.endpoint, call.plan, call.fault = endpoint, plan, fault
    call.first_byte = call.last_byte = None  # of an answer that nobody saw


async def _carry(
    context: Context, call: CallState, client: ClientStream, exchange: Exchange, answer: EngineResponse
) -> None:
    """The loop: bytes of the engine in, bytes for the client out, until the answer is whole."""
    reads = answer.iter_bytes()
    try:
        async for read in reads:
            call.last_byte = context.clock.monotonic()
            call.first_byte = call.first_byte or call.last_byte
            call.body_bytes += len(read)
            size = exchange.pending + len(read)
            shown = (
                exchange.feed(read) if size < _ASIDE_FROM_BYTES else await _aside(size, partial(exchange.feed, read))
            )
            if shown:
                await client.write(shown)
                client.has_heard_only_comments = False
            if exchange.is_over:
                break
        if exchange.is_over:
            await _let_end(reads, exchange)
    except EngineError:
        if not exchange.is_over:
            raise


async def _let_end(reads: AsyncIterator[bytes], exchange: Exchange) -> None:
    """Read to the end of the body, so that its connection can be used again; an engine that keeps it open is left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_WITHIN_S):
            async for read in reads:
                exchange.feed(read)  # the exchange shows nothing more, and flags it


async def _look_up(context: Context, call: CallState, exchange: Exchange) -> None:
    """Ask the engine what its answer left out. What cannot be found out stays unknown, and the step is flagged."""
    if exchange.forces_usage:
        call.endpoint.forces_usage = True
    if (model := await _aside(call.body_bytes, exchange.other_model)) is not None:
        exchange.served = await context.upstream.served_models(call.endpoint, model)
    lookup = await _aside(call.body_bytes, exchange.follow_up)
    if lookup is None:
        return
    body = orjson.dumps(lookup.body)
    try:
        _, exchange.found = await context.upstream.post_json(
            call.endpoint, lookup.path, body, new_connection=True, is_auxiliary=False
        )
    except EngineError as error:
        LOG.warning("Request to engine %s for %s failed: %s", call.endpoint.settings.label, lookup.path, error)


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Do work on so many bytes: in a thread if they are many, so that other calls go on meanwhile.

    Whoever is cancelled waits for the thread: nobody else may work on the exchange before it is done.
    """
    if size <= _ASIDE_FROM_BYTES:
        return work()
    working = asyncio.get_running_loop().create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _failed(call: CallState, client: ClientStream, error: Exception) -> Outcome:
    """The proxy failed. The step has what came and where to look in the log; the client gets an error of its dialect."""
    plan = call.plan
    fault = internal_error(error, step_id=plan.step_id)
    exchange = call.exchange or Exchange(plan, 0, "")
    step = exchange.fail(f"internal error {fault.error_id}", call.timing())
    body = plan.error_dialect.error(fault)
    if not client.has_seen_something:
        client.set_head(plan.error_dialect.status(fault), {"Content-Type": "application/json"})
        return Outcome(body, step, broken=False)
    if not client.is_stream:
        return Outcome(b"", step, broken=True)
    try:
        return Outcome(plan.error_events(body), step, broken=False)
    except MALFORMED:  # what failed may be how this dialect writes its stream
        return Outcome(b"", step, broken=True)


def _broken(call: CallState, client: ClientStream, exchange: Exchange | None, fault: EngineError) -> Outcome:
    """The engine could not be reached, or broke off.

    A client that has seen nothing yet gets an error; one that has seen a part sees it end as the engine ended it, if its
    dialect is the engine's.
    """
    plan = call.plan
    LOG.warning("Engine failed: %s", fault.message, extra={"fields": {"step_id": plan.step_id}})
    error = plan.error_dialect.error(fault.for_agents(f"step {plan.step_id}"))
    aborted = None if exchange is None else exchange.abort(fault.message, call.timing(), delivered=True)
    outcome = aborted or _unanswered(call, fault)
    if client.has_heard_only_comments:
        return Outcome(plan.error_events(error), outcome.step, broken=False)
    if client.has_seen_something:
        # By way of chat the failure is told in the dialect's own event, and the stream ends as such streams do.
        return replace(outcome, broken=plan.translation is None)
    retry = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    client.set_head(plan.error_dialect.status(fault), {"Content-Type": "application/json", **retry})
    return Outcome(error, outcome.step, broken=False)


def _unanswered(call: CallState, fault: EngineError) -> Outcome:
    """A call that no engine answered: its step has the failure as an engine would have told it."""
    exchange = Exchange(call.plan, fault.status, "application/json")
    exchange.feed(call.plan.dialect.error(fault))
    return exchange.finish(call.timing())


async def _end(context: Context, call: CallState, client: ClientStream, outcome: Outcome) -> web.StreamResponse:
    """Show the end. A client that has gone meanwhile did not get its turn, and the step says so."""
    if outcome.status is not None:
        client.status = outcome.status
    is_shown = False
    try:
        await keep_calls(
            context, call.plan, call.incarnation, outcome.step
        )  # the step is stored: nobody's leaving can lose it
        shown = await client.end(outcome.end, broken=outcome.broken)
        is_shown = True
        return shown
    finally:
        if not is_shown:
            context.recorder.mark_undelivered(outcome.step, call.incarnation)


def _report(context: Context, call: CallState, client: ClientStream) -> None:
    """Count the call and log its line: names, counts and durations, never content or keys."""
    metrics, plan, step = context.metrics, call.plan, call.step
    labels = (plan.error_dialect.name, call.endpoint.settings.label, str(client.status))
    total_s = context.clock.monotonic() - call.started
    metrics.calls.labels(*labels).inc()
    metrics.call_duration_seconds.labels(*labels).observe(total_s)
    # What was asked for otherwise on purpose (echo, a step without reasoning) has a code of its own, and loses the rest by it.
    if step is not None and step.status == "complete" and not (plan.expected - QUIRK_CODES).intersection(step.problems):
        for code in QUIRK_CODES.intersection(step.problems) - plan.expected:
            metrics.unexpected_losses.labels(call.endpoint.settings.label, code).inc()
            LOG.warning(
                "Problem that is not expected of engine kind %s: %s",
                call.endpoint.kind,
                code,
                extra={"fields": {"step_id": step.step_id}},
            )
    if call.first_byte is not None and call.last_byte is not None and call.sent is not None:
        metrics.time_to_first_byte_seconds.labels(*labels).observe(call.first_byte - call.started)
        metrics.proxy_overhead_seconds.labels(plan.error_dialect.name).observe(
            max(total_s - (call.last_byte - call.sent), 0)
        )
    if not LOG.isEnabledFor(logging.INFO):
        return
    fields = {
        "rollout_id": plan.rollout_id,
        "step_id": plan.step_id,
        "dialect": plan.error_dialect.name,
        "engine": call.endpoint.settings.label,
        "status": client.status,
        "step": step.status if step else "none",
        "prompt_tokens": sum(map(len, step.prompts)) if step else None,
        "sampled_tokens": step.sampled if step else None,
        "problems": ",".join(step.problems) or None if step else None,
        "seconds": total_s,
    }
    LOG.info("call", extra={"fields": fields})
