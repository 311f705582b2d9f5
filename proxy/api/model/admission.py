"""The admission of a call: open its rollout, wait for the end of a pause, check its limits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from proxy.api.context import Context
from proxy.api.http import PAUSES
from proxy.api.model.call import IncomingCall
from proxy.errors import Conflict, LimitReached, RolloutClosed, StoreUnavailable
from proxy.protocols.sampling import engine_model
from proxy.protocols.translated_call import TranslatedCall
from proxy.rollouts.due_times import is_past_deadline
from proxy.rollouts.policy import Policy
from proxy.rollouts.rollout import DEADLINE, Rollout, no_rollout, read_rollout, write_fields
from proxy.upstream.headers import GROUP_HEADER
from storage.errors import FieldsChanged, StorageError

_START_TIMEOUT_S: Final = 10
_START_INTERVAL_S: Final = 0.05
_NOT_KEPT: Final = nullcontext[None]()

Guard = Callable[[Rollout], None]


def is_open(rollout: Rollout) -> None:
    """Raise RolloutClosed if the rollout is finished."""
    if rollout.is_finished:
        status = rollout.status if rollout.reason is None else f"{rollout.status} ({rollout.reason})"
        raise RolloutClosed(f"Rollout {rollout.rollout_id!r} is {status} and accepts no more calls.")


def within_limits(rollout: Rollout) -> None:
    """Raise LimitReached if the rollout has reached its limit of steps or sampled tokens."""
    limits, steps, tokens = (
        rollout.limits,
        rollout.counts.get("steps", 0),
        rollout.counts.get("sampled_tokens", 0),
    )
    name = f"Rollout {rollout.rollout_id!r}"
    if limits.max_steps is not None and steps >= limits.max_steps:
        raise LimitReached(f"{name} reached its limit of {limits.max_steps} steps.")
    if rollout.has_reservation is False:
        raise LimitReached(
            f"{name} has {steps} of {limits.max_steps} steps, and calls for the remaining steps are in flight."
        )
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        raise LimitReached(f"{name} reached its limit of {limits.max_tokens} sampled tokens; it has {tokens}.")


GUARDS: tuple[Guard, ...] = (is_open, within_limits)


@asynccontextmanager
async def admitted(context: Context, call: IncomingCall, step_id: str) -> AsyncIterator[tuple[Rollout, Policy]]:
    """Open the rollout of a call, wait for the end of a pause of its policy, and count the call as in flight. Raises Paused."""
    group_id = call.request.headers.get(GROUP_HEADER)
    while True:
        rollout = await context.opener.open(call.rollout_id, group_id, step_id)
        lifetime = context.lifetimes.kept(rollout.rollout_id, rollout.incarnation, rollout.group_id, rollout.origin)
        policies = context.policies
        policy = policies.only or policies.of_call(model_of(context, rollout, call))
        activity = _NOT_KEPT if rollout.quiet_s is None or rollout.is_finished else context.activity.kept(rollout)
        async with context.reservations.kept(rollout, step_id):
            with lifetime, activity:
                if policy.pause.mode is not None and await _paused(context, call, policy):
                    continue  # open it again: the policy version has changed
                with policy.pause.counted():
                    yield await _started(context, rollout), policy
                    return


async def _paused(context: Context, call: IncomingCall, policy: Policy) -> bool:
    """Wait for the end of a pause, and note the wait for the trace of the call; return whether it waited. Raises Paused."""
    began = context.clock.monotonic()
    has_waited = await policy.pause.passed()
    call.request[PAUSES] = (*call.request.get(PAUSES, ()), (began, context.clock.monotonic()))
    return has_waited


def models_of(context: Context, rollout: Rollout) -> Mapping[str, str]:
    """Return the engine's names of models: that of the rollout for any model, or the configured ones."""
    return {"*": rollout.model} if rollout.model else context.settings.models


def model_of(context: Context, rollout: Rollout, call: IncomingCall) -> str | None:
    """Return the engine's name of the model of a call; None if it names none."""
    models, body, adapter = models_of(context, rollout), call.body, call.adapter
    if adapter is not None and not isinstance(adapter, TranslatedCall):  # a translation does not change the model
        body = adapter.native(models, None)
    return engine_model(body, models, rollout.sampling.over(context.sampling))


async def _started(context: Context, rollout: Rollout) -> Rollout:
    """Return the rollout once its tools are known: its first call may arrive before its dispatch has ended."""
    until = context.clock.monotonic() + _START_TIMEOUT_S
    while rollout.is_starting and context.clock.monotonic() < until:
        await asyncio.sleep(_START_INTERVAL_S)
        stored = await context.store.get(rollout.rollout_id)
        if stored is None:
            raise no_rollout(rollout.rollout_id)
        rollout = read_rollout(stored)
    return rollout


async def guard(context: Context, rollout: Rollout) -> None:
    """Run every guard; finish a rollout that is past its deadline, and mark one that has reached a limit."""
    if rollout.deadline_s is not None and is_past_deadline(rollout, context.clock.now_ms()):
        rollout = await _finished(context, rollout)
    try:
        for check in GUARDS:
            check(rollout)
    except LimitReached:
        if rollout.status == "open":
            await _mark_limited(context, rollout.rollout_id)
        raise


async def _finished(context: Context, rollout: Rollout) -> Rollout:
    """Finish a rollout that is past its deadline, before the sweep finds it."""
    try:
        return await context.finisher.finish(rollout, "aborted", reason=DEADLINE)
    except Conflict as error:  # finished otherwise meanwhile
        raise RolloutClosed(error.message) from error
    except StorageError as error:
        raise StoreUnavailable(f"The store is unavailable: {error}") from error


async def _mark_limited(context: Context, rollout_id: str) -> None:
    try:
        fields = write_fields({"status": "limited"})
        await context.store.update_if(rollout_id, fields, expect={"status": None}, now_ms=context.clock.now_ms())
    except FieldsChanged:
        pass  # finished or marked meanwhile
    except StorageError as error:
        raise StoreUnavailable(f"The store is unavailable: {error}") from error
