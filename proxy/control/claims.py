"""Claims: complete groups that nobody else holds, held for a consumer and rendered.

Holds the choice among the groups that wait, and what becomes of each: held, left, given back, or dropped for a reason that is
told. A group's rollouts are marked as claimed before their rewards are read: what is given out is what stays.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from proxy.control.completion import members_of
from proxy.control.gathering import Worth, gather, with_advantages
from proxy.control.models import ClaimBatch
from proxy.control.steps import aside
from proxy.control.wanted import Wanted
from proxy.errors import Conflict, ProxyError
from proxy.export.views import number_of
from proxy.groups import Group
from proxy.membership import find_group
from proxy.parts import Parts
from proxy.policy import read_policy
from proxy.rollouts import Rollout, read_rollout, write_fields
from storage.queue import Waiting
from storage.store import StorageError

_LOOKED_AT: Final = 1000  # of each bucket, the longest waiting
_UNHELD: Final = ("batch_id", "consumer", "lease_ms")
_UNKNOWN: Final = -1  # a policy version that is no number is taken for older than any


@dataclass(slots=True)
class Claim:
    """One claim as it goes: the groups that it holds, each with its JSON, and what it met."""

    batch_id: str
    said: ClaimBatch
    wanted: Wanted
    policy_version: str | None = None
    held: list[tuple[Waiting, bytes]] = field(default_factory=list)
    dropped: list[dict[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether it has as many groups as it asked for."""
        return len(self.held) >= self.said.groups


async def fill(parts: Parts, claim: Claim) -> None:
    """Hold groups that wait, in the order that the claim wants, until it is full or none is left."""
    claim.policy_version = read_policy(await parts.store.notices.read())
    waiting = await parts.store.queue.waiting(_LOOKED_AT)
    for one in sorted(waiting, key=lambda one: _rank(one, claim.said.order)):
        if claim.is_full:
            return
        if one.group not in claim.refused:
            await _consider(parts, claim, one)


async def give_back(parts: Parts, batch_id: str, waiting: Waiting) -> bool:
    """Let a held group wait again; whether it was held."""
    fields = {**dict.fromkeys(_UNHELD), **write_fields({"status": "complete"})}
    return await parts.store.queue.give_back(waiting, batch_id, fields, now_ms=parts.clock.now_ms())


def held_fields(parts: Parts, batch_id: str, consumer: str, lease_s: float) -> dict[str, bytes]:
    """The fields of a group that is held from now on."""
    until = parts.clock.now_ms() + round(lease_s * 1000)
    return write_fields({"status": "claimed", "batch_id": batch_id, "consumer": consumer, "lease_ms": until})


def _rank(waiting: Waiting, order: str) -> int:
    """Groups of equal rank stay in the order in which they wait."""
    version = _version(waiting)
    return version if order == "oldest" else -version


def _version(waiting: Waiting) -> int:
    number = number_of(orjson.loads(waiting.note)["oldest"])
    return _UNKNOWN if number is None else number


async def _consider(parts: Parts, claim: Claim, waiting: Waiting) -> None:
    """Hold one group and render it, if it is what the claim wants."""
    too_stale = why_stale(claim, waiting)
    if too_stale is not None and claim.said.stale == "keep":
        claim.refused[waiting.group] = too_stale
        return
    lease_ms, now_ms = max(1, round(claim.said.lease_s * 1000)), parts.clock.now_ms()
    fields = held_fields(parts, claim.batch_id, claim.said.consumer, claim.said.lease_s)
    if not await parts.store.queue.take(waiting, claim.batch_id, fields, lease_ms=lease_ms, now_ms=now_ms):
        return  # somebody was quicker, or it was deleted
    if too_stale is not None:
        await _drop(parts, claim, waiting, too_stale)
        return
    try:
        await _render(parts, claim, waiting)
    except Conflict as refusal:
        claim.refused[waiting.group] = refusal.message
        await give_back(parts, claim.batch_id, waiting)
    except BaseException:
        await give_back(parts, claim.batch_id, waiting)
        raise


def why_stale(claim: Claim, waiting: Waiting) -> str | None:
    """Why a group is too old for the claim; None if it is not. What cannot be told to be fresh is stale."""
    most = claim.said.max_staleness
    if most is None:
        return None
    now, oldest = number_of(claim.policy_version), _version(waiting)
    if now is None or oldest == _UNKNOWN:
        return "the policy version of its tokens, or the one announced (PUT /policy), is not known as a number"
    behind = now - oldest
    return f"its oldest token is {behind} policy versions behind, and max_staleness={most}" if behind > most else None


async def _render(parts: Parts, claim: Claim, waiting: Waiting) -> None:
    """Render a group that is held. Raises Conflict where it cannot be given out as it is."""
    group = await find_group(parts.store, waiting.group)
    if group is None:
        return  # deleted this moment: its entry goes with its next taking
    said = claim.said
    rollouts = await members_of(parts, group)
    if said.rewarded and any(rollout.reward is None for rollout in rollouts):
        raise Conflict("some of its rollouts have no reward yet")
    frozen = await _freeze(parts, rollouts, claim.batch_id)
    try:
        gathered = await gather(parts, claim.wanted, frozen, Worth(said.min_group, said.only_mixed))
        if gathered.why is not None:
            await _drop(parts, claim, waiting, gathered.why)
            return
        whole = await gathered.whole(claim.wanted, len(claim.held))
    except (ProxyError, StorageError):
        await _thaw(parts, frozen, claim.batch_id)
        raise
    told = {**_told(group, frozen, claim.wanted.advantage), "skipped": gathered.skipped}
    count = sum(len(member.rows) for member in gathered.members)
    claim.held.append((waiting, await aside(count, lambda: orjson.dumps({**told, "data": whole}))))


def _told(group: Group, rollouts: list[Rollout], advantage: str) -> dict[str, Any]:
    """What a consumer needs to know beside the rows, which may have no place for it. Lists are by rollout."""
    compared = [] if advantage == "none" else with_advantages(rollouts, advantage)
    return {
        "group_id": group.group_id,
        "policy_version": group.oldest,
        "complete_ms": group.complete_ms,
        "metadata": group.metadata,
        "rollouts": [rollout.rollout_id for rollout in rollouts],
        "rewards": [rollout.reward for rollout in rollouts],
        "advantages": [rollout.advantages for rollout in compared] or None,
        "late": {one.rollout_id: late for one in rollouts if (late := one.counts.get("late", 0))},
    }


async def _freeze(parts: Parts, rollouts: list[Rollout], batch_id: str) -> list[Rollout]:
    """The rollouts as they stand from now on: their rewards can no longer change."""
    fields = write_fields({"claimed_by": batch_id})
    now_ms = parts.clock.now_ms()
    stored = await asyncio.gather(
        *(
            parts.store.amend(rollout.rollout_id, {} if rollout.claimed_by else fields, expect={}, now_ms=now_ms)
            for rollout in rollouts
        )
    )
    return [read_rollout(one) for one in stored if one is not None]


async def _thaw(parts: Parts, rollouts: list[Rollout], batch_id: str) -> None:
    """Take the mark of this batch away: it was not given out after all."""
    now_ms = parts.clock.now_ms()
    for rollout in rollouts:
        if rollout.claimed_by == batch_id:
            await parts.store.amend(rollout.rollout_id, {"claimed_by": None}, expect={}, now_ms=now_ms)


async def _drop(parts: Parts, claim: Claim, waiting: Waiting, why: str) -> None:
    """Take a group out of the queue for good: it can still be looked at and exported."""
    fields: Mapping[str, bytes | None] = {**dict.fromkeys(_UNHELD), **write_fields({"status": "dropped", "why": why})}
    await parts.store.queue.remove(waiting, claim.batch_id, fields, now_ms=parts.clock.now_ms())
    claim.dropped.append({"group_id": waiting.group, "why": why})
    parts.metrics.groups.labels("dropped").inc()
