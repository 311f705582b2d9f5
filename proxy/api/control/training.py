"""The route of `/training`: rewards, advantages, lengths and staleness of the newest groups of a policy, in one response."""

import asyncio
from collections import Counter
from itertools import accumulate, islice
from statistics import fmean
from typing import Any, Final

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from proxy.api.context import CONTEXT, Context
from proxy.api.control.reward_metrics import earned_by
from proxy.api.control.schemas import ShowTraining
from proxy.api.http import json_response
from proxy.api.query import query_from
from proxy.rollouts.group import Group, counted, find_groups, read_members
from proxy.rollouts.policy import Announced, read_announced
from proxy.rollouts.rollout import Rollout
from proxy.trajectory.advantages import normalized

_MAX_ROLLOUTS: Final = 8000  # that one response reads: about a second
_AT_ONCE: Final = 16
_REFUSED: Final = "tokentape_refused_groups_total{"


async def show_training(request: web.Request) -> web.Response:
    """`GET /training?policy=&limit=`: one entry for each of the newest groups, newest first, and their totals.

    At most `limit` groups and 8,000 of their rollouts are read; `covered` has how many.
    """
    context = request.app[CONTEXT]
    asked = query_from(request, ShowTraining)
    names = [policy.name for policy in context.policies]
    policy = context.policies.named(asked.policy or next(iter(context.policies.trained), names[0])).name
    announced = read_announced(await context.store.announcements.read(), policy)
    page = await context.store.groups.list(limit=asked.limit)
    entries: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    rollouts = read = 0
    is_cut = False
    while read < len(page.names) and not is_cut:
        names_read = page.names[read : read + _AT_ONCE]
        read += len(names_read)
        stored, damaged = await find_groups(context.store, names_read, context.metrics)
        found = [group for group in stored if _is_of(group, policy)]
        sizes = accumulate((len(group.members) for group in found), initial=rollouts)
        groups = [group for group, size in zip(found, islice(sizes, 1, None), strict=True) if size <= _MAX_ROLLOUTS]
        is_cut = len(groups) < len(found)
        rollouts_of = await asyncio.gather(*(read_members(context.store, group, context.metrics) for group in groups))
        unreadable += damaged
        for group, (members, damaged) in zip(groups, rollouts_of, strict=True):
            rollouts += len(members)
            unreadable += damaged
            entries.append(_entry(group, members, policy, announced, context.clock.now_ms()))
    return json_response(
        {
            "policy": policy,
            "policies": names,
            "version": announced.version,
            "epoch": announced.epoch,
            "groups": entries,
            "statuses": Counter(entry["status"] for entry in entries),
            "refused": await _refused(context, policy),
            "dropped": Counter(entry["code"] for entry in entries if entry["status"] == "dropped"),
            "equal": _share([entry["equal"] for entry in entries]),
            "covered": {"groups": len(entries), "rollouts": rollouts},
            "older": page.cursor is not None or is_cut,
            **({"unreadable": unreadable} if unreadable else {}),
        }
    )


async def _refused(context: Context, policy: str) -> dict[str, int]:
    """Return how often claims at this process have refused a group of a policy since it started, by reason.

    That is a metric, which the workers of a process sum.
    """
    lines = (await context.worker_metrics.exposition()).decode().splitlines()
    text = "\n".join(line for line in lines if line.startswith(_REFUSED))
    samples = [sample for family in text_string_to_metric_families(text + "\n") for sample in family.samples]
    counts = {sample.labels["reason"]: int(sample.value) for sample in samples if sample.labels["policy"] == policy}
    return {reason: count for reason, count in counts.items() if count}


def _is_of(group: Group, policy: str) -> bool:
    """Return whether a policy has steps in a group, or may get some: the group is open."""
    return group.is_open or policy in group.states


def _entry(group: Group, rollouts: list[Rollout], policy: str, announced: Announced, now_ms: int) -> dict[str, Any]:
    """Return what a group earned; values are null where they are unknown. Its version is that of its oldest token."""
    state = group.states.get(policy)
    earned = earned_by(counted(group, rollouts)[1])
    rewards = earned.rewards
    advantages = [value for (value,) in normalized([[reward] for reward in rewards])] if len(rewards) > 1 else []
    mean = fmean(rewards) if rewards else None
    return {
        "group_id": group.group_id,
        "status": group.status_for(policy, now_ms) or "open",
        "code": None if state is None else state.code,
        "version": None if state is None else state.oldest,
        "epoch": None if state is None else state.epoch,
        "staleness": None if state is None else announced.staleness(state.oldest, state.epoch),
        "created_ms": group.created_ms,
        "complete_ms": group.complete_ms,
        "members": len(rollouts),
        "rewards": len(rewards),
        "reward": mean,
        "spread": None if mean is None else fmean((reward - mean) ** 2 for reward in rewards) ** 0.5,
        "equal": len(set(rewards)) == 1 if len(rewards) > 1 else None,
        "advantages": [min(advantages), max(advantages)] if advantages else None,
        "tokens": fmean(earned.tokens) if earned.tokens else None,
    }


def _share(values: list[bool | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
