"""What the rollouts of an export earned: rewards after the penalty of long responses, returns and advantages.

Only returns of turns, the penalty and playbacks need the steps. They are read for this and again for the rows, so that the
steps of a whole group are never in memory.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean
from typing import Any, Final

from msgspec import structs

from proxy.api.context import Context
from proxy.api.control.export_query import ExportQuery
from proxy.errors import Conflict, Damaged, NotFound
from proxy.rollouts.group import counted, find_group, read_members
from proxy.rollouts.policy import Announced
from proxy.rollouts.rollout import LARGEST, Rollout
from proxy.rollouts.steps import aside, facts_of, weights_of
from proxy.rollouts.values import read_values
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.advantages import ESTIMATORS, VINE, Advantages, Returns, episodes, returns, vine
from proxy.trajectory.facts import RolloutFacts

_OUTCOMES_OF_A_STEP: Final = 32  # that take as long as a step in `aside`,
_RETURNS_OF_A_STEP: Final = 1024  # and returns that do


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rollout with its rewards after the penalty, and with its advantages once they are estimated."""

    rollout: Rollout
    returns: tuple[float, ...] = ()  # of each turn, or one of the whole rollout; none if the rollout has no reward
    turns: tuple[str, ...] | None = None  # the ids of the turns; None if one return is for the whole rollout
    raw: RolloutFacts | None = None  # before the penalty, if there is one


async def read_outcomes(
    context: Context, query: ExportQuery, rollouts: Sequence[Rollout], group: Sequence[Rollout] = ()
) -> list[Outcome]:
    """Return what these rollouts earned, in their order; without advantages. `group`: theirs, if they are not all of it."""
    outcomes = []
    for rollout in rollouts:
        outcome = Outcome(rollout, () if rollout.reward is None else (float(rollout.reward),))
        # These depend on the steps.
        if query.is_by_turn or query.penalty is not None or _drops_inherited(query, rollout):
            with suppress(NotFound, Damaged):  # it gets no rows, for this reason
                if query.asked.advantage == VINE:
                    outcome = await _branched(context, query, rollout, group or rollouts)
                else:
                    outcome = await _played(context, query, rollout)
        outcomes.append(outcome)
    return outcomes


async def _played(context: Context, query: ExportQuery, rollout: Rollout) -> Outcome:
    """Return what a rollout earned by its steps: after the penalty, and for each turn if there are turns."""
    steps, _ = await query.read(context, rollout, whole=False)

    def played() -> Outcome:
        facts = raw = facts_of(rollout)
        found = episodes(steps, facts, query.options_of(rollout))
        if query.penalty is not None:
            for each in found:
                facts = each.penalized(facts, query.penalty)
        is_earned = facts.reward is not None
        if _drops_inherited(query, rollout):  # a reward of inherited steps only is no sample of the policy's return
            live = {each.thread for each in found}
            rewards = {name: reward for name, reward in facts.thread_rewards.items() if name in live}
            facts, is_earned = replace(facts, thread_rewards=rewards), is_earned and found[0].steps != ()
        lowered = structs.replace(
            rollout, reward=facts.reward, step_rewards=facts.step_rewards, thread_rewards=facts.thread_rewards
        )
        whole = Outcome(lowered, (float(facts.reward or 0),) if is_earned else (), raw=raw)
        turns = [each.turns(facts) for each in found]
        if not (query.is_by_turn and any(turns)):
            return whole
        discount = 1.0 if query.asked.discount is None else query.asked.discount
        by_turn: dict[str, float] = {}
        for each, of_episode in zip(found, turns, strict=True):
            earned = returns(of_episode, facts.of_thread(each.thread), discount)
            by_turn |= zip(of_episode, earned, strict=False)  # none of them if the last turn has no reward
        return replace(whole, returns=tuple(by_turn.values()), turns=tuple(by_turn))

    return await aside(weights_of(steps).packed, played)


async def _branched(context: Context, query: ExportQuery, rollout: Rollout, group: Sequence[Rollout]) -> Outcome:
    """Return the outcome of a rollout of a group, with `vine` for each trained turn.

    Raises Conflict if its beginning has no value, and no other rollout has a reward.
    """
    if rollout.thread_rewards:
        raise _no_value(rollout, "has thread_rewards; its branches are compared by the reward of the whole rollout")
    if rollout.reward is None:
        return Outcome(rollout)
    steps, _ = await query.read(context, rollout, whole=False)
    found = await read_values(context.store, rollout, context.metrics, any_version=query.asked.any_version)
    values = {value.index: value.mean for value in found if value.mean is not None}
    (episode,) = await aside(
        weights_of(steps).packed, lambda: episodes(steps, facts_of(rollout), query.options_of(rollout))
    )
    indexes = {step.step_id: step.index or 0 for step in steps}
    turns = [indexes[step_id] for step_id in episode.trained]
    start = 0.0
    if turns and min(turns) < min(values, default=inf):
        others = [it for it in group if it.rollout_id != rollout.rollout_id and not it.is_inherited]
        rewards = [it.reward for it in others if it.reward is not None]
        if not rewards:
            raise _no_value(rollout, "has no branches at its beginning, and no other rollout of its group has a reward")
        start = fmean(rewards)
    return Outcome(rollout, vine(turns, values, start, float(rollout.reward)), episode.trained)


def _no_value(rollout: Rollout, why: str) -> Conflict:
    conflict = Conflict(f"advantage=vine: rollout {rollout.rollout_id!r} {why}.", param="advantage")
    conflict.reason = "no_value"
    return conflict


async def _group_of(context: Context, rollout: Rollout) -> Sequence[Rollout]:
    """Return the rollouts of its group that count."""
    group = None if rollout.group_id is None else await find_group(context.store, rollout.group_id)
    return () if group is None else counted(group, (await read_members(context.store, group, context.metrics))[0])[1]


def _drops_inherited(query: ExportQuery, rollout: Rollout) -> bool:
    """Return whether advantages are estimated without the inherited steps of a rollout."""
    is_estimated = query.asked.advantage in ESTIMATORS and query.options.inherited != "trained"
    return is_estimated and rollout.counts.get("inherited", 0) > 0


async def outcome_alone(context: Context, query: ExportQuery, rollout: Rollout) -> Outcome:
    """Return what a rollout earned that is exported without its group. Raises Conflict as `estimated` does."""
    group = await _group_of(context, rollout) if query.asked.advantage == VINE else ()
    (outcome,) = await estimate(await read_outcomes(context, query, [rollout], group), query.asked.advantage)
    return outcome


async def estimate(outcomes: Sequence[Outcome], advantage: str) -> list[Outcome]:
    """Return `estimated`, without blocking the event loop for large batches."""
    returns = sum(len(outcome.returns) for outcome in outcomes)
    weight = len(outcomes) // _OUTCOMES_OF_A_STEP + returns // _RETURNS_OF_A_STEP
    return await aside(weight, lambda: estimated(outcomes, advantage))


def estimated(outcomes: Sequence[Outcome], advantage: str) -> list[Outcome]:
    """Return the outcomes with estimated advantages, or unchanged where no estimate was requested.

    The baseline averages all rollouts with a reward, including rollouts without rows: each is a sample of the policy's return,
    unless all of its steps are inherited.
    A rollout without a reward gets no advantage. The reward of a thread is compared with the rewards of threads of the same
    kind, or of the same agent. Raises Conflict if an advantage exceeds the range of float32, the type that trainers use.
    """
    if advantage not in ESTIMATORS:
        return list(outcomes)
    estimator = ESTIMATORS[advantage]
    values = iter(estimator([outcome.returns for outcome in outcomes if outcome.returns]))
    found = []
    for outcome in outcomes:
        own = _in_range(outcome, next(values)) if outcome.returns else None
        if own is not None and outcome.turns is not None:
            advantages: Any = dict(zip(outcome.turns, own, strict=True))
        else:
            advantages = None if own is None else own[0]
        found.append(replace(outcome, rollout=structs.replace(outcome.rollout, advantages=advantages)))
    return found if any(outcome.turns is not None for outcome in found) else _with_thread_advantages(found, estimator)


def _with_thread_advantages(outcomes: Sequence[Outcome], estimator: Callable[[Returns], Advantages]) -> list[Outcome]:
    """Return the outcomes with the advantages of the threads that have a reward; a rollout counts once for each kind."""
    advantages: list[dict[str, float]] = [{} for _ in outcomes]
    for kind in sorted({_kind(name) for outcome in outcomes for name in outcome.rollout.thread_rewards}):
        names = [[name for name in outcome.rollout.thread_rewards if _kind(name) == kind] for outcome in outcomes]
        pairs = list(zip(outcomes, names, strict=True))
        values = iter(
            estimator([[outcome.rollout.thread_rewards[name] for name in own] for outcome, own in pairs if own])
        )
        for (outcome, own), known in zip(pairs, advantages, strict=True):
            if own:
                known.update(zip(own, _in_range(outcome, next(values)), strict=True))
    return [
        replace(outcome, rollout=structs.replace(outcome.rollout, thread_advantages=known)) if known else outcome
        for outcome, known in zip(outcomes, advantages, strict=True)
    ]


def _kind(thread: str) -> str:
    """Return the agent, or the kind with the colon before the digest, which no name of an agent has."""
    kind, colon, _ = thread.partition(":")
    return kind + colon


def _in_range(outcome: Outcome, values: Sequence[float]) -> Sequence[float]:
    """Return the advantages of a rollout. Raises Conflict."""
    if not all(-LARGEST <= value <= LARGEST for value in values):
        raise Conflict(
            f"An advantage of rollout {outcome.rollout.rollout_id!r} exceeds the range of float32; its rewards are too large.",
            param="advantage",
        )
    return values


_COMPARED: Final = 2  # rewards, at least, that are equal or not


@dataclass(frozen=True, slots=True)
class Earned:
    """The rewards of a group's rollouts that have one, and the number of tokens that each rollout sampled."""

    rewards: tuple[float, ...]
    tokens: tuple[int, ...]


def earned_by(rollouts: Sequence[Rollout]) -> Earned:
    """Return what these rollouts earned, before the penalty of long responses; nothing if all of their steps are inherited."""
    rollouts = [rollout for rollout in rollouts if not rollout.is_inherited]
    return Earned(
        tuple(float(rollout.reward) for rollout in rollouts if rollout.reward is not None),
        tuple(rollout.counts.get("sampled_tokens", 0) for rollout in rollouts),
    )


def observe_claimed(
    metrics: Metrics, policy: str, earned: Earned, oldest: str | None, epoch: int, announced: Announced
) -> None:
    """Count a group that is claimed for a policy. `oldest` is the oldest version of its tokens of this policy, of `epoch`."""
    rewards = earned.rewards
    for count in earned.tokens:
        metrics.rollout_tokens.labels(policy).observe(count)
    with metrics.reward_windows.lock:
        versions = metrics.reward_windows.of(policy, oldest, epoch)
        for reward in rewards:
            metrics.reward.labels(policy, versions).observe(reward)
            metrics.reward_amount.labels(policy, versions, "negative" if reward < 0 else "positive").inc(abs(reward))
    if rewards:
        metrics.group_reward_mean.labels(policy).observe(mean := fmean(rewards))
        if len(rewards) >= _COMPARED:
            spread = sqrt(fmean((reward - mean) ** 2 for reward in rewards))
            metrics.group_reward_spread.labels(policy).observe(spread)
            metrics.compared_groups.labels(policy, "equal" if len(set(rewards)) == 1 else "different").inc()
    staleness = announced.staleness(oldest, epoch)
    if staleness is not None:
        metrics.claim_staleness.labels(policy).observe(max(0, staleness))
