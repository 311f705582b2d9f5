"""References of a call to earlier responses, items and tool calls, resolved from recorded steps.

The text of tool calls that clients cannot send back is stored here. A rollout's key finds nothing of another rollout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import orjson

from proxy.api.api_keys import MintedKey
from proxy.api.auth import check_minted
from proxy.api.context import Context
from proxy.errors import NotFound
from proxy.protocols.dialects.responses.history import Sent, Turn, resolve_references
from proxy.protocols.dialects.responses.item_ids import rollout_of, step_of
from proxy.protocols.dialects.translation import ResolvedReferences
from proxy.protocols.plan import Plan
from proxy.protocols.response import MALFORMED
from proxy.protocols.translated_call import TranslatedCall, call_identity
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import read_step
from proxy.telemetry.logs import LOG
from proxy.trajectory.step import Step
from storage.errors import StorageError

_CALL_MARK: Final = "call:"
RESPONSES: Final = "responses"


def followed_rollout(form: TranslatedCall, minted: MintedKey | None) -> str | None:
    """The rollout of the answer that a call follows; None if it follows none that says so.

    Raises Forbidden if the key is another rollout's.
    """
    followed = rollout_of(form.translation.references(form.request).previous_response)
    check_minted(minted, followed)
    return followed


async def with_references(context: Context, rollout: Rollout, form: TranslatedCall) -> TranslatedCall:
    """The call, with what it names. Raises NotFound for an answer that is not there."""
    leaning = form.translation.references(form.request)
    kept = await _kept(context, rollout.rollout_id, leaning.calls)
    if form.translation.name != RESPONSES:
        return replace(
            form, resolved=ResolvedReferences(items={name: {"function": call} for name, call in kept.items()})
        )
    before = (
        None
        if leaning.previous_response is None
        else await _before(context, rollout.rollout_id, leaning.previous_response)
    )
    whose = rollout_of(leaning.previous_response) or rollout.rollout_id
    named = [turn for name in _steps_of(leaning.items) if (turn := await _turn(context, whose, name)) is not None]
    calls = {name: call["arguments"] for name, call in kept.items()}
    return replace(form, resolved=resolve_references(before, named, calls))


async def keep_calls(context: Context, plan: Plan, incarnation: str, step: Step) -> None:
    """Keep the text of calls that no client can bring back, before their client hears of them.

    Where the store is away it is lost: the next prompt then differs from what was sampled, and the tree shows it.
    """
    if plan.translation is None or step.status != "complete" or step.response is None:
        return
    told = call_identity(plan.step_id, plan.rollout_id, step.timing.received, plan.model_asked)
    try:
        kept = plan.translation.unrestorable_calls(plan.request, told, step.response)
    except MALFORMED:
        return  # a response of an odd shape: the step is flagged for it
    if not kept or context.recorder.store_health.unreachable is not None:
        return
    marks = {_mark_of(name): orjson.dumps(call) for name, call in kept.items()}
    try:
        await context.store.mark(plan.rollout_id, incarnation, marks, now_ms=context.clock.now_ms())
    except StorageError as error:
        LOG.error("Text of tool calls not stored: %s", error, extra={"fields": {"step_id": plan.step_id}})


async def find_answer(context: Context, name: str, rollout_id: str | None) -> Step:
    """The step of an answer of Responses; `rollout_id` is what the call names. Raises NotFound."""
    whose, step_id = rollout_of(name) or rollout_id, step_of(name)
    step = None if whose is None or step_id is None else await read_step(context.store, whose, step_id)
    is_whole = (
        step is not None and step.dialect == RESPONSES and step.status == "complete" and step.response is not None
    )
    if step is None or not is_whole or step.request.get("store") is False:
        raise NotFound(f"Response {name[:200]!r} not found.", param="response_id")
    return step


def turn_of(step: Step) -> Turn:
    """A step of Responses as the dialect knows it."""
    told = call_identity(step.step_id, step.rollout_id, step.timing.received, step.model_asked)
    return Turn(told, step.request, dict(step.response or {}))


async def _before(context: Context, rollout_id: str, name: str) -> Sent:
    try:
        step = await find_answer(context, name, rollout_id)
    except NotFound as error:
        raise NotFound(error.message, param="previous_response_id") from None
    return Sent(turn_of(step), step.body.get("messages") or [])


async def _turn(context: Context, rollout_id: str, step_id: str) -> Turn | None:
    step = await read_step(context.store, rollout_id, step_id)
    return turn_of(step) if step is not None and step.dialect == RESPONSES else None


def _steps_of(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(step for name in items if (step := step_of(name)) is not None))


async def _kept(context: Context, rollout_id: str, names: Sequence[str]) -> Mapping[str, Any]:
    """Calls whose text was kept, by the id they were told by."""
    if not names:
        return {}
    marks = await context.store.marks(rollout_id, [_mark_of(name) for name in names])
    return {name: orjson.loads(marks[_mark_of(name)]) for name in names if _mark_of(name) in marks}


def _mark_of(name: str) -> str:
    """Ids are an engine's or a client's own, and may be anything."""
    return _CALL_MARK + blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
