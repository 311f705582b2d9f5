"""Steps as they were recorded, and the tree they make.

Holds the reading of steps out of the store, with what was learnt of them since, and the routes that show them.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import isfinite
from typing import Any, TypeVar
from urllib.parse import unquote

from aiohttp import web

from proxy.control.access import choice_of, no_rollout, number_of, only_known, rollout_of
from proxy.drifting import count_drift, find_drift
from proxy.errors import DamagedStep, NotFound, NotValid
from proxy.export.containers import Ndjson, container_for
from proxy.export.writing import written
from proxy.parts import PARTS, Parts
from proxy.rollouts import Marks, Rollout, own_metadata, read_marks, read_rollout
from proxy.trajectory import fidelity
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.outline import outline
from proxy.trajectory.record import UnreadableRecord, decode
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.step import Choice, Step
from storage.errors import StorageError

T = TypeVar("T")

_PAGE = 200  # records read from the store at once
_SHOWN = 100
_MOST_SHOWN = 1000
LONG = 32  # steps that take some milliseconds to decode, join and write
_TOKENS_OF_A_STEP = 1024  # that many tokens take as long as a short step,
_MESSAGES_OF_A_STEP = 64  # and so do so many messages,
_BLOCKS_OF_A_STEP = 16  # and blocks that are read


async def read_steps(parts: Parts, rollout: Rollout, *, whole: bool) -> list[Step]:
    """All steps of a rollout, as delivered as they turned out to be.

    Without `whole`, requests and responses stay unread: rows of ids need neither.
    """
    if rollout.counts.get("steps", 0) < _PAGE:
        told = await parts.store.read_all(rollout.rollout_id, _PAGE)
        if told is None or told.rollout.incarnation != rollout.incarnation:
            raise no_rollout(rollout.rollout_id)
        if len(told.records) < _PAGE:
            reader = BlockReader(told.blocks)
            return await _decode(rollout.rollout_id, told.records, 0, reader, told.marks, whole=whole)
    records: list[bytes] = []
    while len(records) % _PAGE == 0 and (page := await parts.store.read(rollout.rollout_id, len(records), _PAGE)):
        records += page
    return await _decoded(parts, rollout, records, 0, whole=whole)


async def aside(weight: int, work: Callable[[], T]) -> T:
    """Run work on many steps, or on long ones, in a thread, so that it does not block the event loop."""
    return work() if weight < LONG else await asyncio.to_thread(work)


def weight_of(steps: Sequence[Step]) -> int:
    """Return how much work these steps are, for `aside`: a unit for each choice, and more for many tokens or messages."""
    tokens = sum(step.sampled + sum(map(len, step.prompts)) for step in steps)
    messages = sum(len(found) for step in steps if isinstance(found := step.request.get("messages"), list))
    long = tokens // _TOKENS_OF_A_STEP + messages // _MESSAGES_OF_A_STEP
    return sum(max(1, len(step.choices)) for step in steps) + long


def facts_of(rollout: Rollout) -> RolloutFacts:
    """What exported rows tell of a rollout."""
    return RolloutFacts(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        status=rollout.status,
        reward=rollout.reward,
        step_rewards=rollout.step_rewards,
        advantages=rollout.advantages,
        metadata=own_metadata(rollout.metadata),
    )


async def _decoded(parts: Parts, rollout: Rollout, records: Sequence[bytes], start: int, *, whole: bool) -> list[Step]:
    """The steps of records, the first of which stands at `start`.

    Blocks are read after records: so none is missing that a record leans on. Raises NotFound if the rollout is not the
    one it was when its records were read: half of it, or halves of two, would be shown.
    """
    name = rollout.rollout_id
    reader = BlockReader(await parts.store.blocks(name))
    marks = await parts.store.marks(name)
    stored = await parts.store.get(name)
    if stored is None or stored.incarnation != rollout.incarnation:
        raise no_rollout(name)
    return await _decode(name, records, start, reader, marks, whole=whole)


async def _decode(
    name: str, records: Sequence[bytes], start: int, reader: BlockReader, marks: Mapping[str, bytes], *, whole: bool
) -> list[Step]:
    read = read_marks(marks)

    def decoded() -> list[Step]:
        return [_read(name, record, reader, start + at, read, whole=whole) for at, record in enumerate(records)]

    return await aside(len(records) + reader.count // _BLOCKS_OF_A_STEP, decoded)


def _read(name: str, record: bytes, reader: BlockReader, index: int, marks: Marks, *, whole: bool) -> Step:
    try:
        step = decode(record, reader, index, whole=whole)
    except UnreadableRecord as error:
        raise DamagedStep(f"the step at index {index} of rollout {name!r} cannot be read: {error}") from error
    if step.step_id in marks.undelivered or step.step_id in marks.late:
        delivered = step.delivered and step.step_id not in marks.undelivered
        return replace(step, delivered=delivered, late=step.step_id in marks.late)
    return step


async def check_step_rewards(parts: Parts, rollout: Rollout, rewards: Mapping[str, float | list[float]]) -> None:
    """Raises NotValid for rewards of a step that is not there, or that has not as many tokens."""
    for step_id, given in rewards.items():
        found = await parts.store.find(rollout.rollout_id, step_id)
        if found is None:
            raise NotValid(f"step_rewards: the rollout has no step {step_id!r}", param="step_rewards")
        if isinstance(given, list):
            (step,) = await _decoded(parts, rollout, [found[1]], found[0], whole=False)
            counts = [len(choice.ids) for choice in step.choices]
            if counts != [len(given)]:
                raise NotValid(
                    f"step_rewards: step {step_id!r} sampled {' and '.join(map(str, counts)) or 'no'} tokens, and there are "
                    f"{len(given)} rewards; a list has one for each sampled token of a step with one choice",
                    param="step_rewards",
                )


async def list_steps(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps?after=&limit=`: whole steps in the order of storing; NDJSON if accepted."""
    parts = request.app[PARTS]
    only_known(request, ("after", "limit"))
    after = number_of(request, "after", None, least=0)
    limit = number_of(request, "limit", _SHOWN, least=1, most=_MOST_SHOWN) or _SHOWN
    rollout = await rollout_of(request)
    start = 0 if after is None else after + 1
    records = await parts.store.read(rollout.rollout_id, start, limit)
    steps = await _decoded(parts, rollout, records, start, whole=True)
    following = start + len(steps) - 1 if len(steps) == limit else None
    container = container_for(request.headers.get("Accept"), None)

    def page() -> bytes:
        if isinstance(container, Ndjson):
            return b"".join(written(step_json(step, rollout)) + b"\n" for step in steps)
        return written({"steps": [step_json(step, rollout) for step in steps], "after": following})

    return web.Response(body=await asyncio.to_thread(page), content_type=container.content_type)


async def read_step(parts: Parts, rollout_id: str, step_id: str) -> Step | None:
    """One step, whole; None if the rollout, or it, is not there."""
    stored = await parts.store.get(rollout_id)
    found = None if stored is None else await parts.store.find(rollout_id, step_id)
    if stored is None or found is None:
        return None
    index, record = found
    (step,) = await _decoded(parts, read_rollout(stored), [record], index, whole=True)
    return step


async def show_step(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps/{step_id}`."""
    step, rollout = await step_of(request)
    body = await asyncio.to_thread(lambda: written(step_json(step, rollout)))
    return web.Response(body=body, content_type="application/json")


async def step_of(request: web.Request) -> tuple[Step, Rollout]:
    """The step that the path names, whole, and its rollout. Raises NotFound."""
    parts = request.app[PARTS]
    rollout = await rollout_of(request)
    step_id = unquote(request.raw_path.partition("?")[0].split("/")[4])
    found = await parts.store.find(rollout.rollout_id, step_id)
    if found is None:
        raise NotFound(f"the rollout {rollout.rollout_id!r} has no step {step_id!r}", param="step_id")
    index, record = found
    (step,) = await _decoded(parts, rollout, [record], index, whole=True)
    return step, rollout


async def show_tree(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/tree?texts=`: with `texts=false` no tokenizer and no engine is asked to explain drift.

    What it completes of a finished rollout's drift is counted.
    """
    only_known(request, ("texts",))
    texts = choice_of(request, "texts", ("true", "false"), "true") == "true"
    rollout = await rollout_of(request)
    parts = request.app[PARTS]
    steps = await read_steps(parts, rollout, whole=True)
    drift = await find_drift(parts, rollout, steps, texts="all" if texts else "none")
    if texts and rollout.is_finished:
        with suppress(StorageError):  # a later look counts what this one has found out
            await count_drift(parts, rollout, drift, len(steps))
    body = await asyncio.to_thread(lambda: written(outline(steps, facts_of(rollout), drift)))
    return web.Response(body=body, content_type="application/json")


def step_json(step: Step, rollout: Rollout) -> dict[str, Any]:
    """A step as people see it. `prompt_ids` is null where there are several prompts: then `prompts` has them."""
    one = step.prompts[0].tolist() if len(step.prompts) == 1 else None
    return {
        "step_id": step.step_id,
        "rollout_id": step.rollout_id,
        "index": step.index,
        "dialect": step.dialect,
        "endpoint": step.endpoint,
        "engine": asdict(step.engine),
        "model": {"asked": step.model_asked, "served": step.model_served},
        "request": step.request,
        "sent": step.sent,
        "response": step.response,
        "prompt_ids": one,
        **({"prompts": [prompt.tolist() for prompt in step.prompts]} if len(step.prompts) > 1 else {}),
        "choices": list(map(_choice_json, step.choices)),
        "usage": step.usage,
        "sampling": step.sampling,
        "timing": asdict(step.timing),
        "status": step.status,
        "reason": step.reason,
        "delivered": step.delivered,
        "late": step.late,
        "reward": rollout.step_rewards.get(step.step_id),
        "policy_version": step.policy_version,
        "policy_version_end": step.policy_version_end,
        "fidelity": {
            "exact": step.exact,
            "problems": list(step.problems),
            "why": fidelity.describe(step.problems),
        },
        "extra": step.extra,
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "prompt": choice.prompt,
        "ids": choice.ids.tolist(),
        "logprobs": list(_finite(choice)),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "spans": [asdict(span) for span in choice.spans],
    }


def _finite(choice: Choice) -> Iterator[float | None]:
    """Logprobs as JSON has them: NaN and the infinities are null."""
    return (value if isfinite(value) else None for value in choice.logprobs)
