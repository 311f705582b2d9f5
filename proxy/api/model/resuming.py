"""How a call goes on that its engine has not completed: it is resumed with what was sampled, or starts again."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from proxy.api.model.call import Call, endpoints_of, plan_for
from proxy.continuation.types import Detokenize, LookupFailed
from proxy.errors import EngineDisconnected, EngineError, EngineUnreachable, NotFound, Paused, UnprocessableRequest
from proxy.protocols.dialects.base import Json
from proxy.protocols.parts import PartsDiffer
from proxy.protocols.resume import Refusal, ends_in_stop, noted, refusal, shown_text, with_text, withheld_text
from proxy.protocols.whole_response import text_event
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Ids, Step
from proxy.upstream import Endpoint, ranked
from proxy.upstream.concurrency import PLAIN_BYTES, off_loop
from proxy.upstream.prompt_lookups import PromptLookups

_CONTEXT_IDS: Final = 8  # of the prompt, so that the text of the first sampled token is complete
_SPLIT: Final = "\ufffd"  # a character of which only a part was sampled
_INTERVAL_S: Final = 0.1  # until an unreachable endpoint is tried again; doubled each time
_MOST_INTERVAL_S: Final = 2.0


class Client(Protocol):
    """The response to the client, as far as a call that goes on needs it."""

    @property
    def body_started(self) -> bool:
        """Whether a byte of the engine's response was written."""
        ...

    async def write(self, shown: bytes) -> None:
        """Write bytes of the body."""
        ...


async def go_on(call: Call, client: Client, why: str, fault: EngineError | None = None) -> bool:
    """Plan the rest of a call, or the whole call again, once it can be sent; return False if it ends as it is.

    `fault`: why its endpoint cannot serve it; None if the engine or TokenTape ended it.
    """
    context, exchange = call.context, call.exchange
    call.is_waiting = True  # until its next attempt: a pause that is announced again does not interrupt this
    now = context.clock.monotonic()
    if exchange is None and fault is not None and isinstance(fault, EngineUnreachable) and not call.resumed:
        return False  # it was never sent: the client gets the error at once
    if exchange is None and call.resumed:  # the endpoint that it was to go on at
        if now >= call.go_on_until or not await _planned(call, fault):
            return _refused(call, "endpoint", None)
        return True
    event, step = None, None
    if exchange is not None:
        cut = partial(exchange.cut, why, call.timing())
        event, step = await off_loop(call.work_bytes + call.response_bytes, PLAIN_BYTES, cut)
    call.losses += isinstance(fault, EngineDisconnected)
    reason, withheld = await _why_not(call, step, fault)
    label, tokens = call.endpoint.label, 0 if step is None else step.sampled
    if not tokens and reason != "max_resumes":
        reason = None  # nothing was sampled: it starts again, and loses nothing
    if reason is not None and (reason == "max_resumes" or not _shows_nothing(client, step)):
        return _refused(call, reason, step)
    call.resumed += 1
    call.failed.append({"endpoint": label, "fault": why, "tokens": tokens})
    is_kept = reason is None and tokens > 0
    result = "resumed" if is_kept else "restarted"
    context.metrics.resumed_calls.labels(label, result, reason or "none").inc()
    context.metrics.cut_tokens.labels("kept" if is_kept else "lost").inc(
        tokens - (call.before.sampled if is_kept and call.before is not None else 0)
    )
    LOG.info(
        "Call %s: %s", result, why, extra={"fields": {"step_id": call.plan.step_id, "tokens": tokens, "reason": reason}}
    )
    if is_kept and step is not None:
        if call.plan.framing == "live":
            await _show(call, client, step, event, withheld)
        kept = with_text(step, shown_text(step) + withheld) if withheld else step
        call.before, call.shown = noted(kept, call.resumed, call.failed), None
    else:
        call.before, call.shown = None, step if client.body_started else None
    call.are_ids_refused = False
    context.memory_limit.release(call)
    call.go_on_until = now + context.settings.agents.resume_timeout_s
    if not await _planned(call, fault):  # until then the part that was cut is the step of a client that leaves
        return _refused(call, "timeout", step)
    call.exchange = None
    return True


def _refused(call: Call, reason: Refusal, step: Step | None) -> bool:
    metrics = call.context.metrics
    metrics.resumed_calls.labels(call.endpoint.label, "ended", reason).inc()
    LOG.info("Call not resumed: %s", reason, extra={"fields": {"step_id": call.plan.step_id}})
    if step is not None:
        metrics.cut_tokens.labels("lost").inc(step.sampled)
    return False


def _shows_nothing(client: Client, step: Step | None) -> bool:
    """Return whether the client has received no more than the head of a stream."""
    if not client.body_started:
        return True
    answers = [] if step is None or step.response is None else step.response.get("choices") or []
    return not any(answer.get("text") or _has_content(answer.get("message")) for answer in answers)


def _has_content(message: Json | None) -> bool:
    return any(value for name, value in (message or {}).items() if name != "role")


async def _why_not(call: Call, step: Step | None, fault: EngineError | None) -> tuple[Refusal | None, str]:
    """Return why what was sampled cannot be kept, and what the engine withheld of its text."""
    limits = call.context.settings
    if call.resumed >= limits.agents.max_resumes or call.losses > limits.engines.max_attempts:
        return "max_resumes", ""
    if step is None or not step.prompts or isinstance(fault, PartsDiffer):
        return "parser" if isinstance(fault, PartsDiffer) else "ids", ""
    traits = call.endpoint.known(call.rollout.rollout_id)
    reason = refusal(call.plan, step, has_parser=traits.has_parser)
    ids = step.choices[0].ids if step.choices else None
    if reason is not None or not ids:
        return reason, ""
    try:
        text = await _text(call, step.prompts[0][-_CONTEXT_IDS:], ids)
    except (LookupFailed, EngineError):
        return "tokenize", ""
    if text.endswith(_SPLIT):
        return "character", ""
    stops = call.plan.body.get("stop")
    withheld = withheld_text(text, shown_text(step), stops, is_lost=fault is not None)
    if withheld is None:
        return "parser", ""
    return ("stop" if ends_in_stop(text, stops) else None), withheld


async def _text(call: Call, context_ids: Ids, ids: Ids) -> str:
    """Return the text of sampled ids. Raises LookupFailed, EngineError."""
    endpoints = [
        call.endpoint,
        *(each for each in _candidates(call, await endpoints_of(call)) if each is not call.endpoint),
    ]
    for endpoint in endpoints:
        lookups = PromptLookups(call.context.upstream, endpoint, call.plan.body, 0, call.plan.rollout_id)
        try:
            before, whole = await lookups.get(Detokenize(context_ids)), await lookups.get(Detokenize(context_ids + ids))
        except EngineError:
            continue  # it was lost, or is asleep
        if isinstance(before, str) and isinstance(whole, str) and whole.startswith(before):
            return whole[len(before) :]
        raise LookupFailed("the text of the ids depends on what follows")
    raise LookupFailed("no endpoint serves texts")


async def _show(call: Call, client: Client, step: Step, event: Json | None, withheld: str) -> None:
    """Write what the client has not received of the text that was sampled."""
    view = call.plan.view
    if event is not None:
        await client.write(view.written(event))
    if withheld and step.response is not None:
        event = text_event(view.engine.shape, view.dialect.name, dict(step.response), withheld)
        await client.write(view.written(event))


async def _planned(call: Call, fault: EngineError | None) -> bool:
    """Plan the call for the next endpoint, once its policy is not paused; return False if that takes too long."""
    context, clock = call.context, call.context.clock
    began = clock.monotonic()
    interval_s, delayed = _INTERVAL_S, fault is not None and not call.left
    try:
        while True:
            left_s = call.go_on_until - clock.monotonic()
            if left_s <= 0:
                return False
            if delayed:
                await asyncio.sleep(min(interval_s, left_s))
            interval_s, delayed = min(2 * interval_s, _MOST_INTERVAL_S), True
            try:
                endpoints, pause = await endpoints_of(call), call.policy.pause
                if pause.mode is not None or pause.held:
                    labels = [endpoint.label for endpoint in endpoints]
                    await pause.passed(left_s, is_resumed=True, labels=labels)
                if not (order := _candidates(call, endpoints)):
                    continue
                if fault is not None and len(order) > 1 and order[0] is call.endpoint:
                    order.append(order.pop(0))
                call.left = order[1 : context.settings.engines.max_attempts]
                await plan_for(call, order[0])
                if call.fault is None:
                    return True
            except (Paused, NotFound, UnprocessableRequest):
                return False
    finally:
        context.metrics.resume_wait_seconds.observe(clock.monotonic() - began)


def _candidates(call: Call, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Return the endpoints at which a call may go on: of the same engine, and not held for an update; its own one first."""
    kind, held = call.endpoint.kind, call.policy.pause.held
    order = [
        each for each in ranked(endpoints, call.rollout.rollout_id) if each.kind == kind and each.label not in held
    ]
    return sorted(order, key=lambda endpoint: (endpoint.health.is_ejected, endpoint is not call.endpoint))
