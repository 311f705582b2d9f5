"""The dispatch of a rollout to one of Osmosis' rollout servers.

A rollout is dispatched once, and only to configured servers. If the server fails, the rollout is finished as failed, with the
reason.
"""

import asyncio
from hashlib import blake2b
from typing import Any, Final

from aiohttp import web

from proxy.api.api_keys import mint
from proxy.api.body_reader import read_bytes
from proxy.api.compat.osmosis.callbacks import take_result, ticket
from proxy.api.compat.osmosis.schemas import InitAnswer, RolloutResult, kept_result, validated
from proxy.api.compat.osmosis.servers import RolloutServers, ServerFault
from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import DispatchRollout, read_as
from proxy.api.http import json_response
from proxy.api.query import rollout_from
from proxy.api.urls import model_url
from proxy.errors import Conflict, ProxyError, RequestTooLarge, UnprocessableRequest
from proxy.rollouts.rollout import Rollout, no_rollout, read_rollout, write_fields
from proxy.telemetry.logs import LOG
from proxy.upstream.concurrency import off_loop
from storage.errors import FieldsChanged, StorageError

ROLLOUT_SERVERS = web.AppKey("rollout_servers", RolloutServers)
_OURS: Final = {"server", "protocol", "wait"}  # fields of a dispatch that the server does not get


async def dispatch_rollout(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/dispatch`: 202 at once, or with `wait` 200 when the server has answered.

    The same again starts nothing and is 202; another dispatch of the rollout is 409.
    """
    context, servers = request.app[CONTEXT], request.app[ROLLOUT_SERVERS]
    text = await read_bytes(request)
    asked = await off_loop(len(text), read_as, DispatchRollout, text)
    digest = (await off_loop(len(text), blake2b, text, digest_size=16)).hexdigest()
    servers.named(asked.server)
    rollout = await rollout_from(request)
    state = "starting" if asked.protocol == "async" else "started"
    kept = write_fields({"osmosis": ticket(asked.server, asked.protocol, digest, state)})
    try:
        stored = await context.store.update_if(
            rollout.rollout_id, kept, expect={"osmosis": None, "status": None}, now_ms=context.clock.now_ms()
        )
    except FieldsChanged as changed:
        rollout = read_rollout(changed.rollout)
        if rollout.osmosis.get("asked") != digest:
            why = f"dispatched to {rollout.osmosis['server']}" if rollout.osmosis else rollout.status
            raise Conflict(f"Rollout {rollout.rollout_id!r} is already {why}.", param="rollout_id") from None
        return _answer(rollout, status=202)
    if stored is None:
        raise no_rollout(rollout.rollout_id)
    rollout = read_rollout(stored)
    body = _request_of(asked, rollout, servers.server_url or model_url(request, context))
    key = mint(rollout.rollout_id, rollout.incarnation, context.secret, dispatch=digest)
    body["callback_api_key" if asked.protocol == "sync" else "api_key"] = key
    task = servers.hold(_run(context, servers, rollout, asked, body))
    if not asked.wait:
        return _answer(rollout, status=202)
    await asyncio.shield(task)
    return _answer(await rollout_from(request), status=200)


def _request_of(asked: DispatchRollout, rollout: Rollout, server_url: str) -> dict[str, Any]:
    """The RolloutRequest, by the names of its protocol."""
    said = asked.model_dump(exclude=_OURS, exclude_none=True)
    params = said.pop("sampling_params", None) or said.pop("completion_params", None) or {}
    name = "sampling_params" if asked.protocol == "sync" else "completion_params"
    return {**said, name: params, "rollout_id": rollout.rollout_id, "server_url": server_url}


async def _run(
    context: Context, servers: RolloutServers, rollout: Rollout, asked: DispatchRollout, body: dict[str, Any]
) -> None:
    """Have the rollout run, to its end or, asynchronously, to its beginning."""
    try:
        if asked.protocol == "async":
            init = validated(InitAnswer, await servers.ask(asked.server, "/v1/rollout/init", body))
            await _begin(context, rollout, init)
            return
        result = _result_of(rollout, await servers.ask(asked.server, "/rollout", body))
    except ServerFault as fault:
        result = _failed(rollout, fault.category, fault.message, fault.status)
    except (UnprocessableRequest, RequestTooLarge) as fault:
        told = f"Rollout server {asked.server} returned an invalid response: {fault.message}"
        result = _failed(rollout, "validation_error", told)
    except asyncio.CancelledError:
        told = "The proxy shut down before the rollout server responded."
        await _settle(context, rollout, _failed(rollout, "aborted", told), is_aborted=True)
        raise
    await _settle(context, rollout, result)


def _result_of(rollout: Rollout, told: dict[str, Any]) -> RolloutResult:
    result = validated(RolloutResult, told)
    if result.rollout_id != rollout.rollout_id:
        raise UnprocessableRequest(f"rollout_id: the response is for another rollout, {result.rollout_id!r}.")
    kept_result(result)
    return result


async def _begin(context: Context, rollout: Rollout, init: InitAnswer) -> None:
    """Keep the tools that the server named; calls may come now."""
    fields = write_fields({"osmosis": {**rollout.osmosis, "state": "started"}, "tools": init.tools or None})
    try:
        await context.store.update_if(rollout.rollout_id, fields, expect={}, now_ms=context.clock.now_ms())
    except StorageError as error:
        LOG.error("Tools of a rollout not stored: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}})


async def _settle(context: Context, rollout: Rollout, result: RolloutResult, *, is_aborted: bool = False) -> None:
    """Finish the rollout; one that was finished or deleted meanwhile stays as it is."""
    try:
        await take_result(context, rollout, result, status="aborted" if is_aborted else None)
    except (ProxyError, StorageError) as error:
        LOG.error(
            "Result of a rollout server not stored: %s", error, extra={"fields": {"rollout_id": rollout.rollout_id}}
        )


def _failed(rollout: Rollout, category: str, message: str, status: int | None = None) -> RolloutResult:
    """The result of a rollout that its server did not bring to an end."""
    fields = {"error_category": category, **({} if status is None else {"http_status": status})}
    return RolloutResult(rollout_id=rollout.rollout_id, status="ERROR", error_message=message, extra_fields=fields)


def _answer(rollout: Rollout, *, status: int) -> web.Response:
    told = {
        "rollout_id": rollout.rollout_id,
        "server": rollout.osmosis.get("server"),
        "protocol": rollout.osmosis.get("protocol"),
        "status": rollout.status,
        "tools": rollout.tools,
        "result": rollout.metadata.get("osmosis"),
    }
    return json_response(told, status=status)
