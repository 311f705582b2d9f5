"""References of a call to earlier responses, items and tool calls, resolved from recorded steps.

The key of a rollout gives no access to other rollouts.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from proxy.api.api_keys import MintedKey
from proxy.api.auth import check_minted
from proxy.api.context import Context
from proxy.errors import NotFound
from proxy.protocols.dialects.responses.history import Sent, Turn, resolve_references
from proxy.protocols.dialects.responses.item_ids import rollout_of, step_of
from proxy.protocols.dialects.translation import ResolvedReferences
from proxy.protocols.translated_call import TranslatedCall, call_identity
from proxy.rollouts.admission import Admitted
from proxy.rollouts.steps import read_step
from proxy.trajectory.step import Step

RESPONSES: Final = "responses"


def followed_rollout(call: TranslatedCall, minted: MintedKey | None) -> str | None:
    """Return the rollout of the response that a call continues; None if it continues none, or its id has no rollout.

    Raises:
        Forbidden: The API key belongs to another rollout.
    """
    followed = rollout_of(call.references.previous_response)
    check_minted(minted, followed)
    return followed


async def with_references(context: Context, admitted: Admitted, call: TranslatedCall) -> TranslatedCall:
    """Return the call with the responses, items and tool calls that it refers to. Raises NotFound for an unknown response."""
    rollout, references = admitted.rollout, call.references
    sampled = await context.continuation.sampled_calls(admitted, references.calls)
    if call.translation.name != RESPONSES:
        if not sampled:
            return call
        return replace(
            call,
            resolved=ResolvedReferences(items={name: {"function": function} for name, function in sampled.items()}),
        )
    if not (sampled or references.items or references.previous_response is not None):
        return call
    previous = (
        None
        if references.previous_response is None
        else await _previous(context, rollout.rollout_id, references.previous_response)
    )
    owner = rollout_of(references.previous_response) or rollout.rollout_id
    named = [turn for name in _steps_of(references.items) if (turn := await _turn(context, owner, name)) is not None]
    arguments = {name: text for name, function in sampled.items() if isinstance(text := function.get("arguments"), str)}
    return replace(call, resolved=resolve_references(previous, named, arguments))


async def find_response_step(context: Context, name: str, rollout_id: str | None) -> Step:
    """Return the step of a response of /v1/responses; `rollout_id` is what the call names. Raises NotFound."""
    owner, step_id = rollout_of(name) or rollout_id, step_of(name)
    step = None if owner is None or step_id is None else await read_step(context.store, owner, step_id)
    is_complete = (
        step is not None and step.dialect == RESPONSES and step.status == "complete" and step.response is not None
    )
    if step is None or not is_complete or step.request.get("store") is False:
        raise NotFound(f"Response {name[:200]!r} not found.", param="response_id")
    return step


def turn_of(step: Step) -> Turn:
    """Return a step of /v1/responses as a turn of the dialect."""
    identity = call_identity(step.step_id, step.rollout_id, step.timing.received, step.model_asked)
    return Turn(identity, step.request, dict(step.response or {}))


async def _previous(context: Context, rollout_id: str, name: str) -> Sent:
    try:
        step = await find_response_step(context, name, rollout_id)
    except NotFound as error:
        raise NotFound(error.message, param="previous_response_id") from None
    return Sent(turn_of(step), step.body.get("messages") or [])


async def _turn(context: Context, rollout_id: str, step_id: str) -> Turn | None:
    step = await read_step(context.store, rollout_id, step_id)
    return turn_of(step) if step is not None and step.dialect == RESPONSES else None


def _steps_of(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(step for name in items if (step := step_of(name)) is not None))
