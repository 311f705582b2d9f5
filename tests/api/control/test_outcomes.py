"""Rewards after the penalty, returns and advantages of the rollouts of an export."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from msgspec import structs
from tests.support.forests import make_step
from tests.support.playbacks import branched
from tests.support.policies import policies_of

from proxy.api.control import outcomes as outcomes_module
from proxy.api.control.export_query import ExportQuery
from proxy.api.control.outcomes import Earned, Outcome, earned_by, estimate, estimated, outcome_alone, read_outcomes
from proxy.api.control.schemas import ExportOptions
from proxy.errors import Conflict, DamagedStep
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.rollouts.rollout import Rollout, no_rollout
from proxy.trajectory.advantages import SoftPenalty
from proxy.trajectory.sequence import Options
from proxy.trajectory.thread_rules import ThreadOptions

CONTEXT = SimpleNamespace(store=None, policies=policies_of(), threads=ThreadOptions())
LARGEST = 3.4028234663852886e38  # of float32


def played(name, *rewards, reward=None):
    """Return a rollout of one turn for each of these rewards (None: none), and its steps."""
    steps, prompt = [], [1]
    for turn in range(len(rewards)):
        steps.append(make_step(f"{name}-{turn}", prompt, [10 + turn, 9], rollout_id=name))
        prompt = [*prompt, 10 + turn, 9, 1]
    step_rewards = {f"{name}-{turn}": own for turn, own in enumerate(rewards) if own is not None}
    return Rollout(name, "b", 1, 1, reward=reward, step_rewards=step_rewards), steps


def query_for(advantage="given", penalty=None, **options):
    asked = ExportOptions(advantage=advantage, **options)
    return ExportQuery(
        FORMATS["sequences"], CONTAINERS["json"], Options(inherited=asked.inherited), Fill(), asked, penalty
    )


async def outcomes_of(query, *members):
    """Return the outcomes of rollouts. Reading a member's steps returns them, or raises the exception in their place."""
    by_name = {rollout.rollout_id: steps for rollout, steps in members}

    async def read_steps(_store, rollout, **_):
        found = by_name[rollout.rollout_id]
        if isinstance(found, Exception):
            raise found
        return found

    with patch("proxy.api.control.export_query.read_steps", read_steps):
        return estimated(
            await read_outcomes(CONTEXT, query, [rollout for rollout, _ in members]), query.asked.advantage
        )


def advantages(outcomes):
    return [outcome.rollout.advantages for outcome in outcomes]


async def test_the_advantages_given_and_none_do_not_change_rollouts():
    members = [played("r0", None, reward=1.0), played("r1", None)]

    for advantage in ("given", "none"):
        outcomes = await outcomes_of(query_for(advantage), *members)
        assert [rollout for rollout, _ in members] == [outcome.rollout for outcome in outcomes]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
async def test_a_rollout_without_a_reward_has_no_advantage_and_is_not_in_the_baseline(estimator):
    members = [played("r0", None, reward=1.0), played("r1", None), played("r2", None, reward=0.0)]

    assert advantages(await outcomes_of(query_for(estimator), *members)) == [1.0, None, -1.0]


def test_an_agent_named_as_a_kind_is_not_compared_with_threads_of_the_kind():
    """A thread is compared with threads of its kind, or with threads of its agent."""
    threads = [{"sub-agent": 1.0, "sub-agent:0a": 5.0}, {"sub-agent": 0.0, "sub-agent:0b": 7.0}]
    rollouts = [structs.replace(played(f"r{n}")[0], thread_rewards=given) for n, given in enumerate(threads)]
    found = estimated([Outcome(rollout) for rollout in rollouts], "dr_grpo")

    assert [outcome.rollout.thread_advantages for outcome in found] == [
        {"sub-agent": 0.5, "sub-agent:0a": -1.0},
        {"sub-agent": -0.5, "sub-agent:0b": 1.0},
    ]


async def test_steps_are_not_read_for_advantages_of_rollouts():
    unread = RuntimeError("read")

    assert advantages(
        await outcomes_of(
            query_for("dr_grpo"),
            (Rollout("r0", "b", 1, 1, reward=1.0), unread),
            (Rollout("r1", "b", 1, 1, reward=0.0), unread),
        )
    ) == [0.5, -0.5]


async def test_step_gives_each_turn_its_discounted_reward_to_go():
    (undiscounted,) = await outcomes_of(query_for("step"), played("r0", 1.0, None, reward=2.0))
    (discounted,) = await outcomes_of(query_for("step", discount=0.5), played("r0", 1.0, None, reward=2.0))

    assert undiscounted.rollout.advantages == {"r0-0": 3.0, "r0-1": 2.0}
    assert discounted.rollout.advantages == {"r0-0": 2.0, "r0-1": 2.0}


async def test_a_discount_estimates_the_returns_of_turns_over_the_group():
    """The first rollout has the mean return 2.5, the second 0."""
    members = [played("r0", 1.0, 2.0), played("r1", None, reward=0.0)]

    assert advantages(await outcomes_of(query_for("dr_grpo", discount=1.0), *members)) == [
        {"r0-0": 1.75, "r0-1": 0.75},
        {"r1-0": -1.25},
    ]
    assert advantages(await outcomes_of(query_for("rloo", discount=1.0), *members)) == [
        {"r0-0": 3.0, "r0-1": 2.0},
        {"r1-0": -2.5},
    ]


@pytest.mark.parametrize("steps", [[], no_rollout("r1"), DamagedStep("the step at index 0 cannot be read")])
async def test_a_rollout_without_turns_has_its_reward_as_its_return(steps):
    """It has no rows, but its reward is a sample of the policy's return."""
    members = [played("r0", None, reward=1.0), (Rollout("r1", "b", 1, 1, reward=0.0), steps)]
    found = advantages(await outcomes_of(query_for("dr_grpo", discount=0.9), *members))

    assert found[0] == {"r0-0": 0.5}


async def test_a_rollout_without_the_reward_of_its_last_turn_has_no_advantage():
    members = [played("r0", 1.0, None), played("r1", None, reward=1.0), played("r2", None, reward=0.0)]

    assert advantages(await outcomes_of(query_for("grpo", discount=1.0), *members)) == [
        None,
        {"r1-0": 1.0},
        {"r2-0": -1.0},
    ]


async def test_the_penalty_lowers_the_reward_before_advantages_are_estimated():
    """`raw_reward` is the reward before it."""
    query = query_for("dr_grpo", penalty=SoftPenalty(6, 4))
    outcomes = await outcomes_of(query, played("r0", None, None, reward=1.0), played("r1", None, reward=1.0))

    assert [outcome.rollout.reward for outcome in outcomes] == [0.25, 1.0]  # 5 and 2 tokens
    assert advantages(outcomes) == [-0.375, 0.375]
    assert [outcome.raw.reward for outcome in outcomes] == [1.0, 1.0]


async def test_the_penalty_lowers_the_last_turns_own_reward():
    query = query_for("step", penalty=SoftPenalty(6, 4))
    (outcome,) = await outcomes_of(query, played("r0", 1.0, 2.0))

    assert outcome.rollout.step_rewards == {"r0-0": 1.0, "r0-1": 1.25}
    assert outcome.rollout.advantages == {"r0-0": 2.25, "r0-1": 1.25}
    assert None is outcome.rollout.reward


@pytest.mark.parametrize("rewards", [(LARGEST, -LARGEST), (-LARGEST, LARGEST)])
async def test_advantages_beyond_float32_are_a_conflict_that_names_the_rollout(rewards):
    members = [played(f"r{index}", None, reward=reward) for index, reward in enumerate(rewards)]

    assert sorted(advantages(await outcomes_of(query_for("grpo"), *members)), reverse=True) == [1.0, -1.0]
    with pytest.raises(Conflict, match="'r0' exceeds the range of float32"):
        await outcomes_of(query_for("rloo"), *members)


async def test_returns_beyond_float32_are_a_conflict():
    with pytest.raises(Conflict, match="float32"):
        await outcomes_of(query_for("step"), played("r0", LARGEST, LARGEST))


async def test_a_rollout_alone_has_the_advantages_of_its_turns():
    rollout, steps = played("r0", 1.0, 2.0)

    async def read_steps(*_, **__):
        return steps

    with patch("proxy.api.control.export_query.read_steps", read_steps):
        alone = await outcome_alone(CONTEXT, query_for("step"), rollout)

    assert alone.rollout.advantages == {"r0-0": 3.0, "r0-1": 2.0}
    assert Outcome(rollout, ()) == await outcome_alone(CONTEXT, query_for(), rollout)


async def test_the_advantages_of_a_large_batch_are_estimated_in_a_thread(monkeypatch):
    """A small batch is estimated in the event loop's thread."""
    threads = []

    def record(rewards):
        threads.append(threading.current_thread() is threading.main_thread())
        return [[0.0]] * len(rewards)

    monkeypatch.setattr(outcomes_module, "ESTIMATORS", {"grpo": record})
    for count in (8, 4000):
        await estimate([Outcome(Rollout("r", "b", 1, 1, reward=1.0), (1.0,))] * count, "grpo")

    assert threads == [True, False]


def playback(name, *live, reward=None, **fields):
    """Return a playback of two inherited turns and as many live ones as there are rewards of these, and its steps."""
    turns = [*branched(), make_step("d", [1, 10, 9, 2, 11, 9, 3, 12, 9, 4], [13, 9])][: 2 + len(live)]
    rewards = {step_id: own for step_id, own in zip("abcd", (5.0, 7.0, *live), strict=False) if own is not None}
    counts = {"steps": len(turns), "exact": len(turns), "inherited": 2}
    return Rollout(name, "b", 1, 1, reward=reward, step_rewards=rewards, counts=counts, **fields), turns


@pytest.mark.parametrize("mode", ["prompt", "masked"])
async def test_the_turns_of_a_playback_are_its_live_ones(mode):
    """The rewards of its inherited steps are in no return: the first playback has the mean return 2.5, the second 1."""
    members = [playback("r1", 1.0, 2.0), playback("r2", None, reward=1.0)]

    assert advantages(await outcomes_of(query_for("dr_grpo", discount=1.0, inherited=mode), *members)) == [
        {"c": 1.25, "d": 0.25},
        {"c": -0.75},
    ]
    assert advantages(await outcomes_of(query_for("step", discount=0.5, inherited=mode), *members)) == [
        {"c": 2.0, "d": 2.0},
        {"c": 1.0},
    ]


async def test_with_trained_the_inherited_turns_have_returns_and_advantages():
    assert advantages(await outcomes_of(query_for("step", inherited="trained"), playback("r1", 1.0, 2.0))) == [
        {"a": 15.0, "b": 10.0, "c": 3.0, "d": 2.0}
    ]


@pytest.mark.parametrize(("mode", "penalized"), [("prompt", 0.75), ("masked", 0.75), ("trained", -0.0)])
async def test_the_length_of_the_response_of_a_playback_is_counted_from_its_first_live_token(mode, penalized):
    """The live turns have 5 tokens with the tool output between them, and the whole response has 11."""
    (found,) = await outcomes_of(
        query_for(penalty=SoftPenalty(8, 4), inherited=mode), playback("r1", None, None, reward=1.0)
    )

    assert (found.rollout.reward, found.raw.reward) == (penalized, 1.0)


@pytest.mark.parametrize(("estimator", "options"), [("dr_grpo", {}), ("rloo", {}), ("dr_grpo", {"discount": 1.0})])
async def test_a_rollout_that_inherited_all_of_its_steps_is_not_in_the_baseline(estimator, options):
    """The policy sampled no token of it. With `trained` it is in the baseline as any other."""
    members = [playback("r1", None, reward=1.0), playback("r2", None, reward=0.0), playback("r3", reward=5.0)]
    scale = 1.0 if estimator == "rloo" else 0.5
    for mode in ("prompt", "masked"):
        found = advantages(await outcomes_of(query_for(estimator, inherited=mode, **options), *members))
        expected = [{"c": scale}, {"c": -scale}] if options else [scale, -scale]
        assert found == [*expected, None]
    if not options:
        trained = advantages(await outcomes_of(query_for(estimator, inherited="trained"), *members))
        assert {"dr_grpo": [-1.0, -2.0, 3.0], "rloo": [-1.5, -3.0, 4.5]}[estimator] == trained


async def test_a_thread_that_is_inherited_is_not_compared_with_live_ones():
    """Each playback inherited the first sub-agent of its source."""
    members = []
    for number, reward in enumerate((3.0, 1.0)):
        rollout, steps = playback(
            f"r{number}", None, thread_rewards={"sub-agent:0": 9.0, f"sub-agent:{number + 1}": reward}
        )
        threads = ("sub-agent:0", "sub-agent:0", f"sub-agent:{number + 1}")
        members.append((rollout, [replace(step, thread=thread) for step, thread in zip(steps, threads, strict=True)]))
    with patch("proxy.api.control.export_query.select_threads", lambda steps, *_: (steps, [])):
        found = await outcomes_of(query_for("dr_grpo", threads="all"), *members)

    assert [outcome.rollout.thread_advantages for outcome in found] == [{"sub-agent:1": 1.0}, {"sub-agent:2": -1.0}]


async def test_a_reward_of_inherited_steps_only_is_no_sample_although_a_thread_is_live():
    """The rollout's reward is of its main thread, which is inherited."""
    rollout, steps = playback("r1", None, reward=9.0, thread_rewards={"sub-agent:1": 1.0})
    members = [
        (
            rollout,
            [replace(step, thread=name) for step, name in zip(steps, ("main", "main", "sub-agent:1"), strict=True)],
        ),
        playback("r2", None, reward=1.0),
        playback("r3", None, reward=0.0),
    ]
    with patch("proxy.api.control.export_query.select_threads", lambda steps, *_: (steps, [])):
        found = await outcomes_of(query_for("dr_grpo"), *members)

    assert advantages(found) == [None, 0.5, -0.5]
    assert (found[0].rollout.reward, found[0].rollout.thread_advantages) == (9.0, {"sub-agent:1": 0.0})


async def test_steps_of_rollouts_that_inherited_nothing_are_not_read_for_their_advantages():
    rollout, steps = playback("r1", None, reward=1.0)
    other = Rollout("r0", "b", 1, 1, reward=0.0, counts={"steps": 9, "exact": 9})

    assert advantages(await outcomes_of(query_for("dr_grpo"), (rollout, steps), (other, RuntimeError("read")))) == [
        0.5,
        -0.5,
    ]
    assert [found.rollout for found in await outcomes_of(query_for(), (rollout, RuntimeError("read")))] == [rollout]


def test_a_rollout_that_inherited_all_of_its_steps_earned_nothing():
    """Neither its reward nor a number of tokens is counted in metrics."""
    live = structs.replace(
        playback("r1", None, reward=1.0)[0], counts={"steps": 3, "inherited": 2, "sampled_tokens": 2}
    )

    assert Earned((1.0,), (2,)) == earned_by([live, playback("r2", reward=5.0)[0]])
