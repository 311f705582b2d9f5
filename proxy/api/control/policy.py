"""The routes of `/policy`: the version of the weights that the trainer announces, and the pause of calls.

The version is recorded in steps whose engine reports none.
"""

import asyncio
from typing import Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import PausePolicy, PutPolicy, body_from
from proxy.api.http import json_response
from proxy.errors import BadRequest
from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, read_policy

_MAX_DRAIN_S: Final = 3600
_AWARE_TIMEOUT_S: Final = 2  # heartbeats are sent every second: a process that is unaware after this is unreachable
_POLL_INTERVAL_S: Final = 0.05


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

    `?drain_s=` waits up to that many seconds until no call is in flight; `drained` is whether all processes agree.
    """
    drain_s = _seconds(request, "drain_s")
    mode = (await body_from(request, PausePolicy)).mode
    context = request.app[CONTEXT]
    number = await context.pause.announce(mode)
    began = context.clock.monotonic()
    while True:
        in_flight, unaware = await context.pause.beat()
        past = context.clock.monotonic() - began
        is_over = context.pause.number != number or (
            past >= drain_s if not unaware else past >= max(drain_s, _AWARE_TIMEOUT_S)
        )
        if is_over or not (in_flight or unaware):
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    is_drained = not in_flight and not unaware and context.pause.number == number
    return json_response({"mode": context.pause.mode, "in_flight": in_flight, "drained": is_drained})


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
