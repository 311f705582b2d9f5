"""The routes that return recorded steps and their tree."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import isfinite
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.schemas import ListSteps, ShowTree
from proxy.api.query import query_from, rollout_from
from proxy.continuation.types import REASONS
from proxy.errors import NotFound
from proxy.export.containers import Ndjson, container_for
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import decode_records, facts_of, read_steps
from proxy.trajectory import fidelity
from proxy.trajectory.drift import Drift
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.outline import outline
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Step
from proxy.trajectory.thread_rules import KINDS_OF
from proxy.trajectory.threads import find_threads
from storage.errors import StorageError


async def list_steps(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps?after=&limit=`: complete steps in recording order; NDJSON if the client accepts it."""
    context = request.app[CONTEXT]
    asked = query_from(request, ListSteps)
    rollout = await rollout_from(request)
    start = 0 if asked.after is None else asked.after + 1
    records = await context.store.read(rollout.rollout_id, start, asked.limit)
    steps = await decode_records(context.store, rollout, records, start, whole=True)
    following = start + len(steps) - 1 if len(steps) == asked.limit else None
    container = container_for(request.headers.get("Accept"), None)

    def page() -> bytes:
        if container is Ndjson:
            return b"".join(to_json_bytes(step_json(step, rollout)) + b"\n" for step in steps)
        return to_json_bytes({"steps": [step_json(step, rollout) for step in steps], "after": following})

    return web.Response(body=await asyncio.to_thread(page), content_type=container.content_type)


async def show_step(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/steps/{step_id}`."""
    step, rollout = await step_from(request)
    body = await asyncio.to_thread(lambda: to_json_bytes(step_json(step, rollout)))
    return web.Response(body=body, content_type="application/json")


async def step_from(request: web.Request) -> tuple[Step, Rollout]:
    """Return the complete step that the path names, and its rollout. Raises NotFound."""
    context = request.app[CONTEXT]
    rollout = await rollout_from(request)
    step_id = unquote(request.raw_path.partition("?")[0].split("/")[4])
    found = await context.store.find(rollout.rollout_id, step_id)
    if found is None:
        raise NotFound(f"Rollout {rollout.rollout_id!r} has no step {step_id!r}.", param="step_id")
    index, record = found
    (step,) = await decode_records(context.store, rollout, [record], index, whole=True)
    return step, rollout


async def show_tree(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/tree?texts=`: with `texts=false`, drift is not explained with a tokenizer or the engine.

    Drift of a finished rollout that is explained here is also counted.
    """
    texts = query_from(request, ShowTree).texts
    rollout = await rollout_from(request)
    context = request.app[CONTEXT]
    steps = await read_steps(context.store, rollout, whole=True)
    drift = await context.drift.find(rollout, steps, texts="all" if texts else "none")
    if texts and rollout.is_finished:
        with suppress(StorageError):  # a later request counts it
            await context.drift.count(rollout, drift, len(steps))
    body = await asyncio.to_thread(lambda: to_json_bytes(_tree_json(context, rollout, steps, drift)))
    return web.Response(body=body, content_type="application/json")


def _tree_json(context: Context, rollout: Rollout, steps: Sequence[Step], drift: Sequence[Drift]) -> dict[str, Any]:
    """Return the tree with its threads, which are provisional until the rollout is finished."""
    threads, kinds = find_threads(steps, context.threads.rules), KINDS_OF[context.threads.default or "all"]

    def exports(step: Step) -> bool:
        return context.policies.exports(None, step.policy) and threads.of[step.step_id].kind in kinds

    tree = outline(steps, facts_of(rollout), drift, reasons=REASONS, exports=exports, threads=threads)
    rewards = rollout.thread_rewards
    shown = [
        {**thread, **({"reward": rewards[thread["name"]]} if thread["name"] in rewards else {})}
        for thread in tree["threads"]
    ]
    return {**tree, "threads": shown, "threads_final": rollout.is_finished}


def step_json(step: Step, rollout: Rollout) -> dict[str, Any]:
    """Return the JSON of a step. With several prompts `prompt_ids` is null, and `prompts` has them."""
    prompt_ids = step.prompts[0].tolist() if len(step.prompts) == 1 else None
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
        "prompt_ids": prompt_ids,
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
        **({} if step.policy == DEFAULT_POLICY else {"policy": step.policy}),
        "policy_version": step.policy_version,
        "policy_version_end": step.policy_version_end,
        **({"policy_epoch": step.policy_epoch} if step.policy_epoch else {}),
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
        "spans": [span.as_dict() for span in choice.spans],
    }


def _finite(choice: Choice) -> Iterator[float | None]:
    """Yield the logprobs of a choice; NaN and infinities, which JSON lacks, are None."""
    return (value if isfinite(value) else None for value in choice.logprobs)
