"""The policy: which version of the weights the engines serve, as the trainer announces it.

Holds the routes of `/policy`, pausing among them. The version is stamped on steps whose engine reports none of its own.
"""

import asyncio
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import PausePolicy, PutPolicy, body_from
from proxy.errors import BadCall
from proxy.rollouts.policy import POLICY_ANNOUNCEMENT, read_policy

_LONGEST_DRAIN_S: Final = 3600
_AWARE_S: Final = 2  # every process beats once a second: one that does not know of the pause after this is away
_LOOK_S: Final = 0.05


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policy`: the version that is announced, null if none is."""
    return _json({"version": read_policy(await request.app[CONTEXT].store.announcements.read())})


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policy`: every call that begins after the answer, at any process that shares the store, is stamped with it."""
    said = await body_from(request, PutPolicy)
    version = str(said.version)
    context = request.app[CONTEXT]
    context.policy.apply(
        {POLICY_ANNOUNCEMENT: await context.store.announcements.announce(POLICY_ANNOUNCEMENT, orjson.dumps(version))}
    )
    return _json({"version": version})


async def pause_policy(request: web.Request) -> web.Response:
    """`POST /policy/pause`: from the answer on, no process that shares the store lets a new call through to an engine.

    `?drain_s=` waits until none is in flight, at the most for so long; `drained` says whether all processes agree.
    """
    drain_s = _seconds(request, "drain_s")
    mode = (await body_from(request, PausePolicy)).mode
    context = request.app[CONTEXT]
    number = await context.pause.announce(mode)
    began = context.clock.monotonic()
    while True:
        in_flight, unaware = await context.pause.beat()
        past = context.clock.monotonic() - began
        is_over = context.pause.number != number or (past >= drain_s if not unaware else past >= max(drain_s, _AWARE_S))
        if is_over or not (in_flight or unaware):
            break
        await asyncio.sleep(_LOOK_S)
    is_drained = not in_flight and not unaware and context.pause.number == number
    return _json({"mode": context.pause.mode, "in_flight": in_flight, "drained": is_drained})


async def resume_policy(request: web.Request) -> web.Response:
    """`POST /policy/resume`: calls that wait go on, with the policy version that is announced now."""
    context = request.app[CONTEXT]
    await context.pause.announce(None)
    in_flight, _ = await context.pause.beat()
    return _json({"mode": context.pause.mode, "in_flight": in_flight})


def _seconds(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_DRAIN_S:
        raise BadCall(f"{name} is {text!r}; it is a number of seconds from 0 to {_LONGEST_DRAIN_S}", param=name)
    return seconds


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
