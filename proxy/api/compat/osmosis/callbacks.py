"""The callback by which Osmosis' rollout servers report the result of a rollout, which finishes it."""

from collections.abc import Mapping
from functools import cached_property
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
from proxy.api.requests import Signal, read_object, update_rollout, validated
from proxy.errors import BadRequest, Conflict, RequestTooLarge, UnprocessableRequest
from proxy.rollouts.rollout import RESULT, Rollout, checked_id, read_rollout, write_fields
from proxy.upstream.concurrency import LARGE_BYTES, off_loop

COMPLETED: Final = "/v1/rollout/completed"
_STATUS: Final[Mapping[str, Literal["completed", "failed"]]] = {"COMPLETED": "completed", "ERROR": "failed"}
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

    @cached_property
    def kept(self) -> dict[str, Any]:
        """The fields that are stored with the rollout: at most 64 kB of JSON. Raises RequestTooLarge.

        If they are larger, the messages are removed, which are in the steps as well, and `left_out` names them.
        """
        fields = self.model_dump(exclude_none=True, exclude={"rollout_id"})
        if len(orjson.dumps(fields)) > MAX_RESULT_BYTES and fields.pop("final_messages", None) is not None:
            fields["left_out"] = ["final_messages"]
        if len(orjson.dumps(fields)) > MAX_RESULT_BYTES:
            raise RequestTooLarge(
                f"The result without its messages is too large; the maximum is {MAX_RESULT_BYTES} bytes of JSON."
            )
        return fields


def read_result(body: Mapping[str, Any], rollout_id: str | None = None) -> RolloutResult:
    """Return the result in this body, of this rollout if it is known. Raises UnprocessableRequest or RequestTooLarge."""
    result = validated(RolloutResult, body)
    if rollout_id not in (None, result.rollout_id):
        raise UnprocessableRequest(f"rollout_id: the response is for another rollout, {result.rollout_id!r}.")
    _ = result.kept
    return result


async def report_result(call: ModelRequest) -> web.Response:
    """`POST /v1/rollout/completed`: a rollout server reports the result of a rollout. Raises BadRequest, Forbidden.

    Its clients retry: a repeated result changes nothing and is 200. A claim, which is a result from a caller without the
    permission to report one, is stored and has no effect. The rollout is created if it does not exist: it may have failed
    before its first call.
    """
    context, text = call.context, await read_bytes(call.request)
    result = await off_loop(len(text), LARGE_BYTES, lambda: read_result(read_object(text)))
    rollout_id = call.rollout_id or checked_id(result.rollout_id)
    check_minted(call.caller.minted, rollout_id)
    if result.rollout_id != rollout_id:
        raise BadRequest(
            f"rollout_id is {result.rollout_id!r} in the request body but {rollout_id!r} in the path.",
            param="rollout_id",
        )
    rollout = read_rollout(await context.store.open(rollout_id, {}, now_ms=context.clock.now_ms()))
    await (take_result if may_report(call.caller, context) else _keep_claim)(context, rollout, result)
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
    decisive = {"status": result.status, "reward": result.reward}
    while rollout.result is None:
        was_finished = rollout.is_finished
        current = rollout.metadata.get(RESULT)
        claim = {"claim": current["claim"]} if isinstance(current, Mapping) and "claim" in current else {}
        metadata = {**rollout.metadata, RESULT: {**result.kept, **claim}}
        fields: dict[str, Any] = {"result": decisive, "metadata": metadata}
        if not was_finished:
            fields |= {"status": status or _STATUS[result.status], "finished_ms": context.clock.now_ms()}
            fields |= {} if rollout.reward is not None else {"reward": result.reward}
        is_set, rollout = await update_rollout(context, rollout, write_fields(fields), _deciding(rollout))
        if is_set:
            await context.finisher.after_finish(rollout, again=was_finished)
            return
    if rollout.result["status"] != result.status or result.reward not in (None, rollout.result["reward"]):
        raise Conflict(f"Rollout {rollout.rollout_id!r} already has another result.", param="rollout_id")
    await context.finisher.after_finish(rollout, again=True)


async def _keep_claim(context: Context, rollout: Rollout, claim: RolloutResult) -> None:
    """Store a claim in `metadata.osmosis.claim` unless a result is reported. It changes no reward and no status."""
    is_set = False
    while not is_set and rollout.result is None:
        current = rollout.metadata.get(RESULT, {})
        if not isinstance(current, Mapping) or current.get("claim") == claim.kept:
            return  # the trainer uses this name for something else, or the claim is repeated
        fields = write_fields({"metadata": {**rollout.metadata, RESULT: {**current, "claim": claim.kept}}})
        is_set, rollout = await update_rollout(context, rollout, fields, _deciding(rollout))


def _deciding(rollout: Rollout) -> dict[str, bytes | None]:
    """Return the stored fields that decide what a result changes."""
    return {name: rollout.origin.fields.get(name) for name in ("status", "reward", "metadata", "result")}


def ticket(server: str, protocol: str, digest: str, state: str) -> dict[str, Any]:
    """Return the fields of a dispatch that are stored with its rollout. `digest` identifies the request."""
    return {"server": server, "protocol": protocol, "asked": digest, "state": state}


MODEL_ROUTES: Final = {COMPLETED: ModelRoute("POST", report_result, takes_control_keys=True)}
