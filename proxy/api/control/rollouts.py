"""Rollouts: opened, listed, looked at, rewarded, finished, deleted.

Holds the routes of `/rollouts` that are about the rollout itself. Every change is a compare-and-set of the store's, so that
two replicas cannot both be right about different things.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from proxy.api.api_keys import mint
from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import FinishRollout, OpenRollout, PatchRollout, body_from
from proxy.api.query import enum_param, int_param, reject_unknown_params, rollout_from, rollout_id_from
from proxy.api.urls import model_url, prefix_of
from proxy.clock import new_id
from proxy.errors import BadCall, Conflict
from proxy.rollouts.group import join
from proxy.rollouts.rollout import STATUSES, Rollout, no_rollout, own_metadata, read_marks, read_rollout, write_fields
from proxy.rollouts.steps import check_step_rewards
from storage.errors import FieldsChanged
from storage.types import StoredEntity

_LISTED = 100


_MOST_LISTED = 1000


_FIELDS_OF_OPENING = ("group_id", "metadata", "model", "sampling", "tools", "limits", "reply")


async def open_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts`: 201; 200 and the same answer for the same body again; 409 for another body."""
    context = request.app[CONTEXT]
    opening = await body_from(request, OpenRollout)
    name = opening.rollout_id or new_id(context.clock)
    said = opening.model_dump(exclude_none=True, exclude_defaults=True)
    fields = write_fields({key: said.get(key) for key in _FIELDS_OF_OPENING})
    fields["opened_with"] = orjson.dumps({**said, "rollout_id": name}, option=orjson.OPT_SORT_KEYS)
    stored = await context.store.open(name, fields, now_ms=context.clock.now_ms())
    if stored.fields.get("opened_with") != fields["opened_with"]:
        raise Conflict(
            f"the rollout {name!r} is there already, opened with other terms"
            if "opened_with" in stored.fields
            else f"the rollout {name!r} is there already: a call brought it into being",
            param="rollout_id",
        )
    if opening.group_id is not None:
        await join(context.store, context.clock, stored, opening.group_id)
    return _json(opened(request, context, stored), status=201 if stored.created else 200)


async def list_rollouts(request: web.Request) -> web.Response:
    """`GET /rollouts`: newest first. `since` is unix seconds; filters may leave a page short of its limit."""
    context = request.app[CONTEXT]
    reject_unknown_params(request, ("status", "group_id", "since", "limit", "cursor"))
    limit = int_param(request, "limit", _LISTED, least=1, most=_MOST_LISTED) or _LISTED
    since = int_param(request, "since", None, least=0)
    try:
        page = await context.store.list(
            cursor=request.query.get("cursor"), limit=limit, since_ms=None if since is None else since * 1000
        )
    except ValueError as error:
        raise BadCall(str(error), param="cursor") from None
    wanted = filter_of(request)
    found = await asyncio.gather(*map(context.store.get, page.names))
    rollouts = [rollout for stored in found if stored is not None and wanted(rollout := read_rollout(stored))]
    shown = await asyncio.gather(*(_shown(request, context, rollout) for rollout in rollouts))
    listed = [{**one, "metadata": own_metadata(one["metadata"])} for one in shown]
    return _json({"rollouts": listed, "cursor": page.cursor})


def filter_of(request: web.Request) -> "RolloutFilter":
    """The filter that a query asks for. Raises BadCall for an unknown status."""
    status = enum_param(request, "status", STATUSES, "open") if "status" in request.query else None
    return RolloutFilter(status, request.query.get("group_id"))


class RolloutFilter:
    """Which rollouts are wanted: of a status, of a group; None means any."""

    __slots__ = ("_group_id", "_status")

    def __init__(self, status: str | None, group_id: str | None) -> None:
        self._status = status
        self._group_id = group_id

    def __call__(self, rollout: Rollout) -> bool:
        """Whether this one is."""
        return self._status in (None, rollout.status) and self._group_id in (None, rollout.group_id)


async def show_rollout(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}`. What is not known of its drift is looked for again: the next look may have it."""
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    context.drift_totals.complete(rollout)
    return _json(await _shown(request, context, rollout))


async def patch_rollout(request: web.Request) -> web.Response:
    """`PATCH /rollouts/{id}`: rewards, advantages, metadata; what is not given stays.

    Rewards and advantages stay as they are from when the rollout's group is claimed.
    """
    context = request.app[CONTEXT]
    rollout = await rollout_from(request)
    patch = await body_from(request, PatchRollout)
    await check_step_rewards(context.store, rollout, patch.step_rewards)
    given = patch.model_dump(include={"reward", "advantages", "metadata"} & patch.model_fields_set)
    while True:
        fields = _changes(rollout, given, patch.step_rewards)
        signals = fields.keys() - {"metadata"}
        if signals and rollout.claimed_by is not None:
            raise Conflict(
                f"the group of rollout {rollout.rollout_id!r} was claimed: its rewards and advantages stay as they are",
                param=min(signals),
            )
        expect = write_fields({"step_rewards": rollout.step_rewards or None})
        expected = {"claimed_by": None, "step_rewards": expect.get("step_rewards")} if signals else {}
        try:
            stored = await context.store.update_if(
                rollout.rollout_id, fields, expect=expected, now_ms=context.clock.now_ms()
            )
        except FieldsChanged as changed:
            rollout = read_rollout(changed.rollout)  # somebody was quicker: look again
            continue
        if stored is None:
            raise no_rollout(rollout.rollout_id)
        return _json(await _shown(request, context, read_rollout(stored)))


def _changes(rollout: Rollout, given: Mapping[str, Any], step_rewards: Mapping[str, Any]) -> dict[str, bytes | None]:
    """The fields that are to change; what is asked again changes nothing."""
    merged = {**rollout.step_rewards, **step_rewards}
    wanted = {**given, **({"step_rewards": merged} if step_rewards else {})}
    return {
        name: None if value is None else orjson.dumps(value)
        for name, value in wanted.items()
        if value != getattr(rollout, name)
    }


async def finish_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/finish`: once; the same again changes nothing, another status is 409."""
    context = request.app[CONTEXT]
    said = await body_from(request, FinishRollout)
    rollout = await rollout_from(request)
    finished = await context.finisher.finish(rollout, said.status, reward=said.reward, metadata=said.metadata)
    return _json(await _shown(request, context, finished))


async def delete_rollout(request: web.Request) -> web.Response:
    """`DELETE /rollouts/{id}`: 204, also when there is nothing (any more)."""
    await request.app[CONTEXT].store.delete(rollout_id_from(request))
    return web.Response(status=204)


def opened(request: web.Request, context: Context, stored: StoredEntity) -> dict[str, Any]:
    """What an opening answers: the rollout without what changes with time, so that it is the same answer again."""
    shown = _terms(request, context, read_rollout(stored))
    shown["metadata"] = own_metadata(shown["metadata"])
    key = mint(stored.name, stored.incarnation, context.secret)
    return {**shown, "status": "open", "created_ms": stored.created_ms, "api_key": key}


async def _shown(request: web.Request, context: Context, rollout: Rollout) -> dict[str, Any]:
    """A rollout as people see it."""
    marks = read_marks(await context.store.marks(rollout.rollout_id))
    counts = {name: rollout.counts.get(name, 0) for name in _COUNTS}
    return {
        **_terms(request, context, rollout),
        "status": rollout.status,
        **({"dispatch": {key: rollout.osmosis[key] for key in _DISPATCH}} if rollout.osmosis else {}),
        "counts": {**counts, "undelivered": len(marks.undelivered)},
        "drift": None if rollout.drift is None else rollout.drift.kinds,
        "reward": rollout.reward,
        "step_rewards": rollout.step_rewards,
        "advantages": rollout.advantages,
        "metadata": rollout.metadata,
        "created_ms": rollout.created_ms,
        "touched_ms": rollout.touched_ms,
        "finished_ms": rollout.finished_ms,
        "claimed_by": rollout.claimed_by,
    }


_DISPATCH = ("server", "protocol", "state")
_COUNTS = ("steps", "exact", "flagged", "error", "late", "sampled_tokens", "prompt_tokens", "mask_mismatches")


def _terms(request: web.Request, context: Context, rollout: Rollout) -> dict[str, Any]:
    """What a rollout was opened with, and where agents reach it."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "base_url": f"{model_url(request, context)}{prefix_of(rollout.rollout_id)}/v1",
        "model": rollout.model,
        "sampling": {
            "override": rollout.sampling.override,
            "default": rollout.sampling.default,
            "cap": rollout.sampling.cap,
        },
        "tools": rollout.tools,
        "limits": rollout.limits,
        "reply": rollout.reply,
        "metadata": rollout.metadata,
    }


def _json(value: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
