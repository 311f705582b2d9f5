"""Osmosis' remote rollouts, where its trainer's callback URL stood: what is ours to do besides the call itself.

Holds the completed callback, the finishing of a rollout by its server's word, and what a call of such a rollout needs first:
its tools, a name for its retries, the steps before it. It starts no rollout: `osmosis_dispatch` does.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import orjson
from aiohttp import web

from proxy.api.adapters import Form
from proxy.api.compat.osmosis.flat_call import FlatForm
from proxy.api.compat.osmosis.schemas import RolloutResult, kept_result
from proxy.api.context import Parts
from proxy.errors import Conflict
from proxy.rollouts.finishing import after_finish
from proxy.rollouts.idempotency import KEY
from proxy.rollouts.rollout import RESULT, Rollout, no_rollout, read_rollout, write_fields
from proxy.rollouts.steps import read_steps
from storage.errors import FieldsChanged

COMPLETED: Final = "/v1/rollout/completed"
_STATUS: Final[Mapping[str, Literal["completed", "failed"]]] = {"COMPLETED": "completed", "ERROR": "failed"}
_DECIDING: Final = ("status", "reward", "metadata", "result")  # fields by which it is decided what a result changes
_TOOLS_WITHIN_S: Final = 10
_LOOK_EVERY_S: Final = 0.05


async def complete(parts: Parts, rollout_id: str, result: RolloutResult, *, is_claim: bool) -> web.Response:
    """Answer `POST /v1/rollout/completed`. Its clients retry: the same result again changes nothing and is 200.

    A claim, which is a result from a caller who may not report one, is kept and has no effect. A rollout that failed before
    its first call is created here: that it failed is worth a record.
    """
    rollout = read_rollout(await parts.store.open(rollout_id, {}, now_ms=parts.clock.now_ms()))
    if is_claim:
        await keep_claim(parts, rollout, result)
    else:
        await take_result(parts, rollout, result)
    return web.Response(body=orjson.dumps({"status": "ok"}), content_type="application/json")


async def take_result(
    parts: Parts, rollout: Rollout, result: RolloutResult, *, status: Literal["aborted"] | None = None
) -> None:
    """Finish a rollout by the result that its server reported; `status` replaces the reported one.

    The result is kept in `metadata.osmosis`. A reward or status that the rollout has already is not changed: the control
    API set it.

    Raises:
        Conflict: a result with another status or reward was reported before.
        NotFound: the rollout was deleted.
        TooLarge: the result has too many bytes.
    """
    reported = kept_result(result)
    decisive = {"status": result.status, "reward": result.reward}
    while rollout.result is None:
        was_finished = rollout.is_finished
        fields: dict[str, Any] = {"result": decisive, "metadata": _with_reported(rollout, reported)}
        if not was_finished:
            fields |= {"status": status or _STATUS[result.status], "finished_ms": parts.clock.now_ms()}
            fields |= {} if rollout.reward is not None else {"reward": result.reward}
        changed, rollout = await _amended(parts, rollout, fields)
        if changed:
            await after_finish(parts, rollout, again=was_finished)
            return
    if rollout.result["status"] != result.status or result.reward not in (None, rollout.result["reward"]):
        raise Conflict(f"another result of the rollout {rollout.rollout_id!r} was reported before", param="rollout_id")
    await after_finish(parts, rollout, again=True)


async def keep_claim(parts: Parts, rollout: Rollout, claim: RolloutResult) -> None:
    """Keep a claim in `metadata.osmosis.claim`, until a result is reported. It changes no reward and no status.

    Raises NotFound if the rollout was deleted, TooLarge for a claim with too many bytes.
    """
    claimed, changed = kept_result(claim), False
    while not changed and rollout.result is None:
        beside = rollout.metadata.get(RESULT, {})
        if not isinstance(beside, Mapping) or beside.get("claim") == claimed:
            return  # a trainer has another use for this name, or it is the same claim again
        metadata = {**rollout.metadata, RESULT: {**beside, "claim": claimed}}
        changed, rollout = await _amended(parts, rollout, {"metadata": metadata})


def _with_reported(rollout: Rollout, reported: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a rollout with its result, beside which a claim stays what it is."""
    beside = rollout.metadata.get(RESULT)
    claim = {"claim": beside["claim"]} if isinstance(beside, Mapping) and "claim" in beside else {}
    return {**rollout.metadata, RESULT: {**reported, **claim}}


async def _amended(parts: Parts, rollout: Rollout, fields: Mapping[str, Any]) -> tuple[bool, Rollout]:
    """Set fields of a rollout, unless one that decides on them has changed; return whether they are set, and the rollout.

    Raises NotFound if it was deleted.
    """
    name, expect = rollout.rollout_id, {each: rollout.origin.fields.get(each) for each in _DECIDING}
    try:
        stored = await parts.store.update_if(name, write_fields(fields), expect=expect, now_ms=parts.clock.now_ms())
    except FieldsChanged as changed:
        return False, read_rollout(changed.rollout)
    if stored is None:
        raise no_rollout(name)
    return True, read_rollout(stored)


async def with_tools(parts: Parts, rollout: Rollout) -> Rollout:
    """The rollout, once its tools are known: a server may make its first call before we have read its init's answer."""
    until = parts.clock.monotonic() + _TOOLS_WITHIN_S
    while rollout.is_starting and parts.clock.monotonic() < until:
        await asyncio.sleep(_LOOK_EVERY_S)
        stored = await parts.store.get(rollout.rollout_id)
        if stored is None:
            raise no_rollout(rollout.rollout_id)
        rollout = read_rollout(stored)
    return rollout


def naming_retries(
    headers: Mapping[str, str], rollout: Rollout, form: Form | None, request_key: str
) -> Mapping[str, str]:
    """The headers, with an idempotency key where equal calls are retries by protocol.

    Its clients retry without a key (SDK 120bf30), and a history that is append-only never asks the same twice.
    """
    if (not isinstance(form, FlatForm) and not rollout.osmosis) or headers.get(KEY):
        return headers
    return {**headers, KEY: request_key}


async def with_steps_before(parts: Parts, rollout: Rollout, form: Form) -> Form:
    """The call, with the steps by which its claim is judged; they are read only if it claims something."""
    if not isinstance(form, FlatForm) or not form.claims:
        return form
    steps = await read_steps(parts, rollout, whole=False)
    return replace(form, before=steps)


def ticket(server: str, protocol: str, asked: str, state: str) -> dict[str, Any]:
    """What a rollout keeps of its dispatch."""
    return {"server": server, "protocol": protocol, "asked": asked, "state": state}
