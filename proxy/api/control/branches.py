"""The routes that open and list the branches of a rollout, and return the values of its states."""

from typing import Any

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.groups import opened_group
from proxy.api.control.rollouts import branch_step
from proxy.api.control.schemas import OpenBranches, OpenGroup, ShowValues
from proxy.api.http import json_response
from proxy.api.requests import body_from, named, query_from, rollout_from, validated
from proxy.rollouts.steps import decode_records
from proxy.rollouts.values import read_branches, read_values


async def open_branches(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/branches`: open a group of playbacks of a rollout before a step, as `POST /groups` does.

    Playbacks before the first step have an empty tape, and are sampled at once.
    """
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    body = await body_from(request, OpenBranches)
    own = {"before", "count", "ignore", "presets"}
    terms: dict[str, Any] = {"of": rollout.rollout_id, "ignore": body.ignore, "presets": body.presets}
    if body.before is not None:
        terms["before"] = body.before
    else:
        first = await context.store.read(rollout.rollout_id, 0, 1)
        steps = await decode_records(context.store, rollout, first, 0, whole=False)
        terms |= {"before": steps[0].step_id if steps else None, "on_mismatch": "sample"}
    given = body.model_dump(exclude=own, exclude_none=True, exclude_defaults=True)
    group = {**given, "size": body.count, "rollout": {**given.get("rollout", {}), "playback": terms}}
    return await opened_group(request, validated(OpenGroup, group))


async def list_branches(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/branches`: the rollouts that play a rollout back, each with its step there and its reward.

    Without those that failed and were replaced, or are surplus.
    """
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    branches = [
        {
            **named(branch.rollout, "rollout_id", "group_id", "status", "reward"),
            **branch_step(branch.playback),
            "branched": branch.has_branched,
        }
        for branch in await read_branches(context.store, rollout, context.metrics)
    ]
    return json_response({"rollout_id": rollout.rollout_id, "branches": branches})


async def show_values(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/values`: the mean reward of the branches before each step that has some, in the order of the steps.

    409 if branches were sampled by other policy versions than the step, unless `any_version`.
    """
    context = request.app[CONTEXT]
    asked, rollout = query_from(request, ShowValues), await rollout_from(request)
    values = await read_values(context.store, rollout, context.metrics, any_version=asked.any_version)
    return json_response({"rollout_id": rollout.rollout_id, "values": [value.as_dict() for value in values]})
