"""The dispatch of a rollout to one of Osmosis' rollout servers.

A rollout is dispatched once, and only to configured servers. If the server fails, the rollout is finished as failed, with the
reason.
"""

import asyncio
from hashlib import blake2b
from typing import Any, Final

from aiohttp import web

from proxy.api.api_keys import mint
from proxy.api.body import read_bytes
from proxy.api.compat.osmosis.callbacks import take_result, ticket
from proxy.api.compat.osmosis.schemas import InitAnswer, RolloutResult, kept_result, validated
from proxy.api.compat.osmosis.servers import RolloutServers, ServerFault
from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import DispatchRollout, read_as
from proxy.api.http import json_response
from proxy.api.query import rollout_from, route
from proxy.api.urls import model_url
from proxy.errors import Conflict, ProxyError, RequestTooLarge, UnprocessableRequest
from proxy.rollouts.rollout import Rollout, no_rollout, read_rollout, write_fields
from proxy.telemetry.logs import LOG
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from storage.errors import FieldsChanged, StorageError

ROLLOUT_SERVERS = web.AppKey("rollout_servers", RolloutServers)
_NOT_FORWARDED: Final = {"server", "protocol", "wait"}  # fields of a dispatch that are not sent to the server


async def dispatch_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/dispatch`: 202 at once, or with `wait` 200 after the server's response.

    A repeated dispatch starts nothing and is 202; a different one is 409.
    """
    context, servers = request.app[CONTEXT], request.app[ROLLOUT_SERVERS]
    text = await read_bytes(request)
    dispatch = await off_loop(len(text), LARGE_BYTES, read_as, DispatchRollout, text)
    digest = (await off_loop(len(text), LARGE_BYTES, blake2b, text, digest_size=16)).hexdigest()
    servers.named(dispatch.server)
    rollout = await rollout_from(request)
    state = "starting" if dispatch.protocol == "async" else "started"
    fields = write_fields({"osmosis": ticket(dispatch.server, dispatch.protocol, digest, state)})
    try:
        stored = await context.store.update_if(
            rollout.rollout_id, fields, expect={"osmosis": None, "status": None}, now_ms=context.clock.now_ms()
        )
    except FieldsChanged as changed:
        rollout = read_rollout(changed.rollout)
        if rollout.osmosis.get("asked") != digest:
            state = f"dispatched to {rollout.osmosis['server']}" if rollout.osmosis else rollout.status or ""
            raise Conflict(f"Rollout {rollout.rollout_id!r} is already {state}.", param="rollout_id") from None
        return _answer(rollout, status=202)
    if stored is None:
        raise no_rollout(rollout.rollout_id)
    rollout = read_rollout(stored)
    body = _rollout_request(dispatch, rollout, servers.server_url or model_url(request, context))
    key = mint(rollout.rollout_id, rollout.incarnation, context.secret, dispatch=digest)
    body["callback_api_key" if dispatch.protocol == "sync" else "api_key"] = key
    task = servers.start(_run(context, servers, rollout, dispatch, body))
    if not dispatch.wait:
        return _answer(rollout, status=202)
    await asyncio.shield(task)
    return _answer(await rollout_from(request), status=200)


def _rollout_request(dispatch: DispatchRollout, rollout: Rollout, server_url: str) -> dict[str, Any]:
    """Return the RolloutRequest with the field names of its protocol."""
    fields = dispatch.model_dump(exclude=_NOT_FORWARDED, exclude_none=True)
    params = fields.pop("sampling_params", None) or fields.pop("completion_params", None) or {}
    name = "sampling_params" if dispatch.protocol == "sync" else "completion_params"
    return {**fields, name: params, "rollout_id": rollout.rollout_id, "server_url": server_url}


async def _run(
    context: Context, servers: RolloutServers, rollout: Rollout, dispatch: DispatchRollout, body: dict[str, Any]
) -> None:
    """Run the rollout: in the synchronous protocol to its end, in the asynchronous one until the server has accepted it."""
    try:
        if dispatch.protocol == "async":
            init = validated(InitAnswer, await servers.post(dispatch.server, "/v1/rollout/init", body))
            await _begin(context, rollout, init)
            return
        result = _result_from(rollout, await servers.post(dispatch.server, "/rollout", body))
    except ServerFault as fault:
        result = _failed(rollout, fault.category, fault.message, fault.status)
    except (UnprocessableRequest, RequestTooLarge) as fault:
        message = f"Rollout server {dispatch.server} returned an invalid response: {fault.message}"
        result = _failed(rollout, "validation_error", message)
    except asyncio.CancelledError:
        message = "The proxy shut down before the rollout server responded."
        await _settle(context, rollout, _failed(rollout, "aborted", message), is_aborted=True)
        raise
    await _settle(context, rollout, result)


def _result_from(rollout: Rollout, body: dict[str, Any]) -> RolloutResult:
    result = validated(RolloutResult, body)
    if result.rollout_id != rollout.rollout_id:
        raise UnprocessableRequest(f"rollout_id: the response is for another rollout, {result.rollout_id!r}.")
    kept_result(result)
    return result


async def _begin(context: Context, rollout: Rollout, init: InitAnswer) -> None:
    """Store the tools that the server returned, and accept calls."""
    fields = write_fields({"osmosis": {**rollout.osmosis, "state": "started"}, "tools": init.tools or None})
    try:
        await context.store.update_if(rollout.rollout_id, fields, expect={}, now_ms=context.clock.now_ms())
    except StorageError as error:
        LOG.error("Tools of a rollout not stored: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}})


async def _settle(context: Context, rollout: Rollout, result: RolloutResult, *, is_aborted: bool = False) -> None:
    """Finish the rollout; one that was finished or deleted meanwhile is not changed."""
    try:
        await take_result(context, rollout, result, status="aborted" if is_aborted else None)
    except (ProxyError, StorageError) as error:
        LOG.error(
            "Result of a rollout server not stored: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}}
        )


def _failed(rollout: Rollout, category: str, message: str, status: int | None = None) -> RolloutResult:
    """Return the result of a rollout whose server failed."""
    fields = {"error_category": category, **({} if status is None else {"http_status": status})}
    return RolloutResult(rollout_id=rollout.rollout_id, status="ERROR", error_message=message, extra_fields=fields)


DISPATCH_ROUTES: Final = (
    route(
        "post", "/rollouts/{rollout_id:[^/]+}/dispatch", dispatch_rollout, "Dispatch a rollout to a rollout server.",
        202, 200, 400, 404, 409, 422, body=DispatchRollout,
    ),
)  # fmt: skip


def _answer(rollout: Rollout, *, status: int) -> web.Response:
    payload = {
        "rollout_id": rollout.rollout_id,
        "server": rollout.osmosis.get("server"),
        "protocol": rollout.osmosis.get("protocol"),
        "status": rollout.status,
        "tools": rollout.tools,
        "result": rollout.metadata.get("osmosis"),
    }
    return json_response(payload, status=status)
