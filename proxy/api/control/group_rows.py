"""The rows of a group's rollouts with their advantages, combined in the trainer's format."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from proxy.api.context import Context
from proxy.api.control.export_query import ExportQuery, refusal
from proxy.api.control.outcomes import Outcome, estimate, read_outcomes
from proxy.api.control.schemas import GroupFilter
from proxy.errors import Conflict, Damaged, DamagedStep, NotFound
from proxy.export import Inexpressible, Rows
from proxy.export.base import MissingReward
from proxy.rollouts.group import Group, lacks_reward
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import aside, read_short
from proxy.trajectory.advantages import ESTIMATORS
from proxy.trajectory.ratios import Recorded

T = TypeVar("T")
GONE: Final = "deleted or expired"
REWARD_PENDING: Final = "reward_pending"
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


_NO_ROWS: Final = Rows([], [])
_UNREWARDED: Final = Reason(MissingReward.code, "it has no reward")


class Member(NamedTuple):
    """A rollout of a group that has rows, with estimated advantages if an estimate was requested."""

    outcome: Outcome
    rows: Rows


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The members of a group that have rows, in the group's order; or none, and `reason`."""

    members: list[Member]
    skipped: list[
        dict[str, Any]
    ]  # all other members, by `rollout_id`, and the steps that no row trains, with the reasons
    reason: Reason | None = None
    outcomes: Sequence[Outcome] = ()  # of all members that exist

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts that have rows, with their rewards after the penalty."""
        return [member.outcome.rollout for member in self.members]

    @property
    def recorded(self) -> Counter[Recorded]:
        """The number of trained tokens, by how they were recorded."""
        counts: Counter[Recorded] = Counter()
        for member in self.members:
            counts.update(member.rows.recorded)
        return counts

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(len(member.rows.rows) for member in self.members)

    async def whole(self, query: ExportQuery) -> Any:
        """Combine the rows as the trainer takes them. Raises Conflict for members that cannot be combined."""
        try:
            return await aside(self.count, lambda: query.form.gather([member.rows for member in self.members]))
        except Inexpressible as error:
            raise refusal(error) from None

    def described(self, query: ExportQuery) -> dict[str, Any]:
        """Return what a consumer needs beside `whole`.

        `rollouts`, `rewards` and `advantages` have an entry for each member with rows; `rows` one for each row, in the
        order of `whole`: of its items, of the entries of its lists, or of the rows within its items.
        """
        has_advantages = query.asked.advantage != "none"
        return {
            "rollouts": [rollout.rollout_id for rollout in self.rollouts],
            "rewards": [rollout.reward for rollout in self.rollouts],
            "advantages": [rollout.advantages for rollout in self.rollouts] if has_advantages else None,
            "rows": self.about(query),
            "skipped": self.skipped,
        }

    def about(self, query: ExportQuery) -> list[dict[str, Any]]:
        """Describe each row, in the order in which `whole` has them."""
        described = [query.about(outcome.rollout, rows, outcome.raw) for outcome, rows in self.members]
        return [described[member][row] for member, row in query.form.order([rows for _, rows in self.members])]


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
    """Render the rows of a group. `rollouts` are its members that exist; `outcomes` are their outcomes, if they are known.

    An unreadable member is skipped; with `whole`, it raises DamagedStep. Raises Conflict if the format cannot express a member,
    or if all members must have rows and one has none.
    """
    check_members(query, group, rollouts, conditions)
    is_live = query.options.inherited != "trained"
    compared = [rollout for rollout in rollouts if not (is_live and rollout.is_inherited)] or rollouts
    if conditions.only_mixed and (equal := _why_equal(compared)) is not None:
        return GroupRows([], [], equal)
    excluded = _excluded(query, group, rollouts, conditions)
    if not query.rescoring:  # scoring takes long, and reads each member when its turn comes
        read_first = [rollout for rollout in rollouts if rollout.rollout_id not in excluded]
        query = replace(query, known=await read_short(context.store, read_first))
    outcomes = outcomes or await estimate(await read_outcomes(context, query, rollouts), query.asked.advantage)
    found = {outcome.rollout.rollout_id: outcome for outcome in outcomes}
    counted = [found[name] for name in group.members if name not in excluded]
    works = [partial(_read_member, context, query, outcome, conditions, whole=whole) for outcome in counted]
    # Members that are scored are all read at the same time, and to their end: what was scored is cached.
    read = iter(await all_ended(work() for work in works) if query.rescoring else [await work() for work in works])
    members = []
    missing: Counter[str] = Counter()
    skipped: list[dict[str, Any]] = [{"rollout_id": name, "why": why} for name, why in group.unneeded.items()]
    for name in group.members:
        rows, reason = (_NO_ROWS, excluded[name]) if name in excluded else next(read)
        skipped += [{"rollout_id": name, **entry} for entry in rows.skipped]
        if reason is None:
            members.append(Member(found[name], rows))
        else:
            skipped.append({"rollout_id": name, "why": reason.why})
            missing[reason.code] += 1
    least = conditions.least(group)
    if len(members) < least:
        return GroupRows([], skipped, _too_few(len(members), missing, least))
    return GroupRows(members, skipped, outcomes=outcomes)


async def all_ended(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run these works at the same time; return their results, or raise the first failure, once all have ended."""
    found = await asyncio.gather(*works, return_exceptions=True)
    results: list[T] = []
    for result in found:
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _why_equal(rollouts: Sequence[Rollout]) -> Reason | None:
    """Return why the rewards of a group are not mixed; None if they are."""
    signals = [(rollout.reward, tuple(sorted(rollout.thread_rewards.items()))) for rollout in rollouts]
    rewards = [signal for signal in signals if signal != (None, ())]
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
    count = sum(map(lacks_reward, rollouts))
    if not count:
        return None
    why = f"{count} of {len(rollouts)} rollouts lack rewards; claims wait for them for another {left_s:.0f} s"
    return Reason(REWARD_PENDING, why)


async def _read_member(
    context: Context, query: ExportQuery, outcome: Outcome, conditions: GroupFilter, *, whole: bool
) -> tuple[Rows, Reason | None]:
    """Return the rows of a member, and why it is omitted, if it is. Raises as `read_group_rows`."""
    rows, reason = _NO_ROWS, None
    try:
        rows = await (await query.plan(context, outcome.rollout)).rows()
    except NotFound:
        reason = Reason("no_rows", GONE)
    except Damaged as damage:
        if whole:
            raise
        reason = Reason(damage.reason, damage.message)
    except Conflict as conflict:
        if conflict.reason != MissingReward.code:
            raise
        reason = Reason(conflict.reason, conflict.message)
    else:
        if not rows.rows:
            reason = Reason("no_rows", without_rows(rows.skipped))
        elif query.asked.advantage in ESTIMATORS and not (outcome.returns or outcome.rollout.thread_rewards):
            rows, reason = _NO_ROWS, _UNREWARDED  # its steps have rewards, but none that has a row
    if reason is not None and conditions.members == "all":
        raise _incomplete(outcome.rollout.rollout_id, reason)
    return rows, reason


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
    status = "completed" if conditions.members == "completed" else None
    is_any_rewarded = any(it.reward is not None for it in rollouts if status in (None, it.status))
    for name in group.members:
        rollout = found.get(name)
        if rollout is None:
            excluded[name] = Reason("no_rows", GONE)
        elif status not in (None, rollout.status):
            excluded[name] = Reason("not_completed", f"its status is {rollout.status}")
        elif rollout.reward is None and _needs_reward(query, rollout, conditions, is_any_rewarded=is_any_rewarded):
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
