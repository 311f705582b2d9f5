"""The routes that return the branches of a rollout and the values of its states."""

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.rollouts import branch_step
from proxy.api.control.schemas import ShowValues
from proxy.api.http import json_response
from proxy.api.requests import named, query_from, rollout_from
from proxy.rollouts.values import read_branches, read_values


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
