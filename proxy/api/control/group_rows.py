"""The rows of a group's rollouts with their advantages, combined in the trainer's format."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from proxy.api.context import Context
from proxy.api.control.export_query import ExportQuery, refusal
from proxy.api.control.outcomes import Outcome, estimate, read_outcomes
from proxy.api.control.schemas import GroupFilter
from proxy.errors import Conflict, Damaged, DamagedStep, NotFound
from proxy.export import Inexpressible, Rows
from proxy.export.base import MissingReward
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import aside
from proxy.trajectory.advantages import ESTIMATORS

GONE: Final = "deleted or expired"
REWARD_PENDING: Final = "reward_pending"
_SCORED: Final = ("completed", "truncated")  # rollouts that get a reward
_MISSING: Final = {
    MissingReward.code: "lack rewards",
    "no_rows": "have no rows",
    "not_completed": "are not completed",
    DamagedStep.reason: "have an unreadable step",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a group or one of its members is not exported: the kind, and a sentence."""

    code: str
    why: str


_UNREWARDED: Final = Reason(MissingReward.code, "it has no reward")


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group that has rows."""

    outcome: Outcome
    rows: Rows

    @property
    def rollout(self) -> Rollout:
        """The rollout, with its rewards after the penalty, and estimated advantages if an estimate was requested."""
        return self.outcome.rollout


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The members of a group that have rows, in the group's order; or none, and `reason`.

    `skipped` names every other member of the group by its `rollout_id`, with the reason, and the steps that no row trains.
    """

    members: list[Member]
    skipped: list[dict[str, Any]]
    reason: Reason | None = None
    outcomes: Sequence[Outcome] = ()  # of all members that exist

    @property
    def why(self) -> str | None:
        """Why the group has no rows, as a sentence; None if it has rows."""
        return None if self.reason is None else self.reason.why

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(len(member.rows.rows) for member in self.members)

    async def whole(self, query: ExportQuery) -> Any:
        """Combine the rows as the trainer takes them. Raises Conflict for members that cannot be combined."""
        try:
            return await aside(self.count, lambda: query.form.gather(self._rows()))
        except Inexpressible as error:
            raise refusal(error) from None

    def described(self, query: ExportQuery) -> dict[str, Any]:
        """Return what a consumer needs beside `whole`.

        `rollouts`, `rewards` and `advantages` have an entry for each member with rows; `rows` one for each row, in the
        order of `whole`: of its items, of the entries of its lists, or of the rows within its items.
        """
        rollouts = [member.rollout for member in self.members]
        advantages = None if query.asked.advantage == "none" else [rollout.advantages for rollout in rollouts]
        return {
            "rollouts": [rollout.rollout_id for rollout in rollouts],
            "rewards": [rollout.reward for rollout in rollouts],
            "advantages": advantages,
            "rows": self.about(query),
            "skipped": self.skipped,
        }

    def about(self, query: ExportQuery) -> list[dict[str, Any]]:
        """Describe each row, in the order in which `whole` has them."""
        described = [query.about(member.rollout, member.rows, member.outcome.raw) for member in self.members]
        return [described[member][row] for member, row in query.form.order(self._rows())]

    def _rows(self) -> list[Rows]:
        return [member.rows for member in self.members]


async def read_group_rows(
    context: Context,
    query: ExportQuery,
    group: Group,
    rollouts: Sequence[Rollout],
    conditions: GroupFilter,
    *,
    whole: bool = False,
    outcomes: Sequence[Outcome] | None = None,
) -> GroupRows:
    """Render the rows of a group; `rollouts` are those of its members that exist, `outcomes` are theirs if they are known.

    Raises Conflict if the format cannot express one of them, or if all members must have rows and one has none. A member that
    cannot be read is skipped; where a group must be `whole`, it raises DamagedStep.
    """
    check_members(query, group, rollouts, conditions)
    if conditions.only_mixed and (equal := _why_equal(rollouts)) is not None:
        return GroupRows([], [], equal)
    excluded = _excluded(query, group, rollouts, conditions)
    outcomes = outcomes or await estimate(await read_outcomes(context, query, rollouts), query.asked.advantage)
    found = {outcome.rollout.rollout_id: outcome for outcome in outcomes}
    members = []
    missing: Counter[str] = Counter()
    skipped: list[dict[str, Any]] = [{"rollout_id": name, "why": why} for name, why in group.unneeded.items()]
    counted = [found[name] for name in group.members if name not in excluded]
    async with aclosing(_read_members(context, query, counted, whole=whole)) as reading:
        for name in group.members:
            reason = excluded.get(name)
            if reason is None:
                read = await anext(reading)
                if isinstance(read, Member):
                    skipped += [{"rollout_id": name, **entry} for entry in read.rows.skipped]
                    reason = None if read.rows.rows else Reason("no_rows", without_rows(read.rows.skipped))
                    members += [] if reason else [read]
                else:
                    reason = read
            if reason is not None:
                if conditions.members == "all":
                    raise _incomplete(name, reason)
                skipped.append({"rollout_id": name, "why": reason.why})
                missing[reason.code] += 1
    least = conditions.least(group)
    if len(members) < least:
        return GroupRows([], skipped, _too_few(len(members), missing, least))
    return GroupRows(members, skipped, outcomes=outcomes)


def _why_equal(rollouts: Sequence[Rollout]) -> Reason | None:
    """Return why the rewards of a group are not mixed; None if they are."""
    rewards = [known for rollout in rollouts if (known := _rewards_of(rollout)) is not None]
    if len(set(rewards)) > 1:
        return None
    if not rewards:
        return Reason(MissingReward.code, f"{len(rollouts)} of {len(rollouts)} rollouts lack rewards")
    if lacking := len(rollouts) - len(rewards):
        why = f"its rewards are equal: {len(rewards)} of {len(rollouts)} rollouts; {lacking} lack rewards"
    else:
        why = f"all its {len(rollouts)} rollouts have the same reward"
    return Reason("equal_rewards", why)


def _too_few(count: int, missing: Mapping[str, int], least: int) -> Reason:
    """Return why a group with rows of `count` members is not exported: what the others lack, by their number."""
    total = count + sum(missing.values())
    lacking = [f"{number} of {total} rollouts {_MISSING[code]}" for code, number in missing.items()]
    why = f"{', '.join(lacking) or f'it has {total} rollouts'}; {count} can be trained, min_group is {least}"
    is_reward = count + missing.get(MissingReward.code, 0) >= least
    return Reason(MissingReward.code if is_reward else "too_few_members", why)


def why_pending(rollouts: Sequence[Rollout], left_s: float) -> Reason | None:
    """Return why a claim waits for rewards of these members of a group; None if each that gets a reward has one."""
    count = sum(rollout.status in _SCORED and not _has_signal(rollout) for rollout in rollouts)
    if not count:
        return None
    why = f"{count} of {len(rollouts)} rollouts lack rewards; claims wait for them for another {left_s:.0f} s"
    return Reason(REWARD_PENDING, why)


def _has_signal(rollout: Rollout) -> bool:
    """Return whether a rollout has a reward, of itself or in it, or an advantage."""
    in_it = rollout.step_rewards or rollout.thread_rewards
    return rollout.reward is not None or rollout.advantages is not None or bool(in_it)


async def _read_members(
    context: Context, query: ExportQuery, outcomes: Sequence[Outcome], *, whole: bool
) -> AsyncGenerator[Member | Reason, None]:
    """Yield what `_read_member` returns for each outcome; members that are scored are all read at the same time."""
    if query.rescoring is None:
        for outcome in outcomes:
            yield await _read_member(context, query, outcome, whole=whole)
        return
    start = asyncio.get_running_loop().create_task
    reading = [start(_read_member(context, query, outcome, whole=whole)) for outcome in outcomes]
    try:
        for task in reading:
            yield await task
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def _rewards_of(rollout: Rollout) -> tuple[Any, ...] | None:
    """Return the rewards of a rollout and of its threads; None if it has none."""
    of_threads = tuple(sorted(rollout.thread_rewards.items()))
    return (rollout.reward, of_threads) if rollout.reward is not None or of_threads else None


async def _read_member(context: Context, query: ExportQuery, outcome: Outcome, *, whole: bool) -> Member | Reason:
    """Return a member with its rows, or why it has none. Raises as `read_group_rows`."""
    try:
        member = Member(outcome, await (await query.plan(context, outcome.rollout)).rows())
    except NotFound:
        return Reason("no_rows", GONE)
    except Damaged as damage:
        if whole:
            raise
        return Reason(damage.reason, damage.message)
    except Conflict as conflict:
        if conflict.reason != MissingReward.code:
            raise
        return Reason(conflict.reason, conflict.message)
    if query.asked.advantage in ESTIMATORS and not (outcome.returns or outcome.thread_rewards) and member.rows.rows:
        return _UNREWARDED  # its steps have rewards, but none that has a row
    return member


def check_members(query: ExportQuery, group: Group, rollouts: Sequence[Rollout], conditions: GroupFilter) -> None:
    """Raise Conflict if all members must be exported and one is missing or has no reward where one is required."""
    if conditions.members == "all":
        for name, reason in _excluded(query, group, rollouts, conditions).items():
            raise _incomplete(name, reason)


def _incomplete(name: str, reason: Reason) -> Conflict:
    conflict = Conflict(f"members=all requires rows of every rollout; rollout {name!r}: {reason.why}", param="members")
    conflict.reason = reason.code
    return conflict


def _excluded(
    query: ExportQuery, group: Group, rollouts: Sequence[Rollout], conditions: GroupFilter
) -> dict[str, Reason]:
    """Return the members that do not count, with the reason."""
    excluded = {}
    found = {rollout.rollout_id: rollout for rollout in rollouts}
    is_counted = {
        name: conditions.members != "completed" or rollout.status == "completed" for name, rollout in found.items()
    }
    is_any_rewarded = any(rollout.reward is not None for name, rollout in found.items() if is_counted[name])
    for name in group.members:
        if name not in found:
            excluded[name] = Reason("no_rows", GONE)
        elif not is_counted[name]:
            excluded[name] = Reason("not_completed", f"its status is {found[name].status}")
        elif found[name].reward is None and _needs_reward(
            query, found[name], conditions, is_any_rewarded=is_any_rewarded
        ):
            excluded[name] = _UNREWARDED
    return excluded


def _needs_reward(query: ExportQuery, rollout: Rollout, conditions: GroupFilter, *, is_any_rewarded: bool) -> bool:
    """Return whether a member without a reward does not count. The rewards of its steps or threads can be enough."""
    if conditions.members == "rewarded" or (conditions.members == "all" and conditions.only_mixed):
        return True
    if query.asked.advantage in ESTIMATORS:
        return not ((query.is_by_turn and rollout.step_rewards) or rollout.thread_rewards)
    if query.form.reward == "required":
        return not (rollout.step_rewards or rollout.thread_rewards)
    return query.form.reward == "uniform" and is_any_rewarded


def without_rows(skipped: Sequence[object]) -> str:
    """Return why a rollout has no rows; its skipped steps are listed separately."""
    return "none of its steps has a row" if skipped else "it has no steps"
