"""The relay of a call: send it to an engine, stream the response to the client, record the step, end the response.

The end of the response is withheld until the step is recorded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.context import Context
from proxy.api.failures import internal_error
from proxy.api.http import CLIENT_CLOSED_REQUEST
from proxy.api.memory_limit import UNWEIGHED_BYTES
from proxy.api.model.call import CallState, ClientStream, keeping_alive
from proxy.errors import EngineBusy, EngineError, EngineUnreachable, ProxyError, StoreUnavailable, UnprocessableRequest
from proxy.protocols.engines.base import FollowUpRequest
from proxy.protocols.engines.quirks import QUIRK_CODES
from proxy.protocols.exchange import Exchange, Outcome
from proxy.protocols.response import MALFORMED
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Step
from proxy.upstream import EngineResponse

T = TypeVar("T")


class PromptIdsRejected(Exception):
    """The engine rejected a call with prompt ids."""


_BYTES_PER_ID = 7  # in JSON
_THREAD_FROM_BYTES = 2**18  # parsing and writing so much JSON takes milliseconds
_BYTES_PER_LINE = 128  # whose parsing takes as long as the handling of one line of a stream
_REJECTED = (400, 404, 422)
_WITHOUT_IDS = frozenset({"no_token_ids", "retokenized"})
_END_TIMEOUT_S = 0.2  # after [DONE]; uvicorn writes the end of the body at once
_END_BYTES = 2**16
_ABORT_TIMEOUT_S = 2.0  # SGLang responds after its current step: milliseconds, or the prefill of a long prompt


async def relay(context: Context, call: CallState) -> web.StreamResponse:
    """Send a call, stream its response, record its step, and end the response."""
    client = ClientStream(call)
    call.task = asyncio.current_task()
    if context.start_trace is not None:
        call.trace = context.start_trace(call)
    context.metrics.in_flight_calls.inc()
    context.in_flight[call.plan.rollout_id] += 1
    context.memory_limit.calls.add(call)
    try:
        outcome = await _outcome(context, call, client)
        call.step = outcome.step
        try:
            await context.recorder.record(outcome.step, call.incarnation, body_bytes=call.body_bytes)
        except StoreUnavailable as fault:
            call.note_fault(fault)
            if not client.headers_sent:
                raise
            return client.cut()  # a response whose step is not stored must not look complete
        call.stored.set()
        if call.trace is not None:
            call.trace.stored(call)
        return await _end(context, call, client, outcome)
    except ClientConnectionResetError:
        return web.Response(status=CLIENT_CLOSED_REQUEST)  # the client disconnected
    except EngineBusy as busy:
        client.status = busy.status  # for the metrics and the log; nothing was sent or recorded
        call.note_fault(busy)
        raise
    finally:
        context.metrics.in_flight_calls.dec()
        context.memory_limit.calls.discard(call)
        if call.parsed_bytes:
            context.memory_limit.release(call)
        context.in_flight[call.plan.rollout_id] -= 1
        if not context.in_flight[call.plan.rollout_id]:
            del context.in_flight[call.plan.rollout_id]
        _report(context, call, client)


async def _outcome(context: Context, call: CallState, client: ClientStream) -> Outcome:
    """Try one endpoint after the other, until one responds, the client received something, or none is left.

    If an unexpected exception is raised after the request was sent, what arrived until then is recorded as a partial step.
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
        return await _failed(call, client, error)
    finally:
        call.exchange = None  # frees the parsed response while the step is stored


async def _at_endpoint(context: Context, call: CallState, client: ClientStream) -> Outcome | None:
    """Send the call to one endpoint and relay its response; return None if the next endpoint is to be tried."""
    try:
        if call.failed and not call.are_ids_refused:
            await _move(call)
        plan = call.plan
        if call.fault is not None:
            raise call.fault
        exchange = await _exchanged(context, call, client)
        outcome = await _in_thread_if_large(
            call.body_bytes,
            partial(exchange.finish, call.timing(context.clock.now()), call.policy.version.announced.version),
        )
    except PromptIdsRejected:
        call.are_ids_refused = True
        call.plan, call.fault = await call.planner.plan(call.endpoint, call.failed, as_ids=False)
        return None
    except EngineError as fault:
        fault.__traceback__ = None  # `call.fault` and this frame refer to each other
        call.note_fault(fault)
        if not client.body_started and call.failover.can_retry(fault):
            _note_failed(context, call, fault)
            return None
        return await _broken(call, client, call.exchange, fault)
    except (asyncio.CancelledError, ClientConnectionResetError):
        if call.sent is None:
            raise  # it was queued: nothing was sent to an engine
        # `_exchanged` has aborted the call, or closed the engine's connection, on which the engine stops generating.
        exchange = call.exchange or Exchange(call.plan, 0, "")
        reason, version = call.cut or "the client disconnected", call.policy.version.announced.version
        abort = partial(
            exchange.abort,
            reason,
            call.timing(),
            delivered=False,
            policy_version=version,
            is_aborted=call.is_aborted,
        )
        call.step = (await _despite_cancellation(call.body_bytes, abort)).step
        context.recorder.record_detached(call.step, call.incarnation, body_bytes=call.body_bytes)
        raise
    if exchange.response.prompt is not None:
        context.known_prompts.keep(plan.rollout_id, call.incarnation, exchange.response.prompt)
    if plan.prompt_ids is not None:
        _note_prompt_ids(context, call, outcome.step)
    return outcome


def _note_prompt_ids(context: Context, call: CallState, step: Step) -> None:
    """Note whether the engine used the prompt ids of a call."""
    if "other_prompt" in step.problems:
        context.continuation.refuse(call.endpoint, step.rollout_id, "returned_ids")
    elif step.prompts:
        call.endpoint.continuation_fault.oppose()


async def _exchanged(context: Context, call: CallState, client: ClientStream) -> Exchange:
    """Send the call once it has a slot, and relay the response. Meanwhile the call has the exchange that is returned."""
    relayed = _relayed(context, call, client)
    if call.plan.abort is not None:
        relayed = _abortable(context, call, call.plan.abort, relayed)
    if call.plan.framing != "replay":
        return await relayed
    async with keeping_alive(client, context.settings.record.keep_alive_interval_s):
        return await relayed


async def _abortable(
    context: Context, call: CallState, abort: FollowUpRequest, relayed: Coroutine[Any, Any, Exchange]
) -> Exchange:
    """Relay a call; if it is cancelled, abort it at its engine, and receive what the engine sampled until then."""
    working = asyncio.get_running_loop().create_task(relayed)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        try:
            if call.sent is not None and not working.done():
                call.is_aborted = call.exchange is None or not call.exchange.response.is_over
                with suppress(EngineError, TimeoutError):
                    await _abort(context, call, abort, working)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        raise


async def _abort(context: Context, call: CallState, abort: FollowUpRequest, working: "asyncio.Task[Exchange]") -> None:
    """Have the engine abort a call, and wait for the end of its response. Raises EngineError, TimeoutError."""
    headers, body = (("Content-Type", "application/json"),), orjson.dumps(abort.body)
    async with asyncio.timeout(_ABORT_TIMEOUT_S):
        sent = await context.upstream.send(
            call.endpoint, "POST", abort.path, headers=headers, body=body, is_auxiliary=True
        )
        with sent as response:
            if response.status == 200:  # a gateway may not have the route
                await asyncio.wait([working])


async def _relayed(context: Context, call: CallState, client: ClientStream) -> Exchange:
    queue = call.endpoint.queue
    if not queue.acquire_free():
        await _wait_for_slot(context, call, client)
    try:
        with await _sent(context, call) as response:
            call.failover.check_status(call.endpoint, response.status)
            _check_prompt_ids(context, call, response.status)
            exchange = call.exchange = _new_exchange(context, call, response)
            client.set_head(response.status, response.headers, content_type=exchange.response.content_type)
            await _stream(context, call, client, exchange, response)
    finally:
        queue.release()
    await _follow_up(context, call, exchange)
    return exchange


def _new_exchange(context: Context, call: CallState, response: EngineResponse) -> Exchange:
    return Exchange(
        call.plan,
        response.status,
        response.content_type,
        max_event_bytes=context.settings.engines.max_event_bytes,
        prompt=context.known_prompts.get((call.plan.rollout_id, call.incarnation)),
    )


async def _wait_for_slot(context: Context, call: CallState, client: ClientStream) -> None:
    """Wait for a slot of the call's endpoint.

    Raises:
        EngineBusy: The queue is full or timed out, and the client can still receive the status 429.
        EngineUnreachable: The same, after another endpoint failed or a keep-alive comment was sent.
    """
    if call.trace is not None:
        call.trace.queued(call)
    try:
        await context.upstream.wait_for_slot(call.endpoint, call.plan.rollout_id, can_fail_over=call.failover.has_next)
    except EngineBusy as busy:
        if call.failed or client.only_keepalives_sent:
            public = f"The engine is busy: {busy.message}"
            raise EngineUnreachable(f"Engine {call.endpoint.label} is busy: {busy.message}", public=public) from busy
        raise


async def _sent(context: Context, call: CallState) -> EngineResponse:
    """Send the call to its endpoint, and return the response."""
    plan = call.plan
    size = call.body_bytes + _BYTES_PER_ID * len(plan.prompt_ids or ())
    body = await _in_thread_if_large(size, partial(orjson.dumps, plan.body))
    call.sent = context.clock.monotonic()
    headers = [*call.request.headers.items(), *plan.headers.items()]
    if call.trace is not None:
        headers = call.trace.sending(call, headers) or headers
    return await context.upstream.send(call.endpoint, "POST", plan.endpoint, headers=headers, body=body)


def _check_prompt_ids(context: Context, call: CallState, status: int) -> None:
    """Raise PromptIdsRejected if the engine rejects a call that has prompt ids.

    The call is then sent as the client sent it. If that succeeds, the ids were the reason.
    """
    if call.plan.prompt_ids is not None and status in _REJECTED:
        raise PromptIdsRejected
    if call.are_ids_refused and status < 400:
        context.continuation.refuse(call.endpoint, call.plan.rollout_id, "refused_ids")


def _note_failed(context: Context, call: CallState, fault: EngineError) -> None:
    """Note for the step which endpoint failed, and count the failover."""
    label = call.endpoint.label
    call.are_ids_refused, call.exchange = False, None
    context.memory_limit.release(call)
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
        raise EngineUnreachable(f"Engine {endpoint.label} cannot serve the call: {error.message}") from error
    call.endpoint, call.plan, call.fault = endpoint, plan, fault
    call.first_byte = call.last_byte = None  # of the failed endpoint's response


async def _stream(
    context: Context, call: CallState, client: ClientStream, exchange: Exchange, sent: EngineResponse
) -> None:
    """Feed the engine's bytes to the exchange and write what it returns, until the response is complete.

    Memory for a long response is reserved before its bytes are fed.
    """
    reads, response = sent.iter_bytes(), exchange.response
    limit_bytes = context.settings.engines.max_response_bytes
    unweighed = min(limit_bytes, UNWEIGHED_BYTES)
    request_bytes = call.body_bytes
    try:
        async for read in reads:
            call.last_byte = context.clock.monotonic()
            call.first_byte = call.first_byte or call.last_byte
            call.response_bytes += len(read)
            if call.response_bytes > unweighed and response.is_cumulative:  # only its last event is held
                context.memory_limit.release(call)
                call.body_bytes = request_bytes
            elif call.response_bytes > unweighed:
                context.memory_limit.receive(call, read, limit_bytes)
            call.body_bytes += len(read)
            lines = read.count(b"\n") + read.count(b"\r")  # of many short events each takes as long as a longer text
            size = response.pending + len(read) + _BYTES_PER_LINE * lines
            shown = (
                response.feed(read)
                if size < _THREAD_FROM_BYTES
                else await _in_thread_if_large(size, partial(response.feed, read))
            )
            await _forward(context, call, client, shown)
            if response.is_over:
                break
        if response.is_over:
            await _read_end(reads, exchange)
    except EngineError:
        if not response.is_over:
            raise
    exchange.is_read = True


async def _forward(context: Context, call: CallState, client: ClientStream, shown: bytes) -> None:
    """Forward bytes to the client; if it has disconnected, cancel the call, and receive what the engine sampled until then."""
    if call.is_aborted:
        return
    try:
        await client.forward(shown, context.settings.record.keep_alive_interval_s)
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


async def _follow_up(context: Context, call: CallState, exchange: Exchange) -> None:
    """Request from the engine what its response lacks. Without a result, the step has a problem."""
    if exchange.response.forces_usage:
        call.endpoint.forces_usage.show(call.plan.rollout_id, what=True)
    elif call.endpoint.forces_usage.is_open and exchange.response.forces_usage is False:
        call.endpoint.forces_usage.oppose()
    model, request = await _in_thread_if_large(call.body_bytes, exchange.missing)
    if model is not None:
        exchange.served_models = await context.upstream.served_models(call.endpoint, model)
    if request is None:
        return
    body = await _in_thread_if_large(call.body_bytes, partial(orjson.dumps, request.body))
    try:
        _, exchange.follow_up_response = await context.upstream.post_json(
            call.endpoint, request.path, body, new_connection=True, is_auxiliary=False
        )
    except EngineError as error:
        LOG.warning("Request to engine %s for %s failed: %s", call.endpoint.label, request.path, error)


async def _in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """Run work on `size` bytes, in a thread if they are many.

    A cancelled caller waits for the thread, because nothing else may use the exchange meanwhile.
    """
    if size <= _THREAD_FROM_BYTES:
        return work()
    working = asyncio.get_running_loop().create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def _despite_cancellation(size: int, work: Callable[[], T]) -> T:
    """Run work as `_in_thread_if_large`, and return its result even if the caller is cancelled meanwhile."""
    if size <= _THREAD_FROM_BYTES:
        return work()
    working = asyncio.get_running_loop().create_task(asyncio.to_thread(work))
    while not working.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([working])
    return working.result()


async def _failed(call: CallState, client: ClientStream, error: Exception) -> Outcome:
    """Return the outcome after an error of TokenTape itself: a partial step with the id of the error, and an error response."""
    plan = call.plan
    fault = internal_error(error, step_id=plan.step_id)
    exchange = call.exchange or Exchange(plan, 0, "")
    fail = partial(exchange.fail, f"internal error {fault.error_id}", call.timing())
    step = await _in_thread_if_large(call.body_bytes, fail)
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


async def _broken(call: CallState, client: ClientStream, exchange: Exchange | None, fault: EngineError) -> Outcome:
    """Return the outcome after the engine was unreachable or disconnected.

    A client that has received nothing gets an error response. One that has received a part of the response gets its connection
    closed as the engine closed its own, or, in a translated dialect, an error event and the regular end of the stream.
    """
    plan = call.plan
    LOG.warning("Engine failed: %s", fault.message, extra={"fields": {"step_id": plan.step_id}})
    error = plan.error_dialect.error(fault.for_agents(f"step {plan.step_id}"))
    if exchange is None:
        outcome = _unanswered(call, fault)
    else:
        abort = partial(exchange.abort, fault.message, call.timing(), delivered=True)
        outcome = await _in_thread_if_large(call.body_bytes, abort)
    if client.only_keepalives_sent:
        return Outcome(plan.error_events(error), outcome.step, broken=False)
    if client.headers_sent:
        return replace(outcome, broken=plan.translation is None)
    retry = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    client.set_head(fault.status, {"Content-Type": "application/json", **retry})
    return Outcome(error, outcome.step, broken=False)


def _unanswered(call: CallState, fault: EngineError) -> Outcome:
    """Return the outcome of a call that no engine answered: its step has the error as an engine's response."""
    exchange = Exchange(call.plan, fault.status, "application/json")
    exchange.response.feed(call.plan.dialect.error(fault))
    return exchange.finish(call.timing())


async def _end(context: Context, call: CallState, client: ClientStream, outcome: Outcome) -> web.StreamResponse:
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
            context.recorder.mark_undelivered(outcome.step, call.incarnation)


def _report(context: Context, call: CallState, client: ClientStream) -> None:
    """Count the call and log its line: names, counts and durations, never content or keys."""
    if call.trace is not None:
        call.trace.ended(call, client.status)
    metrics, plan, step = context.metrics, call.plan, call.step
    labels = (plan.error_dialect.name, call.endpoint.label, str(client.status))
    total_s = context.clock.monotonic() - call.started
    metrics.calls.labels(*labels).inc()
    metrics.call_duration_seconds.labels(*labels).observe(total_s)
    # A request that causes losses itself (echo, no reasoning) has a problem code of its own, which explains the other codes.
    if step is not None and step.status == "complete" and not (plan.expected - QUIRK_CODES).intersection(step.problems):
        context.upstream.note_ids(call.endpoint, returned=not _WITHOUT_IDS.intersection(step.problems))
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
        metrics.proxy_overhead_seconds.labels(plan.error_dialect.name).observe(
            max(total_s - (call.last_byte - call.sent), 0)
        )
    if not LOG.isEnabledFor(logging.INFO):
        return
    fields = {
        "rollout_id": plan.rollout_id,
        "step_id": plan.step_id,
        "dialect": plan.error_dialect.name,
        "engine": call.endpoint.label,
        "status": client.status,
        "step": step.status if step else "none",
        "prompt_tokens": sum(map(len, step.prompts)) if step else None,
        "sampled_tokens": step.sampled if step else None,
        "problems": ",".join(step.problems) or None if step else None,
        "seconds": total_s,
    }
    LOG.info("call", extra={"fields": fields})
