"""How a call goes on that its engine has not completed: it is resumed with what was sampled, or starts again."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from proxy.api.model.call import Call, ClientStream, endpoints_of, plan_for
from proxy.api.model.telling import CONTEXT_IDS, INTERVAL_S, MOST_INTERVAL_S, SPLIT, can_parse, candidates, text_of
from proxy.continuation.types import LookupFailed
from proxy.errors import EngineDisconnected, EngineError, EngineUnreachable, NotFound, Paused, UnprocessableRequest
from proxy.protocols.dialects.base import GENERATES, Json, is_on
from proxy.protocols.exchange import Exchange
from proxy.protocols.parts import PartsDiffer
from proxy.protocols.resume import (
    Refusal,
    ends_in_stop,
    fields_of,
    is_at_limit,
    noted,
    offers_tools,
    refusal,
    shown_text,
    stop_strings,
    with_text,
    withheld_text,
    without_event,
)
from proxy.protocols.whole_response import text_event
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Step, answers_of
from proxy.upstream.concurrency import PLAIN_BYTES, off_loop


@dataclass(slots=True)
class _Cut:
    """The end of a part. `event`: what the client has not received of it; `withheld`: text that the engine did not send."""

    why: str
    event: Json | None = None
    step: Step | None = None
    reason: Refusal | None = None  # why what was sampled is not kept
    withheld: str = ""
    is_told: bool = False  # the reply of all parts is told at its end

    @property
    def tokens(self) -> int:
        """The number of sampled tokens, with those of the parts before."""
        return 0 if self.step is None else self.step.sampled

    @property
    def is_kept(self) -> bool:
        """Whether the call is resumed with what was sampled; else it starts again."""
        return self.reason is None and self.tokens > 0


async def go_on(call: Call, client: ClientStream, why: str, fault: EngineError | None = None) -> bool:
    """Plan the rest of a call, or the whole call again, once it can be sent; return False if it ends as it is.

    `fault`: why its endpoint cannot serve it; None if the engine or TokenTape ended it.
    """
    context, exchange, step = call.context, call.exchange, None
    call.is_waiting = True  # until its next attempt: a pause that is announced again does not interrupt this
    if exchange is None and not call.resumed and isinstance(fault, EngineUnreachable):
        return False  # it was never sent: the client gets the error at once
    if exchange is None and call.resumed:  # it was to go on at this endpoint
        is_refused = isinstance(fault, PartsDiffer) or _is_lost_too_often(call, fault)
        if fault is None:  # another pause: it may have been queued since the last one
            call.go_on_until = context.clock.monotonic() + context.settings.agents.resume_timeout_s
        return (not is_refused and await _planned(call, fault)) or _refused(call, "endpoint", None)
    call.losses += isinstance(fault, EngineDisconnected)
    call.go_on_until = context.clock.monotonic() + context.settings.agents.resume_timeout_s
    await call.context.pacing.turn()
    cut = _Cut(why)
    if exchange is not None:
        parsing = partial(exchange.cut, why, call.timing())
        cut.event, cut.step = await off_loop(call.work_bytes + call.response_bytes, PLAIN_BYTES, parsing)
        step = cut.step
    if exchange is not None and fault is None and await _completed(call, exchange, cut):
        return False
    await _judge(call, cut, fault)
    # Of several choices, some may have ended.
    has_ended = cut.reason == "max_resumes" or (cut.reason == "choices" and client.body_started)
    if not cut.is_kept and (has_ended or not _shows_nothing(client, step)):
        return _refused(call, cut.reason or "ids", step)
    _count(call, cut)
    call.is_stream_begun = call.is_stream_begun or call.plan.framing == "live"
    was_told, view = call.is_told, call.plan.view
    events: list[Json] = []
    if cut.is_kept and step is not None:
        (call.before, events), call.shown = _kept(call, cut, step), None
    else:
        call.before, call.shown, call.is_told = None, step if client.body_started else None, False
    call.are_ids_refused = False
    context.memory_limit.release(call)
    if not await _planned(call, fault):  # until then the part that was cut is the step of a client that leaves
        call.is_told = was_told
        return _refused(call, "timeout", step)
    for event in events:  # not earlier: they are in the end of a response that does not go on
        await client.write(view.written(event))
    call.exchange = None
    return True


def _is_lost_too_often(call: Call, fault: EngineError | None) -> bool:
    """Return whether a call ends whose rest was lost. While an engine samples the rest, the call does not wait."""
    timeout_s = call.context.settings.agents.resume_timeout_s
    if isinstance(fault, EngineUnreachable) or call.sent is None or call.sent < call.go_on_until - timeout_s:
        return False  # it was not sent again
    sampled_s = call.context.clock.monotonic() - call.sent
    call.go_on_until += sampled_s
    call.losses += fault is not None and sampled_s > timeout_s
    return call.losses > call.context.settings.engines.max_attempts


def _count(call: Call, cut: _Cut) -> None:
    """Count that a call goes on, and the tokens that are kept or lost."""
    metrics, label, before = call.context.metrics, call.endpoint.label, call.before
    call.resumed += 1
    call.failed.append({"endpoint": label, "fault": cut.why, "tokens": cut.tokens})
    result = "resumed" if cut.is_kept else "restarted"
    metrics.resumed_calls.labels(label, result, cut.reason or "none").inc()
    if cut.is_kept:
        metrics.cut_tokens.labels("kept").inc(cut.tokens - (0 if before is None else before.sampled))
    else:
        metrics.cut_tokens.labels("lost").inc(cut.tokens)
    fields = {"step_id": call.plan.step_id, "tokens": cut.tokens, "reason": cut.reason}
    LOG.info("Call %s: %s", result, cut.why, extra={"fields": fields})


def _kept(call: Call, cut: _Cut, step: Step) -> tuple[Step, list[Json]]:
    """Return what is kept of a call once its client has received these events, which have what the engine withheld of it."""
    event, events = cut.event, []
    if cut.is_told and not call.is_told and event is not None:
        step, event = without_event(step, event), None  # it may have the half of a character or of a stop string
    call.is_told = cut.is_told
    view, is_live = call.plan.view, call.plan.framing == "live"
    if is_live and event is not None:
        events.append(event)
    if cut.withheld and step.response is not None:
        if is_live:
            events.append(text_event(view.engine.shape, view.dialect.name, dict(step.response), cut.withheld))
        step = with_text(step, shown_text(step) + cut.withheld)
    return noted(step, call.resumed, call.failed), events


def _refused(call: Call, reason: Refusal, step: Step | None) -> bool:
    metrics = call.context.metrics
    metrics.resumed_calls.labels(call.endpoint.label, "ended", reason).inc()
    LOG.info("Call not resumed: %s", reason, extra={"fields": {"step_id": call.plan.step_id}})
    if step is not None:
        metrics.cut_tokens.labels("lost").inc(step.sampled)
    return False


def _shows_nothing(client: ClientStream, step: Step | None) -> bool:
    """Return whether the client has received no more than the head of a stream."""
    if not client.body_started:
        return True
    response = None if step is None else step.response
    if step is None or step.dialect in GENERATES or response is None or "choices" not in response:
        return False  # what it has received is not known
    return not any(
        answer.get("text") or _has_content(answer.get("message")) or any((answer.get("logprobs") or {}).values())
        for answer in response["choices"] or ()
    )


def _has_content(message: Json | None) -> bool:
    return any(value for name, value in (message or {}).items() if name != "role")


def note_ends(call: Call, step: Step) -> None:
    """Note the tokens that have ended replies of an engine which hides that of aborted ones (`Engine.hides_ends`)."""
    for choice in step.choices:
        if type(choice.stop_reason) is int and choice.stop_reason not in _stop_ids(call):
            call.endpoint.end_ids.put(choice.stop_reason, value=True)


def _stop_ids(call: Call) -> Sequence[Any]:
    listed = fields_of(call.plan).get("stop_token_ids")
    return listed if isinstance(listed, list) else ()


async def _completed(call: Call, exchange: Exchange, cut: _Cut) -> bool:
    """Complete a reply that its engine has aborted together with its last token; return whether it was that.

    If it may be, but the engine shows another text than such a reply has, the call is not resumed.
    """
    step, body = cut.step, fields_of(call.plan)
    is_candidate = call.endpoint.engine.hides_ends and exchange.is_whole and exchange.response.is_aborted
    if step is None or not (is_candidate and step.sampled and step.prompts) or call.plan.response_options.choices != 1:
        return False
    ids, message = step.choices[0].ids, answers_of(step).get(0, {}).get("message") or {}
    has_end = ids[-1] in _stop_ids(call) or call.endpoint.end_ids.get(ids[-1]) is not None
    has_end = has_end and not is_on(body.get("ignore_eos"))
    if not (has_end or is_at_limit(call.plan, step)):
        return False
    if call.plan.dialect.name not in GENERATES and not (call.is_told or offers_tools(body)):
        shown = shown_text(step) or message.get("reasoning_content") or ""
        with suppress(LookupFailed):
            text = await text_of(call, step.prompts[0][-CONTEXT_IDS:], ids[:-1] if has_end else ids)
            if text == shown and not ends_in_stop(text, stop_strings(body)):
                exchange.complete("stop" if has_end else "length", ids[-1] if has_end else None)
                return True
    cut.reason = "finished" if has_end else None
    return False


async def _judge(call: Call, cut: _Cut, fault: EngineError | None) -> None:
    """Set why what was sampled cannot be kept, and what the engine withheld of its text."""
    limits, step = call.context.settings, cut.step
    if cut.reason is not None:
        return
    is_last = call.resumed >= limits.agents.max_resumes or call.losses > limits.engines.max_attempts
    if is_last and call.sent is not None:  # else it was queued
        cut.reason = "max_resumes"
    elif not cut.tokens:
        cut.reason = None  # nothing was sampled: it starts again, and loses nothing
    elif isinstance(fault, PartsDiffer):
        cut.reason = "parser"
    elif step is None or not step.prompts:
        cut.reason = "ids"
    else:
        traits = call.endpoint.known(call.rollout.rollout_id)
        cut.reason = refusal(call.plan, step, has_parser=traits.has_parser)
        if cut.reason is None and not call.is_told:
            is_lost = fault is not None or not (call.exchange and call.exchange.is_whole)  # TokenTape closes it, too
            cut.reason, cut.withheld = await _text_reason(call, step, is_lost=is_lost)
        tells = cut.reason in {"character", "stop"} or (cut.reason == "parser" and can_parse(call))
        body, has_shown = call.plan.body, call.plan.framing == "live" or call.is_stream_begun
        is_generate = call.plan.dialect.name in GENERATES
        if (
            is_generate
            or (call.plan.response_options.logprobs and has_shown)
            or (body.get("min_tokens") and stop_strings(body))
        ):
            tells = False  # which logprobs the rest of a stream lacks, or which stop string counts, is not known
        if tells or call.is_told:
            cut.is_told = True
            cut.reason = None if tells else cut.reason


async def _text_reason(call: Call, step: Step, *, is_lost: bool) -> tuple[Refusal | None, str]:
    if step.dialect in GENERATES and "text" not in answers_of(step).get(0, {}):
        return None, ""
    try:
        text = await text_of(call, step.prompts[0][-CONTEXT_IDS:], step.choices[0].ids)
    except LookupFailed:
        return "tokenize", ""
    if text.endswith(SPLIT):
        return "character", ""
    stops = stop_strings(call.plan.body)
    withheld = withheld_text(text, shown_text(step), stops, is_lost=is_lost)
    if withheld is None:
        return "parser", ""
    return ("stop", "") if ends_in_stop(text, stops) else (None, withheld)


async def _planned(call: Call, fault: EngineError | None) -> bool:
    """Plan the call for the next endpoint, once its policy is not paused; return False if that takes too long."""
    context, clock = call.context, call.context.clock
    began = clock.monotonic()
    first, delayed = call.go_on_until - context.settings.agents.resume_timeout_s, fault is not None and not call.left
    try:
        while True:
            now = clock.monotonic()
            left_s = call.go_on_until - now
            if left_s <= 0:
                return False
            if delayed:  # as long as it has waited until now
                await asyncio.sleep(min(max(now - first, INTERVAL_S), MOST_INTERVAL_S, left_s))
            delayed = True
            try:
                async with asyncio.timeout(left_s):
                    endpoints, pause = await endpoints_of(call), call.policy.pause
                    if pause.mode is not None or pause.held:
                        labels = [endpoint.label for endpoint in endpoints]
                        await pause.passed(left_s, is_resumed=True, labels=labels)
                    if not (order := candidates(call, endpoints)):
                        continue
                    if fault is not None and len(order) > 1 and order[0] is call.endpoint:
                        order.append(order.pop(0))
                    call.left = order[1 : context.settings.engines.max_attempts]
                    await context.pacing.turn()
                    await plan_for(call, order[0])
                if call.fault is None:
                    return True
            except (TimeoutError, Paused, NotFound, UnprocessableRequest):
                return False
            except EngineError:
                continue
    finally:
        context.metrics.resume_wait_seconds.observe(clock.monotonic() - began)
