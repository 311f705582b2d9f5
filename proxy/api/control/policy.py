"""The routes of `/policies/{policy}`, and of `/policy`, which is the policy `default`.

A policy has a version of its weights, which the trainer announces, and a pause of its calls. The version is recorded in steps
whose engine reports none.
"""

from typing import Any

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import Drain, LoadAdapter, PausePolicy, PutPolicy
from proxy.api.http import json_response
from proxy.api.requests import body_from, query_from
from proxy.errors import UnprocessableRequest
from proxy.rollouts.adapter_updates import AdapterUpdate
from proxy.rollouts.policy import Announced, Policy, read_announced
from proxy.trajectory.step import DEFAULT_POLICY


async def list_policies(request: web.Request) -> web.Response:
    """`GET /policies`: all policies, with their announced versions."""
    context = request.app[CONTEXT]
    announced = await context.store.announcements.read()
    return json_response(
        {
            "policies": [
                {
                    "name": policy.name,
                    "models": policy.models,
                    "train": policy.is_trained,
                    **_shown(read_announced(announced, policy.name)),
                    "mode": policy.pause.mode,
                }
                for policy in context.policies
            ]
        }
    )


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policies/{policy}`: the announced version, or null, with its epoch and run."""
    context, policy = _policy_from(request)
    return json_response(_shown(read_announced(await context.store.announcements.read(), policy.name)))


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policies/{policy}`: announce the version of all calls that begin afterwards, in all processes of the store.

    Raises:
        LowerVersion: The number is lower than one that was announced in the epoch.
    """
    context, policy = _policy_from(request)
    body = await body_from(request, PutPolicy)
    announced = await policy.version.announce(
        context.store.announcements, str(body.version), run=body.run, new_epoch=body.new_epoch
    )
    return json_response(_shown(announced) | _warning(announced))


async def pause_policy(request: web.Request) -> web.Response:
    """`POST /policies/{policy}/pause`: after the response, no process that shares the store sends a new call of the policy.

    `?drain_s=` waits up to that many seconds until no call is in flight; then `in_flight: abort` stops those that are left.
    `drained` is whether all processes agree.
    """
    _, policy = _policy_from(request)
    drain_s = query_from(request, Drain, takes_others=True).drain_s
    body = await body_from(request, PausePolicy)
    in_flight, is_drained = await policy.pause.drained(body.mode, drain_s=drain_s, aborts=body.in_flight == "abort")
    return json_response({"mode": policy.pause.mode, "in_flight": in_flight, "drained": is_drained})


async def resume_policy(request: web.Request) -> web.Response:
    """`POST /policies/{policy}/resume`: waiting calls continue, with the policy version that is announced now."""
    _, policy = _policy_from(request)
    await policy.pause.announce(None)
    in_flight, _ = await policy.pause.beat()
    return json_response({"mode": policy.pause.mode, "in_flight": in_flight})


async def load_adapter(request: web.Request) -> web.Response:
    """`POST /policies/{policy}/adapter`: load a LoRA adapter into every endpoint under a pause, and announce its version.

    Raises:
        UnprocessableRequest: The name is missing and the policy has not exactly one model, or is no model of the policy.
    """
    context, policy = _policy_from(request)
    body = await body_from(request, LoadAdapter)
    name = body.name or _only_model(policy)
    if policy is not context.policies.of(name):
        raise UnprocessableRequest(f"The model {name!r} does not belong to policy {policy.name!r}.", param="name")
    update = AdapterUpdate(
        name,
        body.path,
        str(body.version),
        body.mode,
        body.drain_s,
        aborts=body.in_flight == "abort",
        run=body.run,
        new_epoch=body.new_epoch,
    )
    endpoints, announced = await context.adapter_updates[policy.name].apply(update)
    shown = _shown(announced) | _warning(announced)
    return json_response({"name": name, "path": body.path, **shown, "endpoints": endpoints})


def _shown(announced: Announced) -> dict[str, Any]:
    """Return the JSON of an announcement; with the highest number of its epoch, if its version is none."""
    highest = None if announced.warning is None else announced.highest
    return {
        "version": announced.version,
        "epoch": announced.epoch,
        "run": announced.run,
        **({} if highest is None else {"highest": highest}),
    }


def _warning(announced: Announced) -> dict[str, str]:
    return {} if announced.warning is None else {"warning": announced.warning}


def _policy_from(request: web.Request) -> tuple[Context, Policy]:
    """Return the policy that the path names. Raises NotFound."""
    context = request.app[CONTEXT]
    return context, context.policies.named(request.match_info.get("policy", DEFAULT_POLICY))


def _only_model(policy: Policy) -> str:
    if len(policy.models) == 1 and "*" not in policy.models[0]:
        return policy.models[0]
    raise UnprocessableRequest(
        f"Name the adapter in name: policy {policy.name!r} has not exactly one model (policies.{policy.name}.models).",
        param="name",
    )
