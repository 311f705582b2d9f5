"""The routes that open, list, search, get, reward, finish, delete and follow rollouts.

Every change is a compare-and-set in the store, so that concurrent changes through two replicas cannot both succeed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.api.api_keys import mint
from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import (
    FinishRollout,
    ListRollouts,
    OpenRollout,
    PatchRollout,
    RolloutFilter,
    Search,
    ShowEvents,
)
from proxy.api.requests import (
    body_from,
    json_response,
    model_url,
    named,
    page_from,
    path_prefix,
    query_from,
    rollout_from,
    rollout_id_from,
    update_rollout,
)
from proxy.clock import new_id
from proxy.errors import Conflict, Damaged, NotFound
from proxy.rollouts.group import find_group, join, read_group
from proxy.rollouts.rollout import (
    Marks,
    Playback,
    Rollout,
    deadlines_of,
    first_due_ms,
    left_out,
    own_metadata,
    read_marks,
    read_rollout,
    read_rollouts,
    write_fields,
)
from proxy.rollouts.steps import aside, check_step_rewards, check_threads, read_steps, weights_of
from proxy.rollouts.values import ROLLOUT_MARK, note_playbacks
from proxy.trajectory.text_search import Needle, search
from storage.errors import StorageError
from storage.types import Change, Page, StoredEntity

_FIELDS_OF_OPENING = (
    "group_id", "metadata", "model", "sampling", "tools", "limits", "reply", "continuation",
)  # fmt: skip


async def open_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts`: 201; 200 and the same response for the same body again; 409 for another body."""
    context = request.app[CONTEXT]
    opening = await body_from(request, OpenRollout)
    name = opening.rollout_id or new_id(context.clock)
    payload = opening.model_dump(exclude_none=True, exclude_defaults=True)
    deadlines = deadlines_of(payload, idle_s=None, start_s=context.settings.groups.start_s)
    taken = {} if opening.playback is None else await context.tapes.open(payload["playback"])
    fields = taken | write_fields({**{key: payload.get(key) for key in _FIELDS_OF_OPENING}, **deadlines})
    fields["opened_with"] = orjson.dumps({**payload, "rollout_id": name}, option=orjson.OPT_SORT_KEYS)
    now_ms = context.clock.now_ms()
    stored = await context.store.open(name, fields, now_ms=now_ms, timer_ms=first_due_ms(deadlines, now_ms))
    check_opening(stored, fields, "Rollout", "a call")
    if taken:
        await note_playbacks(context.store, context.clock, stored, ROLLOUT_MARK + name)
    if opening.group_id is not None:
        await join(context.store, context.clock, stored, opening.group_id)
    return json_response(opened(request, context, stored), status=201 if stored.created else 200)


def check_opening(stored: StoredEntity, fields: Mapping[str, bytes], what: str, creator: str) -> None:
    """Raise Conflict if a rollout or a group exists that was not opened with these fields."""
    known = stored.fields.get("opened_with")
    if known != fields["opened_with"]:
        how = f"; it was created by {creator}." if known is None else " with different terms."
        raise Conflict(f"{what} {stored.name!r} already exists{how}", param=f"{what.lower()}_id")


async def list_rollouts(request: web.Request) -> web.Response:
    """`GET /rollouts`: newest first. `since` and `until` are unix seconds.

    With filters, a response ends after a quarter of a second, so that a page may have fewer rollouts than its limit.
    """
    context = request.app[CONTEXT]
    asked = query_from(request, ListRollouts)
    found: list[tuple[Rollout, Marks]] = []
    unreadable: list[dict[str, str]] = []
    cursor, began = asked.cursor, context.clock.monotonic()
    window = [None if time_s is None else time_s * 1000 for time_s in (asked.since, asked.until)]
    while True:
        page = await _candidates(context, asked, cursor, asked.limit, window, asked.policy)
        cursor = page.cursor
        entries = [entry for entry in await context.store.get_all(page.names, with_marks=True) if entry is not None]
        rollouts, damaged = read_rollouts([stored for stored, _ in entries], context.metrics)
        marks = {stored.name: stored_marks for stored, stored_marks in entries}
        unreadable += damaged
        found += [(rollout, read_marks(marks[rollout.rollout_id])) for rollout in rollouts if asked.matches(rollout)]
        if len(found) > asked.limit:
            del found[asked.limit :]
            cursor = context.store.listing.cursor(found[-1][0].rollout_id, found[-1][0].created_ms)
        if cursor is None or len(found) == asked.limit or context.clock.monotonic() - began >= LIST_BUDGET_S:
            break
    shown = [_fields(request, context, rollout, own) for rollout, own in found]
    listed = [{**fields, "metadata": own_metadata(fields["metadata"])} for fields in shown]
    left = {"unreadable": unreadable} if unreadable else {}
    return json_response({"rollouts": listed, "cursor": cursor, **left})


async def _candidates(
    context: Context,
    asked: RolloutFilter,
    cursor: str | None,
    limit: int,
    window_ms: Sequence[int | None] = (None, None),
    policy: str | None = None,
) -> Page:
    """Return a page of rollouts that may match.

    They are the members of the group, or those that the store's index has, or all.
    """
    store, (since_ms, until_ms) = context.store, window_ms
    if asked.group_id is not None:
        names = () if (group := await find_group(store, asked.group_id)) is None else (*group.members, *group.unneeded)
        return await page_from(store.listing.page_among(names, cursor, limit, since_ms, until_ms))
    is_rarer = asked.status in (None, "completed")  # the policy
    for field, value in (("policy", policy if is_rarer else None), ("status", asked.status)):
        if value is not None:
            of_index = store.listing.page_of(field, orjson.dumps(value), cursor, limit, since_ms, until_ms)
            if (page := await page_from(of_index)) is not None:
                return page
    return await page_from(store.listing.page(cursor, limit, since_ms, until_ms))


async def show_rollout(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}`. It starts the search for unknown context of the drift: the next response may have them."""
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    context.finisher.drift.complete(rollout)
    return json_response(await _shown(request, context, rollout))


async def patch_rollout(request: web.Request) -> web.Response:
    """`PATCH /rollouts/{id}`: set rewards, advantages, metadata and the continuation mode; absent fields are unchanged.

    Rewards and advantages cannot be changed once the rollout's group is claimed.
    """
    context = request.app[CONTEXT]
    rollout = await rollout_from(request)
    patch = await body_from(request, PatchRollout)
    await check_step_rewards(context.store, rollout, patch.step_rewards)
    await check_threads(context.store, rollout, context.threads.rules, patch.thread_rewards)
    values = patch.model_dump(include={"reward", "advantages", "metadata", "continuation"} & patch.model_fields_set)
    changed = await change_rollout(context, rollout, values, {name: getattr(patch, name) for name in _MERGED})
    shown = await _shown(request, context, changed)
    if patch.model_fields_set - {"metadata", "continuation"} and (warning := await _without_effect(context, changed)):
        shown["warning"] = warning
    return json_response(shown)


async def _without_effect(context: Context, rollout: Rollout) -> str | None:
    """Return why no claim returns a reward that was set: the group was dropped before. None if it was not."""
    stored = None if rollout.group_id is None else await context.store.groups.get(rollout.group_id)
    try:
        states = {} if stored is None else read_group(stored).states
    except Damaged as damage:  # the reward is set all the same
        left_out([damage], context.metrics)
        return None
    dropped = [f"for policy {name!r} ({state.code})" for name, state in states.items() if state.status == "dropped"]
    if not dropped:
        return None
    name = rollout.group_id
    return f"Group {name!r} was dropped {', '.join(dropped)}: POST /groups/{name}/requeue puts it into the queue again."


async def change_rollout(
    context: Context,
    rollout: Rollout,
    values: Mapping[str, Any],
    added: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Rollout:
    """Set values of a rollout, and add rewards of its steps and threads, or metadata; return the rollout.

    Raises:
        Conflict: A reward or an advantage changes, and the group was claimed.
        NotFound: The rollout was deleted.
    """
    known: Mapping[str, bytes] = write_fields({name: getattr(rollout, name) or None for name in added})
    while True:
        fields = _changes(rollout, values, added)
        signals = fields.keys() - {"metadata", "continuation"}
        if signals and rollout.claimed_by is not None:
            raise Conflict(
                f"The group of rollout {rollout.rollout_id!r} was claimed; its rewards and "
                "advantages cannot be changed.",
                param=min(signals),
            )
        expected = {name: known.get(name) for name in fields.keys() & added} | ({"claimed_by": None} if signals else {})
        is_set, rollout = await update_rollout(context, rollout, fields, expected)
        if is_set:
            if "reward" in fields:
                await context.finisher.rewarded(rollout)
            return rollout
        known = rollout.origin.fields  # changed by another request: try again


def _changes(
    rollout: Rollout, values: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]
) -> dict[str, bytes | None]:
    """Return the fields that change; equal values change nothing. Rewards of steps and threads are added to the known ones."""
    merged = {name: {**getattr(rollout, name), **given} for name, given in added.items() if given}
    values_to_set = {**values, **merged}
    return {
        name: None if value is None else orjson.dumps(value)
        for name, value in values_to_set.items()
        if value != getattr(rollout, name)
    }


async def finish_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/finish`: a repeated request changes nothing; another status is 409."""
    context = request.app[CONTEXT]
    body = await body_from(request, FinishRollout)
    rollout = await rollout_from(request)
    finished = await context.finisher.finish(rollout, body.status, reward=body.reward, metadata=body.metadata)
    shown = await _shown(request, context, finished)
    if (stored := await context.finisher.replacement(finished)) is not None:
        shown["replaced_by"] = opened(request, context, stored)
    return json_response(shown)


async def delete_rollout(request: web.Request) -> web.Response:
    """`DELETE /rollouts/{id}`: 204, also if it does not exist."""
    await request.app[CONTEXT].store.delete(rollout_id_from(request))
    return web.Response(status=204)


def credentials(request: web.Request, context: Context, rollout: Rollout) -> dict[str, str]:
    """Return what an agent needs for the calls of a rollout."""
    key = mint(rollout.rollout_id, rollout.incarnation, context.secret)
    return {"base_url": _terms(request, context, rollout)["base_url"], "api_key": key}


def opened(request: web.Request, context: Context, stored: StoredEntity) -> dict[str, Any]:
    """Return the response to an opening: only fields that do not change, so that retries get the same response."""
    shown = _terms(request, context, read_rollout(stored))
    shown["metadata"] = own_metadata(shown["metadata"])
    key = mint(stored.name, stored.incarnation, context.secret)
    return {**shown, "status": "open", "created_ms": stored.created_ms, "api_key": key}


async def _shown(request: web.Request, context: Context, rollout: Rollout) -> dict[str, Any]:
    return _fields(request, context, rollout, read_marks(await context.store.marks(rollout.rollout_id)))


def _fields(request: web.Request, context: Context, rollout: Rollout, marks: Marks) -> dict[str, Any]:
    names = _COUNTS if rollout.playback is None else (*_COUNTS, "inherited", "inherited_tokens")
    counts = {name: rollout.counts.get(name, 0) for name in names}
    if "cached_tokens" in rollout.counts:  # not every engine reports them
        counts["cached_tokens"] = rollout.counts["cached_tokens"]
    return {
        **_terms(request, context, rollout),
        **shown_playback(rollout),
        **named(rollout, "status", "reason", "policy"),
        **({"dispatch": {key: rollout.osmosis[key] for key in _DISPATCH}} if rollout.osmosis else {}),
        "task": rollout.task,
        "counts": {**counts, "undelivered": len(marks.undelivered)},
        "errors": rollout.errors,
        "drift": None if rollout.drift is None else rollout.drift.kinds,
        **named(rollout, "reward", "step_rewards", *(("thread_rewards",) if rollout.thread_rewards else ())),
        **named(rollout, "advantages", "metadata", "created_ms", "began_ms", "touched_ms", "finished_ms", "claimed_by"),
    }


def shown_playback(rollout: Rollout) -> dict[str, Any]:
    """Return the field `playback`: what answers the calls of a playback, and how many were. {} for another rollout."""
    if rollout.playback is None:
        return {}
    answered, mismatch = rollout.counts.get("inherited", 0), rollout.mismatch
    progress = {
        "answered": answered,
        "live": rollout.counts.get("steps", 0) - answered,
        "branched": rollout.has_branched,
        "mismatches": 0 if mismatch is None else mismatch.count,
        **({} if mismatch is None else {"first_mismatch": mismatch.first}),
    }
    return {"playback": {**_tape(rollout.playback), **progress}}


def _tape(playback: Playback) -> dict[str, Any]:
    """Return what does not change: the source, its step at which the playback branches, and how much can be answered."""
    return {
        "of": playback.of,
        **branch_step(playback),
        **named(playback, "on_mismatch", *(("ignore",) if playback.ignore else ()), "answerable"),
        "unanswerable": playback.end - playback.answerable,
    }


def branch_step(playback: Playback) -> dict[str, str]:
    """Return the step of the source at which a playback branches, if it does."""
    return {name: step for name in ("before", "through") if (step := getattr(playback, name)) is not None}


_DISPATCH: Final = ("server", "protocol", "state")
_MERGED: Final = ("step_rewards", "thread_rewards")
_COUNTS: Final = (
    "steps", "exact", "flagged", "error", "late", "sampled_tokens", "prompt_tokens", "mask_mismatches",
)  # fmt: skip


def _terms(request: web.Request, context: Context, rollout: Rollout) -> dict[str, Any]:
    """Return the terms of a rollout and its base URL."""
    return {
        **named(rollout, "rollout_id", "group_id"),
        "base_url": f"{model_url(request, context)}{path_prefix(rollout.rollout_id)}/v1",
        "model": rollout.model,
        "sampling": named(rollout.sampling, "override", "default", "cap"),
        **named(rollout, "tools", "limits", "deadline_s", "idle_s", "start_s", "reply"),
        **({} if rollout.continuation is None else {"continuation": rollout.continuation}),
        **({} if rollout.playback is None else {"playback": _tape(rollout.playback)}),
        "metadata": rollout.metadata,
    }


LIST_BUDGET_S: Final = 0.25  # of a response that reads all rollouts or groups for those that match
_MATCHES: Final = 5  # of a rollout
_PAGE: Final = 16  # rollouts that are searched before the time is checked
_BUDGET_S: Final = 1.0


async def search_rollouts(request: web.Request) -> web.Response:
    """`GET /search?q=&status=&group_id=&limit=&cursor=`: newest first.

    A response ends after a second of work or `limit` rollouts with matches; `cursor` continues it.
    """
    context, asked = request.app[CONTEXT], query_from(request, Search)
    needle, cursor, began = Needle(asked.q), asked.cursor, context.clock.monotonic()
    found: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    rollouts = count = 0
    oldest_ms = None
    while True:
        page = await _candidates(context, asked, cursor, _PAGE)
        for stored in await context.store.get_each(page.names):
            try:
                rollout = None if stored is None else read_rollout(stored)
                if rollout is None or not asked.matches(rollout):
                    continue
                steps = await read_steps(context.store, rollout, whole=True)
            except NotFound:
                continue  # deleted meanwhile
            except Damaged as damage:
                unreadable += left_out([damage], context.metrics)
                continue
            rollouts, count, oldest_ms = rollouts + 1, count + len(steps), rollout.created_ms
            if matches := await aside(weights_of(steps).packed, partial(search, steps, needle, _MATCHES)):
                shown = named(rollout, "rollout_id", "group_id", "status", "reward", "created_ms")
                found.append({**shown, "matches": list(map(asdict, matches))})
        cursor = page.cursor
        if cursor is None or len(found) >= asked.limit or context.clock.monotonic() - began >= _BUDGET_S:
            break
    searched = {"rollouts": rollouts, "steps": count, "oldest_ms": oldest_ms, "unreadable": len(unreadable)}
    left = {"unreadable": unreadable} if unreadable else {}
    return json_response({"query": asked.q, "rollouts": found, "searched": searched, "cursor": cursor, **left})


_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def show_events(request: web.Request) -> web.StreamResponse:
    """`GET /events?rollout_id=`: stream server-sent events of every process that shares the store, from now on.

    An event `changed` for each stored step (`index`, `step_id`) and each other change of a rollout (both null); a comment
    every few seconds. The stream ends when the store is unreachable or the proxy stops. Events are not repeated: clients
    read the rollouts again when they reconnect.
    """
    context = request.app[CONTEXT]
    rollout_id = query_from(request, ShowEvents).rollout_id
    response = web.StreamResponse(headers=_HEADERS)

    async def send(changes: AsyncIterator[Change | None]) -> None:
        async for change in changes:
            if change is None:
                await response.write(b": quiet\n\n")
            elif rollout_id in (None, change.rollout):
                await response.write(to_event(change))

    async with context.store.changes.subscribe() as changes:
        await response.prepare(request)
        await response.write(b": following\n\n")
        sending = asyncio.create_task(send(changes))  # noqa: TID251 - held by this very function
        stopping = asyncio.create_task(context.stopping.wait())  # noqa: TID251
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            stopping.cancel()
            with suppress(StorageError, OSError, asyncio.CancelledError):
                await sending
    return response


def to_event(change: Change) -> bytes:
    """Return a change as an event. Invalid characters of names are replaced."""
    name = change.rollout.encode("utf-8", "replace").decode()
    fields = {"rollout_id": name, "index": change.index, "step_id": change.record}
    return b"event: changed\ndata: " + orjson.dumps(fields) + b"\n\n"
