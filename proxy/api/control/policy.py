"""The routes of `/policy`: the version of the weights that the trainer announces, and the pause of calls.

The version is recorded in steps whose engine reports none.
"""

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import MAX_DRAIN_S, LoadAdapter, PausePolicy, PutPolicy, body_from
from proxy.api.http import json_response
from proxy.errors import BadRequest
from proxy.rollouts.adapter_updates import AdapterUpdate
from proxy.rollouts.policy import read_policy


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policy`: the announced version, or null."""
    return json_response({"version": read_policy(await request.app[CONTEXT].store.announcements.read())})


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policy`: announce the version of all calls that begin after the response, in all processes of the store."""
    version = str((await body_from(request, PutPolicy)).version)
    context = request.app[CONTEXT]
    await context.policy.announce(context.store.announcements, version)
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


async def load_adapter(request: web.Request) -> web.Response:
    """`POST /policy/adapter`: load a LoRA adapter into every endpoint under a pause, announce its version, and resume."""
    body = await body_from(request, LoadAdapter)
    update = AdapterUpdate(
        body.name, body.path, str(body.version), body.mode, body.drain_s, aborts=body.in_flight == "abort"
    )
    endpoints = await request.app[CONTEXT].adapter_updates.apply(update)
    return json_response({"name": body.name, "path": body.path, "version": update.version, "endpoints": endpoints})


def _seconds(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise BadRequest(f"{name} must be a number of seconds from 0 to {MAX_DRAIN_S}, not {text!r}.", param=name)
    return seconds
