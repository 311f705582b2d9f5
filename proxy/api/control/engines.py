"""The routes of the engines, and of the policies that they serve; `/policy` is the policy `default`.

API keys of engines are never shown. The trainer announces the version of a policy's weights, and pauses its calls. Steps
record the announced version if the engine reports none.
"""

import asyncio
from typing import Any

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import Drain, LoadAdapter, PausePolicy, PutEngines, PutPolicy, ResumePolicy
from proxy.api.health import healthy_engines
from proxy.api.requests import body_from, json_response, named, query_from
from proxy.config.sections import RecordSettings
from proxy.errors import Forbidden, UnprocessableRequest
from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import CallOptions
from proxy.rollouts.adapter_updates import AdapterUpdate
from proxy.rollouts.policy import Announced, InFlight, Policies, Policy, read_announced, unknown_staleness
from proxy.trajectory.step import DEFAULT_POLICY
from proxy.upstream.client import ejected_for
from proxy.upstream.endpoint import Endpoint

_DIALECTS: tuple[DialectName, ...] = ("chat", "completions")  # the dialects that may have synthetic streams


async def show_engines(request: web.Request) -> web.Response:
    """`GET /engines`: endpoints with health, calls in flight, versions and known limitations."""
    return await _engines_response(request.app[CONTEXT])


async def put_engines(request: web.Request) -> web.Response:
    """`PUT /engines`: replace the endpoints, in this process at once and in all that share the store within a second.

    Calls in flight end at their endpoints. A configured control key is required: a caller who sets endpoints can read all
    calls, and can make the proxy send requests to any reachable address.
    """
    context = request.app[CONTEXT]
    if not context.control_keys.are_required:
        raise Forbidden("Changing endpoints requires a control key, and none is configured; set control.api_keys.")
    await context.registry.put((await body_from(request, PutEngines)).endpoints)
    return await _engines_response(context)


async def _engines_response(context: Context) -> web.Response:
    healthy = await healthy_engines(context)
    await context.upstream.detect_all()
    listing = [
        context.upstream.list_models(endpoint)
        for endpoint in context.upstream.endpoints
        if healthy.get(endpoint.label) and not endpoint.settings.models
    ]
    await asyncio.gather(*listing)  # adapters are loaded at run time
    record, now = context.settings.record, context.clock.now()
    shown = [
        _engine(endpoint, healthy, record, now) | {"policies": _policies_of(context.policies, endpoint)}
        for endpoint in context.upstream.endpoints
    ]
    return json_response({"engines": shown, "configured": not context.registry.is_overridden})


def _policies_of(policies: Policies, endpoint: Endpoint) -> list[str]:
    """Return the policies of the models of an endpoint; all if its models are unknown."""
    served = endpoint.settings.models or endpoint.models.names
    if not served:
        return [policy.name for policy in policies]
    found = {policies.of(model).name for model in served}
    return [policy.name for policy in policies if policy.name in found or any(map(endpoint.lists, policy.models))]


def _engine(endpoint: Endpoint, healthy: dict[str, bool], record: RecordSettings, now: float) -> dict[str, Any]:
    traits = endpoint.known()
    streaming = endpoint.settings.streaming or record.streaming
    options = CallOptions(streaming=streaming, logprobs=record.logprobs, traits=traits)
    ejected_s = ejected_for(endpoint)
    settings = endpoint.settings
    return {
        "name": endpoint.label,
        "url": settings.url,
        **named(endpoint, "kind", "version"),
        "token_ids": endpoint.returns_ids,
        "models": settings.models or sorted(endpoint.models.names or ()),
        "logprobs_mode": settings.logprobs_mode or endpoint.engine.logprobs_mode,
        "sampling_defaults": traits.sampling_defaults,
        "parser": traits.has_parser,
        "streams": {name: endpoint.engine.framing(name, {"stream": True}, options) for name in _DIALECTS},
        "loses": [quirk.what for quirk in endpoint.engine.quirks],
        "healthy": healthy.get(endpoint.label, False),  # False for one that was added during the check
        "ejected_until": None if ejected_s is None else now + ejected_s,
        "max_in_flight": settings.max_in_flight,
        "in_flight": endpoint.queue.in_flight,
        "queued": endpoint.queue.waiting,
        **named(endpoint, "faults", "last_fault"),
    }


async def list_policies(request: web.Request) -> web.Response:
    """`GET /policies`: all policies, with their announced versions, their pauses, and their endpoints in a rolling update."""
    context = request.app[CONTEXT]
    announced = await context.store.announcements.read()
    context.policies.apply(announced)
    shown = [
        {
            **named(policy, "name", "models"),
            "train": policy.is_trained,
            **_shown(read_announced(announced, policy.name)),
            "mode": policy.pause.mode,
            **_updated(policy),
        }
        for policy in context.policies
    ]
    return json_response({"policies": shown})


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policies/{policy}`: the announced version, or null, with its epoch and run."""
    context, policy = _policy_from(request)
    return json_response(_shown(read_announced(await context.store.announcements.read(), policy.name)))


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policies/{policy}`: announce the version of all calls that begin afterwards, in all processes of the store.

    Raises LowerVersion if the number is lower than one that was announced in the epoch.
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
    `in_flight: resume` interrupts calls at once, and they are resumed after the pause. `drained` is whether all processes
    agree. With `endpoints`, these are held, and the calls of the others continue.
    """
    context, policy = _policy_from(request)
    drain_s = query_from(request, Drain, takes_others=True).drain_s
    body = await body_from(request, PausePolicy)
    if body.endpoints is not None:
        known = {endpoint.label for endpoint in context.upstream.endpoints}
        if unknown := [label for label in body.endpoints if label not in known]:
            message = f"Engine {unknown[0]!r} not found. The engines are {', '.join(sorted(known))}."
            raise UnprocessableRequest(message, param="endpoints")
        in_flight, is_drained = await policy.pause.hold(body.endpoints, drain_s=drain_s)
        shown = {"mode": policy.pause.mode, "in_flight": in_flight, "drained": is_drained}
        return json_response(shown | _updated(policy))
    in_flight, is_drained = await policy.pause.drained(body.mode, drain_s=drain_s, in_flight=body.in_flight)
    return json_response({"mode": policy.pause.mode, "in_flight": in_flight, "drained": is_drained})


async def resume_policy(request: web.Request) -> web.Response:
    """`POST /policies/{policy}/resume`: waiting calls continue, with the policy version that is announced now.

    With `endpoints`, these are released, with a version of their own if the body has one. Raises LowerVersion.
    """
    _, policy = _policy_from(request)
    body = await body_from(request, ResumePolicy)
    if body.endpoints is not None:
        version = None if body.version is None else str(body.version)
        await policy.pause.release(body.endpoints, version, run=body.run, new_epoch=body.new_epoch)
        return json_response({"mode": policy.pause.mode, **_updated(policy)})
    await policy.pause.announce(None)
    if policy.pause.held:
        await policy.pause.release(None)
    in_flight, _ = await policy.pause.beat()
    return json_response({"mode": policy.pause.mode, "in_flight": in_flight})


async def load_adapter(request: web.Request) -> web.Response:
    """`POST /policies/{policy}/adapter`: load a LoRA adapter into every endpoint under a pause, and announce its version.

    Raises:
        UnprocessableRequest: The name is missing and the policy has not exactly one model, or is no model of the policy.
    """
    context, policy = _policy_from(request)
    body = await body_from(request, LoadAdapter)
    models = policy.models
    name = body.name or (models[0] if len(models) == 1 and "*" not in models[0] else None)
    if name is None:
        raise UnprocessableRequest(
            f"Name the adapter in name: policy {policy.name!r} has not exactly one model (policies.{policy.name}.models).",
            param="name",
        )
    if policy is not context.policies.of(name):
        raise UnprocessableRequest(f"The model {name!r} does not belong to policy {policy.name!r}.", param="name")
    terms = named(body, "path", "mode", "drain_s", "run", "new_epoch")
    in_flight: InFlight = "keep" if body.in_flight == "drain" else body.in_flight
    update = AdapterUpdate(name, version=str(body.version), in_flight=in_flight, **terms)
    endpoints, announced = await context.adapter_updates[policy.name].apply(update)
    shown = _shown(announced) | _warning(announced)
    return json_response({"name": name, "path": body.path, **shown, "endpoints": endpoints})


def _shown(announced: Announced) -> dict[str, Any]:
    """Return the JSON of an announcement; with the highest number of its epoch, if its version is none."""
    highest = None if unknown_staleness(announced.version) is None else announced.highest
    return {**named(announced, "version", "epoch", "run"), **({} if highest is None else {"highest": highest})}


def _updated(policy: Policy) -> dict[str, Any]:
    """Return the endpoints that a rolling update holds, and the versions of those that have another one than the policy."""
    held, versions = sorted(policy.pause.held), policy.version.endpoints
    return {"held": held, "versions": versions} if held or versions else {}


def _warning(announced: Announced) -> dict[str, str]:
    warning = unknown_staleness(announced.version)
    return {} if warning is None else {"warning": warning}


def _policy_from(request: web.Request) -> tuple[Context, Policy]:
    context = request.app[CONTEXT]
    return context, context.policies.named(request.match_info.get("policy", DEFAULT_POLICY))
