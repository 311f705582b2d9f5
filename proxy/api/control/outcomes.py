"""What the rollouts of an export earned: rewards after the penalty of long responses, returns and advantages.

Only returns of turns and the penalty need the steps. They are read for this and again for the rows, so that the steps of a
whole group are never in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from proxy.api.context import Context
from proxy.api.control.export_query import ExportQuery
from proxy.api.reward_values import LARGEST
from proxy.errors import Conflict, DamagedStep, NotFound
from proxy.rollouts.rollout import Rollout
from proxy.rollouts.steps import aside, facts_of, weights_of
from proxy.trajectory.advantages import ESTIMATORS
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.returns import Episode, episode, returns

_OUTCOMES_OF_A_STEP: Final = 32  # that take as long as a step in `aside`,
_RETURNS_OF_A_STEP: Final = 1024  # and returns that do


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rollout with its rewards after the penalty, and with its advantages once they are estimated.

    `returns` has one for each turn, or one for the whole rollout; none if the rollout has no reward. `turns` are the ids of the
    turns, None if the return is that of the whole rollout. `raw_reward` is the reward before the penalty.
    """

    rollout: Rollout
    returns: tuple[float, ...] = ()
    turns: tuple[str, ...] | None = None
    raw_reward: float | None = None


async def read_outcomes(context: Context, query: ExportQuery, rollouts: Sequence[Rollout]) -> list[Outcome]:
    """Return what these rollouts earned, in their order; without advantages."""
    return [await _outcome(context, query, rollout) for rollout in rollouts]


async def outcome_alone(context: Context, query: ExportQuery, rollout: Rollout) -> Outcome:
    """Return what a rollout earned that is exported without its group. Raises Conflict as `estimated` does."""
    (outcome,) = await estimate(await read_outcomes(context, query, [rollout]), query.advantage)
    return outcome


async def estimate(outcomes: Sequence[Outcome], advantage: str) -> list[Outcome]:
    """Return `estimated`, without blocking the event loop for large batches."""
    returns = sum(len(outcome.returns) for outcome in outcomes)
    weight = len(outcomes) // _OUTCOMES_OF_A_STEP + returns // _RETURNS_OF_A_STEP
    return await aside(weight, lambda: estimated(outcomes, advantage))


def estimated(outcomes: Sequence[Outcome], advantage: str) -> list[Outcome]:
    """Return the outcomes with estimated advantages, or unchanged where no estimate was requested.

    The baseline is over all rollouts with a reward, also over those that turn out to have no rows: each is a sample of the
    policy's return. A rollout without a reward gets no advantage.

    Raises Conflict if an advantage exceeds the range of float32, in which trainers have it.
    """
    if advantage not in ESTIMATORS:
        return list(outcomes)
    values = iter(ESTIMATORS[advantage]([outcome.returns for outcome in outcomes if outcome.returns]))
    return [_with_advantages(outcome, next(values) if outcome.returns else None) for outcome in outcomes]


def _with_advantages(outcome: Outcome, values: Sequence[float] | None) -> Outcome:
    if values is None:
        return replace(outcome, rollout=structs.replace(outcome.rollout, advantages=None))
    if not all(-LARGEST <= value <= LARGEST for value in values):
        raise Conflict(
            f"An advantage of rollout {outcome.rollout.rollout_id!r} exceeds the range of float32; its rewards are too large.",
            param="advantage",
        )
    found = values[0] if outcome.turns is None else dict(zip(outcome.turns, values, strict=True))
    return replace(outcome, rollout=structs.replace(outcome.rollout, advantages=found))


async def _outcome(context: Context, query: ExportQuery, rollout: Rollout) -> Outcome:
    whole = () if rollout.reward is None else (float(rollout.reward),)
    if not query.reads_ahead:
        return Outcome(rollout, whole, raw_reward=rollout.reward)
    try:
        facts, played = await _played(context, query, rollout)
    except (NotFound, DamagedStep):
        return Outcome(rollout, whole, raw_reward=rollout.reward)  # it gets no rows, for this reason
    raw_reward = rollout.reward
    rollout = structs.replace(rollout, reward=facts.reward, step_rewards=facts.step_rewards)
    if query.is_by_turn and (turns := played.turns(facts)):
        discount = 1.0 if query.discount is None else query.discount
        return Outcome(rollout, returns(turns, facts, discount), turns, raw_reward)
    return Outcome(rollout, () if facts.reward is None else (float(facts.reward),), raw_reward=raw_reward)


async def _played(context: Context, query: ExportQuery, rollout: Rollout) -> tuple[RolloutFacts, Episode]:
    """Return the facts of a rollout after the penalty, and what its rows train."""
    steps, _ = await query.read(context, rollout, whole=False)

    def played() -> tuple[RolloutFacts, Episode]:
        facts = facts_of(rollout)
        found = episode(steps, facts, query.options)
        return (facts if query.penalty is None else found.penalized(facts, query.penalty)), found

    return await aside(weights_of(steps).packed, played)
