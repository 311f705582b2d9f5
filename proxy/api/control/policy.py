"""The routes of `/policy`: the version of the weights that the trainer announces, and the pause of calls.

The version is recorded in steps whose engine reports none.
"""

from typing import Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import PausePolicy, PutPolicy, body_from
from proxy.api.http import json_response
from proxy.errors import BadRequest
from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, read_policy

_MAX_DRAIN_S: Final = 3600


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policy`: the announced version, or null."""
    return json_response({"version": read_policy(await request.app[CONTEXT].store.announcements.read())})


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policy`: announce the version of all calls that begin after the response, in all processes of the store."""
    version = str((await body_from(request, PutPolicy)).version)
    context = request.app[CONTEXT]
    context.policy.apply(
        {POLICY_ANNOUNCEMENT: await context.store.announcements.announce(POLICY_ANNOUNCEMENT, orjson.dumps(version))}
    )
    return json_response({"version": version})


async def pause_policy(request: web.Request) -> web.Response:
    """`POST /policy/pause`: after the response, no process that shares the store sends a new call to an engine.

    `?drain_s=` waits up to that many seconds until no call is in flight; then `in_flight: abort` stops those that are left.
    `drained` is whether all processes agree.
    """
    drain_s = _seconds(request, "drain_s")
    body = await body_from(request, PausePolicy)
    pause = request.app[CONTEXT].pause
    in_flight, is_drained = await pause.drained(body.mode, drain_s=drain_s, aborts=body.in_flight == "abort")
    return json_response({"mode": pause.mode, "in_flight": in_flight, "drained": is_drained})


async def resume_policy(request: web.Request) -> web.Response:
    """`POST /policy/resume`: waiting calls continue, with the policy version that is announced now."""
    context = request.app[CONTEXT]
    await context.pause.announce(None)
    in_flight, _ = await context.pause.beat()
    return json_response({"mode": context.pause.mode, "in_flight": in_flight})


def _seconds(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_DRAIN_S:
        raise BadRequest(f"{name} must be a number of seconds from 0 to {_MAX_DRAIN_S}, not {text!r}.", param=name)
    return seconds
