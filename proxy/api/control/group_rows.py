"""The rows of a group's rollouts with their advantages, combined in the trainer's format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.api.context import Context
from proxy.api.control.export_query import ExportQuery
from proxy.api.control.outcomes import Outcome, estimated, read_outcomes
from proxy.errors import Conflict, DamagedStep, NotFound
from proxy.export import Inexpressible, Rows
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import aside

GONE: Final = "deleted or expired"


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """The conditions on a group: a minimum of rollouts with rows, and optionally rewards that differ."""

    min_group: int = 1
    only_mixed: bool = False


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
    """The members of a group that have rows, in the group's order; or none, and `why`.

    `skipped` names every other member of the group by its `rollout_id`, with the reason, and the steps that no row trains.
    """

    members: list[Member]
    skipped: list[dict[str, Any]]
    why: str | None = None
    outcomes: Sequence[Outcome] = ()  # of all members that exist

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(len(member.rows.rows) for member in self.members)

    async def whole(self, query: ExportQuery) -> Any:
        """Combine the rows as the trainer takes them. Raises Conflict for members that cannot be combined."""
        try:
            return await aside(self.count, lambda: query.form.gather(self._rows()))
        except Inexpressible as error:
            raise Conflict(str(error), param="format") from None

    def described(self, query: ExportQuery) -> dict[str, Any]:
        """Return what a consumer needs beside `whole`.

        `rollouts`, `rewards` and `advantages` have an entry for each member with rows; `rows` one for each row, in the
        order of `whole`: of its items, of the entries of its lists, or of the rows within its items.
        """
        rollouts = [member.rollout for member in self.members]
        advantages = None if query.advantage == "none" else [rollout.advantages for rollout in rollouts]
        return {
            "rollouts": [rollout.rollout_id for rollout in rollouts],
            "rewards": [rollout.reward for rollout in rollouts],
            "advantages": advantages,
            "rows": self.about(query),
            "skipped": self.skipped,
        }

    def about(self, query: ExportQuery) -> list[dict[str, Any]]:
        """Describe each row, in the order in which `whole` has them."""
        described = [
            query.about(member.rollout, member.rows.trained, member.outcome.raw_reward) for member in self.members
        ]
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

    Raises Conflict if the format cannot express one of them. A member that cannot be read is skipped; where a group must be
    `whole`, it raises DamagedStep.
    """
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if conditions.only_mixed and len(set(rewards)) < 2:
        return GroupRows([], [], f"all its {len(rollouts)} rollouts have the same reward")
    outcomes = outcomes or estimated(await read_outcomes(context, query, rollouts), query.advantage)
    found = {outcome.rollout.rollout_id: outcome for outcome in outcomes}
    members, skipped = [], []
    for name in group.members:
        if name not in found:
            skipped.append({"rollout_id": name, "why": GONE})
            continue
        try:
            rows = await (await query.plan(context, found[name].rollout)).rows()
        except NotFound:
            skipped.append({"rollout_id": name, "why": GONE})
        except DamagedStep as damage:
            if whole:
                raise
            skipped.append({"rollout_id": name, "why": damage.message})
        else:
            skipped += [{"rollout_id": name, **entry} for entry in rows.skipped]
            if rows.rows:
                members.append(Member(found[name], rows))
            else:
                skipped.append({"rollout_id": name, "why": without_rows(rows.skipped)})
    if len(members) < conditions.min_group:
        return GroupRows([], skipped, f"{len(members)} of its rollouts have rows; min_group is {conditions.min_group}")
    return GroupRows(members, skipped, outcomes=outcomes)


def without_rows(skipped: Sequence[object]) -> str:
    """Return why a rollout has no rows; its skipped steps are listed separately."""
    return "none of its steps has a row" if skipped else "it has no steps"
