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

from proxy.attempts import KEY
from proxy.compat.forms import Form
from proxy.compat.osmosis_form import FlatForm
from proxy.compat.osmosis_models import RolloutResult
from proxy.control.access import no_rollout
from proxy.control.models import FinishRollout
from proxy.control.rollouts import finish
from proxy.control.steps import read_steps
from proxy.parts import Parts
from proxy.rollouts import Rollout, read_rollout

COMPLETED: Final = "/v1/rollout/completed"
_STATUS: Final[Mapping[str, Literal["completed", "failed"]]] = {"COMPLETED": "completed", "ERROR": "failed"}
_TOOLS_WITHIN_S: Final = 10
_LOOK_EVERY_S: Final = 0.05


async def complete(parts: Parts, rollout_id: str, result: RolloutResult) -> web.Response:
    """`POST /v1/rollout/completed`: the same again is the same answer, since its clients retry.

    A rollout that failed before its first call comes into being here: that it failed is worth a record.
    """
    rollout = read_rollout(await parts.store.open(rollout_id, {}, now_ms=parts.clock.now_ms()))
    await finish_as_told(parts, rollout, result)
    return web.Response(body=orjson.dumps({"status": "ok"}), content_type="application/json")


async def finish_as_told(
    parts: Parts, rollout: Rollout, result: RolloutResult, *, status: Literal["aborted"] | None = None
) -> Rollout:
    """Finish a rollout by what its server said, which is kept in `metadata.osmosis`; `status` if we know better.

    Raises Conflict if it was finished otherwise, NotFound if it was deleted.
    """
    told = result.model_dump(exclude_none=True, exclude={"rollout_id", "reward"})
    said = FinishRollout(
        status=status or _STATUS[result.status], reward=result.reward, metadata={**rollout.metadata, "osmosis": told}
    )
    return await finish(parts, rollout, said)


async def with_tools(parts: Parts, rollout: Rollout) -> Rollout:
    """The rollout, once its tools are known: a server may make its first call before we have read its init's answer."""
    until = parts.clock.monotonic() + _TOOLS_WITHIN_S
    while rollout.is_starting and parts.clock.monotonic() < until:
        await asyncio.sleep(_LOOK_EVERY_S)
        stored = await parts.store.look(rollout.rollout_id)
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
