"""Calls of playbacks: answered from the tape of their rollout, or else refused or live (docs/playback.md).

No engine, slot, pause or reservation is involved in an answer. Its step is stored first: the store decides which of several
calls, of any process, uses a step of the tape.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.failures import CLIENT_CLOSED_REQUEST
from proxy.api.model.call import Call
from proxy.api.requests import downstream, update_rollout
from proxy.errors import DamagedStep, PlaybackMismatch, PlaybackSourceGone
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.plan import TranslatedCall, translator_of
from proxy.rollouts.idempotency import COUNT, Attempt, StoredAnswer, retry_fields, stored_answer_from
from proxy.rollouts.playback import Recorded, ServedTapes, Tapes, inherited
from proxy.rollouts.rollout import DELIVERED_MARK, UNDELIVERED_MARK, Playback, Played, marked, read_marks
from proxy.trajectory.codec import UnreadableRecord
from proxy.trajectory.step import Step
from proxy.trajectory.tape import Asked, Tape, TapeStep, difference, from_difference
from proxy.upstream.concurrency import LARGE_BYTES, PLAIN_BYTES, in_thread, off_loop
from proxy.upstream.http_client import ROLLOUT_HEADER, STEP_HEADER

_BYTES_PER_MESSAGE: Final = 100  # to read thousands from a tape takes milliseconds
PLAYBACK_HEADER: Final = "X-Playback"  # of a response: `answered` from the tape, or `again`


async def name_playback(call: Call, served: ServedTapes) -> None:
    """Let a call that names a tape be one of its newest playback. Raises what `ServedTapes.find` raises."""
    tape = await served.find(call.rollout_id if call.is_named else None)
    if tape is None:
        return
    adapter, headers = call.adapter, call.request.headers
    follows = isinstance(adapter, TranslatedCall) and (adapter.references.items or adapter.references.previous_response)
    asked = None if follows else await off_loop(call.body_bytes, LARGE_BYTES, _ask, call, tape.loaded.tape)
    is_retry = bool(retry_fields(headers.get(COUNT, "")))
    call.rollout_id = await served.playback(tape, None if asked is None else asked.key, is_retry=is_retry)
    call.is_named = True


async def answer(call: Call, attempt: Attempt) -> web.StreamResponse | None:
    """Respond to a call of a playback from its tape; None if it is live.

    Raises:
        PlaybackMismatch: The tape does not have the call, which must not be sampled.
        PlaybackSourceGone: The source was deleted.
        StoreUnavailable: The step was not stored.
    """
    context, live = call.context, call.admitted.live
    playback = call.rollout.playback
    assert playback is not None
    played = await context.tapes.play(live, playback)
    context.rollouts.keep(live)  # with its tape
    if played is None and ((played := live.played) is None or not _is_over(call, playback)):
        _gone(call, playback)
    asked = await off_loop(call.body_bytes, LARGE_BYTES, _ask, call, played.tape)  # of all messages, not the fresh ones
    steps = played.tape.equal(asked.key, playback.end)
    if (response := await _answered(call, attempt, played, playback, steps)) is not None:
        return response
    if not await _is_live(call, played, playback, asked):
        await _refuse(call, played, playback, asked)
    context.metrics.playback_calls.labels("live").inc()
    call.recorded = await _recorded(context.tapes, played, playback, asked)
    return None


async def _answered(
    call: Call, attempt: Attempt, played: Played, playback: Playback, steps: Sequence[TapeStep]
) -> web.StreamResponse | None:
    """Respond with one of these steps, which have the call's key; None if all are used."""
    if (used := await _to_repeat(call, attempt, played, steps)) is not None:
        return await _again(call, played, playback, used)
    before = len(played.used)
    for step in steps:
        if step.step_id not in played.used:
            response = await _use(call, attempt, played, playback, step, is_only=len(steps) == 1)
            if response is not None:
                return response
    if len(played.used) == before:
        return None
    used = await _to_repeat(call, attempt, played, steps)  # other processes have used the rest
    return None if used is None else await _again(call, played, playback, used)


def _is_over(call: Call, playback: Playback) -> bool:
    """Return whether all steps of the tape are used, and calls without a match are live."""
    counts, is_live = call.rollout.counts, call.rollout.has_branched or playback.on_mismatch == "sample"
    return is_live and counts.get("inherited", 0) >= playback.answerable


def _gone(call: Call, playback: Playback) -> NoReturn:
    call.context.metrics.playback_calls.labels("gone").inc()
    raise PlaybackSourceGone(
        f"Rollout {playback.of!r}, from which the calls of rollout {call.rollout.rollout_id!r} are answered, was deleted or "
        "has expired."
    )


def _ask(call: Call, tape: Tape) -> Asked:
    """Return what a call asks for. It is translated as for the engine of the source, whatever serves live calls."""
    adapter, engine = call.adapter, tape.engine
    if adapter is None or engine is None:
        return tape.ask(call.dialect.name, call.body if adapter is None else adapter.request, call.body)
    if not isinstance(adapter, TranslatedCall):
        if (path := adapter.own.get(engine.kind)) is not None:
            return tape.ask(DIALECTS[path].name, adapter.request, adapter.request)
        return tape.ask(call.dialect.name, adapter.request, adapter.native({}, engine.kind))
    name, options = adapter.translation.name, call.context.translation
    if (kind := ENGINES.get(engine.kind)) is not None:
        options = kind.translation_options(options, engine.version)
    asked = tape.ask(name, adapter.request, adapter.read_for(options))
    if adapter.translation.has_system_turns and not tape.asked_as(
        asked.key
    ):  # it depends on the engine's own translation
        merged = replace(options, merges_systems=not options.merges_systems)
        other = tape.ask(name, adapter.request, adapter.read_for(merged))
        return other if tape.asked_as(other.key) else asked
    return asked


async def _to_repeat(call: Call, attempt: Attempt, played: Played, steps: Sequence[TapeStep]) -> TapeStep | None:
    """Return the used step that a call gets again: its client did not receive it, or retries the call.

    A client that retries a call may have received earlier equal ones: of these it gets none while there is an unused one.
    """
    is_retry = bool(attempt.extra.get("attempt") or retry_fields(call.request.headers.get(COUNT, "")))
    by_id = {step.step_id: step for step in steps if not step.is_rejection}  # whoever retries that has received it
    while is_retry and (storing := [task for name in by_id if (task := played.used.get(name)) is not None]):
        await asyncio.wait(storing)  # of the first attempt, perhaps
    used = [by_id[step_id] for step_id in reversed(played.used) if step_id in by_id]
    if not used:
        return None
    names = [mark + step.step_id for mark in (UNDELIVERED_MARK, DELIVERED_MARK) for step in used]
    marks = await call.context.store.marks(call.rollout.rollout_id, names)
    missed = played.undelivered | read_marks(marks).undelivered
    if (step := next((step for step in used if step.step_id in missed), None)) is not None:
        return step
    if not is_retry:
        return None
    received = played.delivered | marked(marks, DELIVERED_MARK)
    if (step := next((step for step in used if step.step_id not in received), None)) is not None:
        return step
    return used[0] if played.used.keys() >= by_id.keys() else None


async def _use(
    call: Call, attempt: Attempt, played: Played, playback: Playback, step: TapeStep, *, is_only: bool
) -> web.StreamResponse | None:
    """Respond with an unused step; None if another call has used it, or it cannot be rendered for this call.

    `is_only`: no other step of the tape has its key.
    """
    recorder, rollout, response = call.context.recorder, call.rollout, None
    # Before anything is awaited: calls of this process never try the same step. The task goes on if the client disconnects.
    storing = played.used[step.step_id] = recorder.tasks.start(_store(call, attempt, played, playback, step))
    try:
        if (stored := await asyncio.shield(storing)) is None:
            return None
        attempt.stored.set()
        played.undelivered.discard(step.step_id)
        call.context.metrics.playback_calls.labels("answered").inc()
        response = await respond(call, stored, {PLAYBACK_HEADER: "answered"})
    finally:
        if response is None:
            recorder.tasks.start(_missed(call, played, storing))
        del storing  # its error and this frame refer to each other
    if response is None:
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    played.delivered.add(step.step_id)
    if not is_only:  # what a retry gets depends on it, in any process
        recorder.mark_delivered(rollout.rollout_id, rollout.incarnation, step.step_id)
    return response


async def _store(
    call: Call, attempt: Attempt, played: Played, playback: Playback, step: TapeStep
) -> StoredAnswer | None:
    """Return the response of a step once its inherited step is stored; None as `_use`. After an error, the step is unused."""
    context, rollout, name = call.context, call.rollout, step.step_id
    try:
        if (stored := await _stored_answer(call, attempt, played, playback, step)) is None:
            del played.used[name]
            return None
        if attempt.marks:
            marks = {mark: orjson.dumps({**orjson.loads(it), "step_id": name}) for mark, it in attempt.marks.items()}
            await context.idempotency_keys.begin(rollout, replace(attempt, marks=marks))
        sizes = {"body_bytes": call.body_bytes + len(stored.body), "work_bytes": call.work_bytes + len(stored.body)}
        try:
            is_own = await context.recorder.append_new(stored.step, call.admitted.live, **sizes)
        except BaseException:  # it may be stored all the same: whoever finds it used gets it again
            played.undelivered.add(name)
            raise
    except BaseException:
        del played.used[name]
        raise
    played.used[name] = None
    return stored if is_own else None


async def _missed(call: Call, played: Played, storing: "asyncio.Task[StoredAnswer | None]") -> None:
    """Mark a step as undelivered, once this call has stored it."""
    await asyncio.wait([storing])
    if storing.exception() is None and (stored := storing.result()) is not None:
        played.undelivered.add(stored.step.step_id)
        call.context.recorder.mark_undelivered(stored.step, call.rollout.incarnation)


async def _again(call: Call, played: Played, playback: Playback, step: TapeStep) -> web.StreamResponse:
    """Respond with a used step once more; nothing is recorded but the delivery."""
    context, rollout = call.context, call.rollout
    stored = await _stored_answer(call, Attempt(step.step_id, {}), played, playback, step)
    if stored is None:
        raise DamagedStep(f"Step {step.step_id!r} cannot be rendered for this call.", name=rollout.rollout_id)
    context.metrics.playback_calls.labels("again").inc()
    response = await respond(call, stored, {PLAYBACK_HEADER: "again"})
    if response is None:
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    played.undelivered.discard(step.step_id)
    played.delivered.add(step.step_id)
    context.recorder.mark_delivered(rollout.rollout_id, rollout.incarnation, step.step_id)
    return response


async def _stored_answer(
    call: Call, attempt: Attempt, played: Played, playback: Playback, step: TapeStep
) -> StoredAnswer | None:
    """Return the response of a step, rendered for this call, and the inherited step; None if it cannot be rendered."""
    context = call.context
    try:
        origin = await context.tapes.read(played, playback, step.step_id)
    except UnreadableRecord:
        return None
    if origin is None:
        _gone(call, playback)
    request = call.body if call.adapter is None else call.adapter.request
    agent = {name: value for name, value in attempt.extra.items() if name == "agent"}
    extra = {**agent, "call_id": attempt.step_id}
    timing = call.timing(context.clock.now())
    weight = call.body_bytes + 8 * origin.sampled

    def rendered() -> StoredAnswer | None:
        own = inherited(origin, call.rollout.rollout_id, request, timing, extra)
        return _rejection(own) if own.status == "error" else stored_answer_from(own)

    return await off_loop(weight, PLAIN_BYTES, rendered)


def _rejection(step: Step) -> StoredAnswer | None:
    """Return the engine's error of a call that it rejected."""
    given: Mapping[str, Any] = step.response or {}
    status, body, content_type = given.get("status"), given.get("body"), given.get("content_type")
    if type(status) is not int or not isinstance(body, str):
        return None
    if (translator := translator_of(step)) is not None:
        return StoredAnswer(step, "application/json", translator.engine_error(status, body), status)
    kind = content_type if isinstance(content_type, str) and content_type else "application/json"
    return StoredAnswer(step, kind, body.encode(), status)


async def _is_live(call: Call, played: Played, playback: Playback, asked: Asked) -> bool:
    """Return whether a call that the tape does not answer is sampled; note it if it is the first one, at the branch step."""
    if playback.on_mismatch != "branch" or call.rollout.has_branched:
        return playback.on_mismatch != "refuse"
    if not await call.context.tapes.has_branched(played, playback, asked):
        return False
    await update_rollout(call.context, call.rollout, {"has_branched": b"true"}, {})
    return True


async def _refuse(call: Call, played: Played, playback: Playback, asked: Asked) -> NoReturn:
    """Raise PlaybackMismatch with the first difference from the nearest unused step; count it in the rollout."""
    context, tape = call.context, played.tape
    async with played.loaded.lock:
        found = await in_thread(_nearest, played, playback, asked)
    why: dict[str, Any] = {"step_id": None, "path": None, "value": None, "recorded": None}
    if found is None:
        message = f"All {playback.answerable} calls of the tape are answered."
    else:
        step, differs = found
        why["step_id"] = step.step_id
        if differs is not None:
            why["path"], why["value"], why["recorded"] = differs
        elif (origin := await context.tapes.read(played, playback, step.step_id)) is not None:
            own = (await in_thread(tape.ask, origin.dialect, origin.request, origin.body)).fields
            names = [
                name for name in sorted(asked.fields.keys() | own.keys()) if asked.fields.get(name) != own.get(name)
            ]
            if names:
                value, before = from_difference(asked.fields.get(names[0]), own.get(names[0]))
                why |= {"path": names[0], "value": value, "recorded": before}
        where = (
            "in its dialect"
            if why["path"] is None
            else f"at {why['path']}: {why['value']!r}, recorded {why['recorded']!r}"
        )
        message = f"The call differs from the nearest unused step {step.step_id!r} {where}."
    context.metrics.playback_calls.labels("refused").inc()
    is_set, rollout = False, call.rollout
    while not is_set:
        count, first = (0, why) if rollout.mismatch is None else (rollout.mismatch.count, rollout.mismatch.first)
        fields = {"mismatch": orjson.dumps({"count": count + 1, "first": first})}
        expected = {"mismatch": rollout.origin.fields.get("mismatch")}
        is_set, rollout = await update_rollout(context, rollout, fields, expected)
    raise PlaybackMismatch(f"Rollout {call.rollout.rollout_id!r} is a playback of {playback.of!r}. {message}")


def _nearest(
    played: Played, playback: Playback, asked: Asked
) -> tuple[TapeStep, tuple[str, str | None, str | None] | None] | None:
    """Return the nearest unused step, and where its messages differ from the call's, if they do; None without any."""
    tape = played.tape
    unused = [step for step in tape.steps[: playback.end] if step.is_answerable and step.step_id not in played.used]
    if (found := tape.nearest(asked, unused)) is None:
        return None
    step, shared = found
    recorded = tape.messages(step)
    is_equal = shared >= max(len(asked.messages), len(recorded))
    return step, None if is_equal else difference(asked.messages, recorded, shared)


async def _recorded(tapes: Tapes, played: Played, playback: Playback, asked: Asked) -> Recorded:
    """Return what the tape has of a live call: the branch step, if it has its key, else the only step that has it.

    The prompts of several may differ: equal replies before them can have other ids. What follows a live reply is the playback's
    own, also if the source has the same texts.
    """
    same, length = played.tape.asked_as(asked.key), len(asked.messages)
    step = next((step for step in same if step.step_id == playback.before), None)
    if step is None and (length := played.tape.inherited_length(asked, playback.end)) == len(asked.messages):
        step = same[0] if len(same) == 1 else None
    try:
        origin = None if step is None else await tapes.read(played, playback, step.step_id)
    except UnreadableRecord:
        origin = None
    if not playback.ignore:
        return Recorded(played.tape, origin, asked.messages, asked.messages)
    async with played.loaded.lock:
        restored = await off_loop(_BYTES_PER_MESSAGE * length, LARGE_BYTES, played.tape.restored, asked, length)
    return Recorded(played.tape, origin, asked.messages, restored)


async def respond(call: Call, stored: StoredAnswer, headers: Mapping[str, str]) -> web.StreamResponse | None:
    """Send a stored response; None if the client has disconnected."""
    step = stored.step
    shown = downstream([("Content-Type", stored.content_type), *headers.items()])
    shown = [*shown, (ROLLOUT_HEADER, step.rollout_id), (STEP_HEADER, step.step_id)]
    adapter = call.adapter_of(step)
    body = adapter.answer(step) if adapter is not None and stored.status == 200 else None
    response = web.Response(status=stored.status, headers=shown, body=stored.body if body is None else body)
    await response.prepare(call.request)
    try:
        await response.write_eof()
    except ClientConnectionResetError:
        return None
    return response
