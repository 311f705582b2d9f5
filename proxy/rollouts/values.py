"""The playbacks of a rollout, and the values of its states: the mean reward of the rollouts that branch from a state.

A rollout has a mark for each group, and for each rollout outside such a group, that was opened to play it back. The marks are
deleted, expire and are archived with the rollout; what they name may be gone, or be another's since.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple

from proxy.clock import Clock
from proxy.errors import Conflict, NotFound
from proxy.rollouts.group import counted, find_groups, read_members
from proxy.rollouts.rollout import Playback, Rollout, marked, read_rollout, read_rollouts
from proxy.rollouts.steps import NO_VERSIONS, Versions, aside, read_short, read_steps, versions_in, versions_of
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import Sampled, Step
from storage.errors import RolloutDeleted
from storage.redis.store import Store
from storage.types import StoredEntity

GROUP_MARK: Final = "played_by_group:"
ROLLOUT_MARK: Final = "played_by:"
_READ_AT_ONCE: Final = 32  # rollouts with their steps
_SHOWN: Final = 5  # versions in an error


async def note_playbacks(store: Store, clock: Clock, opened: StoredEntity, mark: str) -> None:
    """Mark the rollout that a group or a rollout plays back. `opened`: that rollout, or one of the group."""
    playback = read_rollout(opened).playback
    if playback is not None:
        with suppress(RolloutDeleted):
            await store.mark(playback.of, playback.incarnation, {mark: b""}, now_ms=clock.now_ms())


class Branch(NamedTuple):
    """A rollout that plays another one back, or that is in place of one that failed and did; and that one's playback."""

    rollout: Rollout
    playback: Playback
    has_branched: bool  # it was at the branch step


async def read_branches(store: Store, source: Rollout, metrics: Metrics) -> list[Branch]:
    """Return the rollouts that play a rollout back, without those that failed and were replaced, or are surplus."""
    marks = await store.marks(source.rollout_id)
    groups, _ = await find_groups(store, sorted(marked(marks, GROUP_MARK)), metrics)
    found: dict[str, Branch] = {}
    for group in groups:
        members, _ = await read_members(store, group, metrics)
        known = {member.rollout_id: member for member in members}
        before = {new: known[old] for old, new in group.replaced.items() if old in known}
        for member in counted(group, members)[1]:
            _add(found, source, member, before)
    alone, _ = read_rollouts(await store.get_each(sorted(marked(marks, ROLLOUT_MARK))), metrics)
    for rollout in alone:
        _add(found, source, rollout, {})
    return list(found.values())


def _add(found: dict[str, Branch], source: Rollout, rollout: Rollout, before: Mapping[str, Rollout]) -> None:
    """Add a rollout to the branches of its source, if it is one. `before`: the rollouts in place of which others are."""
    attempts = [rollout]
    while (name := attempts[-1].rollout_id) in before:
        attempts.append(before[name])
    playback, has_branched, inherited = None, False, 0
    for attempt in reversed(attempts):
        own = attempt.playback
        count = attempt.counts.get("inherited", 0)
        if own is not None and own.of == source.rollout_id:
            playback, has_branched = own, attempt.has_branched or own.end == 0
        elif own is not None:  # of the one before it: it has branched if it repeats more than that one inherited
            has_branched = has_branched and count >= min(own.answerable, inherited + 1)
        inherited = count
    if playback is not None:
        is_live = len(attempts) > 1 or not rollout.is_inherited  # otherwise its reward is none of the policy
        found[rollout.rollout_id] = Branch(rollout, playback, has_branched and is_live)


@dataclass(frozen=True, slots=True)
class Value:
    """The value of the state before a step of a rollout, by what its branches earned."""

    step_id: str | None  # None if the rollout has no such step yet
    index: int
    policy: str | None  # of the step
    branches: int  # that were opened there
    rewards: Mapping[Versions, Sequence[float]]  # of those that were there and have one, by what sampled them

    @property
    def mean(self) -> float | None:
        """The mean reward; None without any."""
        rewards = _all(self.rewards.values())
        return fmean(rewards) if rewards else None

    def as_dict(self) -> dict[str, Any]:
        """Return the value for a response."""
        versions = []
        by_age = sorted(self.rewards.items(), key=lambda item: sorted(map(_age, item[0])))
        for of, rewards in ((sorted(of, key=_age), rewards) for of, rewards in by_age):
            epoch = {"policy_epoch": of[0][0]} if of and of[0][0] else {}
            versions.append({"policy_versions": [version for _, version in of], **epoch, **_summary(rewards)})
        about = {"step_id": self.step_id, "index": self.index, "policy": self.policy}
        return {**about, **_summary(_all(self.rewards.values())), "branches": self.branches, "versions": versions}


def _age(version: tuple[int, str | None]) -> tuple[int, int, str]:
    epoch, name = version
    return epoch, len(name or "unknown"), name or "unknown"  # numbers by their size


def _all(rewards: Iterable[Sequence[float]]) -> list[float]:
    return [reward for own in rewards for reward in own]


def _summary(rewards: Sequence[float]) -> dict[str, Any]:
    mean = fmean(rewards) if rewards else None
    spread = None if mean is None else fmean((reward - mean) ** 2 for reward in rewards) ** 0.5
    return {"value": mean, "count": len(rewards), "std": spread}


async def read_values(store: Store, source: Rollout, metrics: Metrics, *, any_version: bool = False) -> list[Value]:
    """Return the values of the states of a rollout that branches were opened at, in the order of its steps.

    Raises:
        Conflict: Branches were sampled by other policy versions than the step at which they branch; not with `any_version`.
        NotFound: The rollout was deleted.
    """
    branches = [
        branch
        for branch in await read_branches(store, source, metrics)
        if branch.playback.before is not None or branch.playback.end == 0
    ]
    if not branches:
        return []
    steps = await read_steps(store, source, whole=False)
    indexes, recorded = await aside(len(steps), partial(_recorded, source, steps))
    at: dict[int, list[Branch]] = defaultdict(list)
    for branch in branches:
        index = 0 if branch.playback.end == 0 else indexes.get(branch.playback.before or "")
        if index is not None:
            at[index].append(branch)
    there = (branch.rollout for here in at.values() for branch in here if branch.has_branched)
    sampled = await _sampled(store, [rollout for rollout in there if rollout.reward is not None], recorded)
    values = []
    for index, here in sorted(at.items()):
        policy, versions = _next_versions(steps[index:])
        rewards: dict[Versions, list[float]] = defaultdict(list)
        for branch in here:
            if (of := sampled.get(branch.rollout.rollout_id)) is not None:
                rewards[of.get(policy or "", NO_VERSIONS)].append(float(branch.rollout.reward or 0))
        step_id = steps[index].step_id if index < len(steps) else None
        values.append(Value(step_id, index, policy, len(here), rewards))
        if not any_version:
            _check_versions(source, values[-1], versions)
    return values


def _recorded(source: Rollout, steps: Sequence[Step]) -> tuple[dict[str, int], set[Sampled]]:
    """Return the indexes of steps by their IDs, and where each was sampled."""
    sampled = {step.inherited or Sampled(source.rollout_id, step.step_id) for step in steps}
    return {step.step_id: index for index, step in enumerate(steps)}, sampled


async def _sampled(
    store: Store, rollouts: Sequence[Rollout], recorded: Container[Sampled]
) -> dict[str, dict[str, Versions]]:
    """Return for each rollout by policy the versions that sampled its tokens, but for those of the `recorded` steps.

    A rollout that was deleted meanwhile is omitted.
    """
    found: dict[str, dict[str, Versions]] = {}
    for start in range(0, len(rollouts), _READ_AT_ONCE):
        page = rollouts[start : start + _READ_AT_ONCE]
        short = await read_short(store, page)
        for rollout in page:
            name = rollout.rollout_id
            with suppress(NotFound):
                steps = await read_steps(store, rollout, whole=False, full=short.get(name))
                found[name] = await aside(len(steps), partial(_versions_of, steps, recorded))
    return found


def _versions_of(steps: Sequence[Step], recorded: Container[Sampled]) -> dict[str, Versions]:
    return versions_of(step for step in steps if step.inherited is None or step.inherited not in recorded)


def _next_versions(steps: Sequence[Step]) -> tuple[str | None, Versions]:
    """Return the policy and the versions that sampled the first of these steps that has tokens."""
    return next(((step.policy, found) for step in steps if (found := versions_in(step))), (None, NO_VERSIONS))


def _check_versions(source: Rollout, value: Value, versions: Versions) -> None:
    """Raise Conflict if branches were sampled by other versions than these."""
    others = [of for of in value.rewards if not versions >= of]
    if not others:
        return
    count, total = sum(len(value.rewards[of]) for of in others), sum(map(len, value.rewards.values()))
    conflict = Conflict(
        f"{count} of {total} branches before step {value.step_id!r} of rollout {source.rollout_id!r} were sampled by policy "
        f"version {_shown(frozenset().union(*others))}, the step by {_shown(versions)}. any_version=true counts them.",
        param="any_version",
    )
    conflict.reason = "other_version"
    raise conflict


def _shown(versions: Versions) -> str:
    ordered = sorted(versions, key=_age)
    names = [f"{name or 'unknown'} of epoch {epoch}" if epoch else name or "unknown" for epoch, name in ordered]
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "") or "none"
