"""The callback by which Osmosis' rollout servers report the result of a rollout, which finishes it."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from proxy.api.auth import check_minted, may_report
from proxy.api.body import FIRST_FAULT, read_bytes
from proxy.api.context import Context
from proxy.api.http import json_response
from proxy.api.model.call import ModelRequest
from proxy.api.model.routes import ModelRoute
from proxy.api.requests import Signal, read_object, validated
from proxy.errors import BadRequest, Conflict, RequestTooLarge
from proxy.rollouts.rollout import RESULT, Rollout, checked_id, no_rollout, read_rollout, write_fields
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from storage.errors import FieldsChanged

COMPLETED: Final = "/v1/rollout/completed"
_STATUS: Final[Mapping[str, Literal["completed", "failed"]]] = {"COMPLETED": "completed", "ERROR": "failed"}
_DECIDING: Final = ("status", "reward", "metadata", "result")  # fields that decide what a result changes


MAX_RESULT_BYTES: Final = 64_000  # of a result in a rollout's metadata
Name = Annotated[str, Field(min_length=1, max_length=256)]


class RolloutResult(BaseModel):
    """The result of a rollout as its server reports it: the response to `POST /rollout`, or the body of a callback."""

    model_config = ConfigDict(strict=True)

    rollout_id: Name
    status: Literal["COMPLETED", "ERROR"]
    final_messages: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    finish_reason: str | None = None
    error_message: str | None = None
    metrics: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    reward: Signal | None = None


def read_result(text: bytes) -> RolloutResult:
    """Return the result in the body of a completed callback. Raises BadRequest, UnprocessableRequest or RequestTooLarge."""
    result = validated(RolloutResult, read_object(text))
    kept_result(result)
    return result


def kept_result(result: RolloutResult) -> dict[str, Any]:
    """Return the fields of a result that are stored with the rollout: at most 64 kB of JSON.

    If they are larger, the messages are removed, which are in the steps as well, and `left_out` names them. Raises
    RequestTooLarge if the other fields are too large.
    """
    fields = result.model_dump(exclude_none=True, exclude={"rollout_id"})
    if len(orjson.dumps(fields)) > MAX_RESULT_BYTES and fields.pop("final_messages", None) is not None:
        fields["left_out"] = ["final_messages"]
    if len(orjson.dumps(fields)) > MAX_RESULT_BYTES:
        raise RequestTooLarge(
            f"The result without its messages is too large; the maximum is {MAX_RESULT_BYTES} bytes of JSON."
        )
    return fields


async def report_result(call: ModelRequest) -> web.Response:
    """`POST /v1/rollout/completed`: a rollout server reports the result of a rollout. Raises BadRequest, Forbidden."""
    text = await read_bytes(call.request)
    result = await off_loop(len(text), LARGE_BYTES, read_result, text)
    rollout_id = call.rollout_id or checked_id(result.rollout_id)
    check_minted(call.caller.minted, rollout_id)
    if result.rollout_id != rollout_id:
        raise BadRequest(
            f"rollout_id is {result.rollout_id!r} in the request body but {rollout_id!r} in the path.",
            param="rollout_id",
        )
    return await complete(call.context, rollout_id, result, is_claim=not may_report(call.caller, call.context))


async def complete(context: Context, rollout_id: str, result: RolloutResult, *, is_claim: bool) -> web.Response:
    """Handle `POST /v1/rollout/completed`. Its clients retry: a repeated result changes nothing and is 200.

    A claim, which is a result from a caller without the permission to report one, is stored and has no effect. The rollout is
    created if it does not exist: it may have failed before its first call.
    """
    rollout = read_rollout(await context.store.open(rollout_id, {}, now_ms=context.clock.now_ms()))
    if is_claim:
        await keep_claim(context, rollout, result)
    else:
        await take_result(context, rollout, result)
    return json_response({"status": "ok"})


async def take_result(
    context: Context, rollout: Rollout, result: RolloutResult, *, status: Literal["aborted"] | None = None
) -> None:
    """Finish a rollout by the result that its server reported; `status` replaces the reported one.

    The result is stored in `metadata.osmosis`. An existing reward or status of the rollout, which the control API has set, is
    not changed.

    Raises:
        Conflict: a result with another status or reward was reported before.
        NotFound: the rollout was deleted.
        RequestTooLarge: the result has too many bytes.
    """
    reported = kept_result(result)
    decisive = {"status": result.status, "reward": result.reward}
    while rollout.result is None:
        was_finished = rollout.is_finished
        fields: dict[str, Any] = {"result": decisive, "metadata": _with_reported(rollout, reported)}
        if not was_finished:
            fields |= {"status": status or _STATUS[result.status], "finished_ms": context.clock.now_ms()}
            fields |= {} if rollout.reward is not None else {"reward": result.reward}
        changed, rollout = await _update(context, rollout, fields)
        if changed:
            await context.finisher.after_finish(rollout, again=was_finished)
            return
    if rollout.result["status"] != result.status or result.reward not in (None, rollout.result["reward"]):
        raise Conflict(f"Rollout {rollout.rollout_id!r} already has another result.", param="rollout_id")
    await context.finisher.after_finish(rollout, again=True)


async def keep_claim(context: Context, rollout: Rollout, claim: RolloutResult) -> None:
    """Store a claim in `metadata.osmosis.claim` unless a result is reported. It changes no reward and no status.

    Raises NotFound if the rollout was deleted, RequestTooLarge for a claim with too many bytes.
    """
    claimed, changed = kept_result(claim), False
    while not changed and rollout.result is None:
        current = rollout.metadata.get(RESULT, {})
        if not isinstance(current, Mapping) or current.get("claim") == claimed:
            return  # the trainer uses this name for something else, or the claim is repeated
        metadata = {**rollout.metadata, RESULT: {**current, "claim": claimed}}
        changed, rollout = await _update(context, rollout, {"metadata": metadata})


def _with_reported(rollout: Rollout, reported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a rollout with its result and an unchanged claim."""
    current = rollout.metadata.get(RESULT)
    claim = {"claim": current["claim"]} if isinstance(current, Mapping) and "claim" in current else {}
    return {**rollout.metadata, RESULT: {**reported, **claim}}


async def _update(context: Context, rollout: Rollout, fields: Mapping[str, Any]) -> tuple[bool, Rollout]:
    """Set fields of a rollout unless a deciding field has changed; return whether they are set, and the rollout.

    Raises NotFound if it was deleted.
    """
    name, expect = rollout.rollout_id, {field: rollout.origin.fields.get(field) for field in _DECIDING}
    try:
        stored = await context.store.update_if(name, write_fields(fields), expect=expect, now_ms=context.clock.now_ms())
    except FieldsChanged as changed:
        return False, read_rollout(changed.rollout)
    if stored is None:
        raise no_rollout(name)
    return True, read_rollout(stored)


def ticket(server: str, protocol: str, digest: str, state: str) -> dict[str, Any]:
    """Return the fields of a dispatch that are stored with its rollout. `digest` identifies the request."""
    return {"server": server, "protocol": protocol, "asked": digest, "state": state}


MODEL_ROUTES: Final = {COMPLETED: ModelRoute("POST", report_result, takes_control_keys=True)}
