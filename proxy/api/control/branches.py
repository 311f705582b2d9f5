"""The route that returns the values of a rollout's states."""

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import ShowValues
from proxy.api.http import json_response
from proxy.api.requests import query_from, rollout_from
from proxy.rollouts.values import read_values


async def show_values(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/values`: the mean reward of the branches before each step that has some, in the order of the steps.

    409 if branches were sampled by other policy versions than the step, unless `any_version`.
    """
    context = request.app[CONTEXT]
    asked, rollout = query_from(request, ShowValues), await rollout_from(request)
    values = await read_values(context.store, rollout, context.metrics, any_version=asked.any_version)
    return json_response({"rollout_id": rollout.rollout_id, "values": [value.as_dict() for value in values]})
