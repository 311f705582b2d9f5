"""The relay of a call: sent, shown as it comes, recorded, ended.

Holds the one loop that carries bytes between an engine and a client, and what happens when either leaves. It understands
nothing: the exchange does. Rule: the withheld end is written only after the recorder has the step.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.errors import EngineFault, StoreFault
from proxy.headers import downstream
from proxy.logs import LOG
from proxy.parts import SHOWN, Parts
from proxy.trajectory.step import Step, Timing
from proxy.upstream import Answer, Endpoint
from proxy.wire.exchange import Exchange, Outcome
from proxy.wire.plan import Plan

_FINISH_IN_THREAD_FROM_BYTES = 2**18  # parsing and writing so much JSON takes milliseconds
_CLIENT_LEFT = 499  # in the log only, as nginx has it


@dataclass(slots=True)
class Call:
    """One call, accepted: what is decided of it, and how far it has come.

    `received` is wall time, the other times are monotonic.
    """

    request: web.Request
    plan: Plan
    endpoint: Endpoint
    birth: str
    received: float
    started: float
    body_bytes: int
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    step: Step | None = None

    def timing(self) -> Timing:
        """The times as a step keeps them."""
        stamps = (
            None if stamp is None else self.received + (stamp - self.started)
            for stamp in (self.sent, self.first_byte, self.last_byte)
        )
        return Timing(self.received, *stamps)


class Client:
    """The client's side of a call: its head is written with the first bytes, its end with the last."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.status = _CLIENT_LEFT
        self._headers: list[tuple[str, str]] = []
        self._stream: web.StreamResponse | None = None

    @property
    def has_seen_something(self) -> bool:
        """Whether anything was written: from then on no other status can be given."""
        return self._stream is not None

    def set_head(self, status: int, headers: Mapping[str, str]) -> None:
        """What the engine's head was; nothing is written yet."""
        plan = self._call.plan
        self.status = status
        self._headers = downstream(headers, rollout_id=plan.rollout_id, step_id=plan.step_id)

    async def write(self, shown: bytes) -> None:
        """Write bytes as they come. Raises ClientConnectionResetError when the client is gone."""
        if self._stream is None:
            self._call.request[SHOWN] = True
            self._stream = web.StreamResponse(status=self.status, headers=self._headers)
            await self._stream.prepare(self._call.request)
        await self._stream.write(shown)

    async def end(self, end: bytes, *, broken: bool) -> web.StreamResponse:
        """Write the withheld end; nothing written yet means one write, with its length.

        `broken`: the engine's connection ended improperly, and so does the client's. Raises ClientConnectionResetError
        when the client is gone.
        """
        if self._stream is None:
            response = web.Response(status=self.status, headers=self._headers, body=end)
            await response.prepare(self._call.request)
            await response.write_eof()
            return response
        if end:
            await self._stream.write(end)
        if broken:
            return self.cut()
        transport = self._call.request.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client left before the end was written")
        await self._stream.write_eof()
        return self._stream

    def cut(self) -> web.StreamResponse:
        """End the connection improperly: what was written is flushed, and the body stays without its last chunk."""
        transport = self._call.request.transport
        if transport is not None:
            transport.close()
        assert self._stream is not None
        return self._stream


async def relay(parts: Parts, call: Call) -> web.StreamResponse:
    """Carry a call through, to its end on whichever side it ends first."""
    client = Client(call)
    parts.metrics.in_flight.inc()
    parts.in_flight[call.plan.rollout_id] += 1
    try:
        outcome = await _exchange(parts, call, client)
        call.step = outcome.step
        try:
            await parts.recorder.record(outcome.step, call.birth, body_bytes=call.body_bytes)
        except StoreFault:
            if not client.has_seen_something:
                raise
            return client.cut()  # what is not stored may not be told to be over
        return await _end(parts, call, client, outcome)
    except ClientConnectionResetError:
        return web.Response(status=_CLIENT_LEFT)  # nobody is there to read it
    finally:
        parts.metrics.in_flight.dec()
        parts.in_flight[call.plan.rollout_id] -= 1
        if not parts.in_flight[call.plan.rollout_id]:
            del parts.in_flight[call.plan.rollout_id]
        _report(parts, call, client)


async def _exchange(parts: Parts, call: Call, client: Client) -> Outcome:
    """The engine's part: from sending to the last byte, whoever breaks off."""
    plan = call.plan
    exchange: Exchange | None = None
    try:
        call.sent = parts.clock.monotonic()
        sending = parts.upstream.send(
            call.endpoint,
            "POST",
            plan.endpoint,
            headers=list(call.request.headers.items()),
            body=orjson.dumps(plan.body),
        )
        async with sending as answer:
            exchange = Exchange(plan, answer.status, answer.content_type)
            client.set_head(answer.status, answer.headers)
            await _carry(parts, call, client, exchange, answer)
    except EngineFault as fault:
        return _broken(call, client, exchange, fault)
    except (asyncio.CancelledError, ClientConnectionResetError):
        # The context above has closed the engine's connection: that is how the engine learns to stop.
        exchange = exchange or Exchange(plan, 0, "")
        call.step = exchange.abort("the client left", call.timing(), delivered=False).step
        parts.recorder.keep(call.step, call.birth, body_bytes=call.body_bytes)
        raise
    if call.body_bytes > _FINISH_IN_THREAD_FROM_BYTES:
        return await asyncio.to_thread(exchange.finish, call.timing())
    return exchange.finish(call.timing())


async def _carry(parts: Parts, call: Call, client: Client, exchange: Exchange, answer: Answer) -> None:
    """The loop: bytes of the engine in, bytes for the client out."""
    async for read in answer.reads():
        call.last_byte = parts.clock.monotonic()
        call.first_byte = call.first_byte or call.last_byte
        call.body_bytes += len(read)
        shown = exchange.feed(read)
        if shown:
            await client.write(shown)


def _broken(call: Call, client: Client, exchange: Exchange | None, fault: EngineFault) -> Outcome:
    """The engine could not be reached, or broke off.

    A client that has seen nothing yet gets an error; one that has seen a part sees it end as the engine ended it.
    """
    error = call.plan.dialect.error(fault)
    if exchange is None:
        exchange = Exchange(call.plan, fault.status, "application/json")
        exchange.feed(error)
        outcome = exchange.finish(call.timing())
    else:
        outcome = exchange.abort(fault.message, call.timing(), delivered=True)
    if client.has_seen_something:
        return outcome
    retry = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    client.set_head(fault.status, {"Content-Type": "application/json", **retry})
    return Outcome(error, outcome.step, broken=False)


async def _end(parts: Parts, call: Call, client: Client, outcome: Outcome) -> web.StreamResponse:
    """Show the end. A client that has gone meanwhile did not get its turn, and the step says so."""
    try:
        return await client.end(outcome.end, broken=outcome.broken)
    except (asyncio.CancelledError, ClientConnectionResetError):
        parts.recorder.undelivered(outcome.step, call.birth)
        raise


def _report(parts: Parts, call: Call, client: Client) -> None:
    """Count the call and log its line: names, counts and durations, never content or keys."""
    metrics, plan, step = parts.metrics, call.plan, call.step
    dialect = plan.dialect.name
    total_s = parts.clock.monotonic() - call.started
    metrics.calls.labels(dialect, call.endpoint.settings.label, str(client.status)).inc()
    metrics.duration.labels(dialect).observe(total_s)
    if call.first_byte is not None and call.last_byte is not None and call.sent is not None:
        metrics.first_byte.labels(dialect).observe(call.first_byte - call.started)
        metrics.added_latency.labels(dialect).observe(max(total_s - (call.last_byte - call.sent), 0))
    if not LOG.isEnabledFor(logging.INFO):
        return
    fields = {
        "rollout_id": plan.rollout_id,
        "step_id": plan.step_id,
        "dialect": dialect,
        "engine": call.endpoint.settings.label,
        "status": client.status,
        "step": step.status if step else "none",
        "prompt_tokens": sum(map(len, step.prompts)) if step else None,
        "sampled_tokens": step.sampled if step else None,
        "problems": ",".join(step.problems) or None if step else None,
        "seconds": total_s,
    }
    LOG.info("call", extra={"fields": fields})
