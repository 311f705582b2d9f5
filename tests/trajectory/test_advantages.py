"""Advantage estimators, of rollouts and of turns."""

from dataclasses import replace
from math import isclose, isfinite, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step, rollouts
from tests.support.playbacks import branched
from tests.support.worked import FACTS, STEPS

from proxy.trajectory.advantages import BATCH, ESTIMATORS, STEP, VINE, SoftPenalty, episodes, returns, vine
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences

PLAYED = episodes(STEPS, FACTS, Options())[0]


def rewarded(reward=None, **step_rewards):
    return replace(FACTS, reward=reward, step_rewards=step_rewards)


def test_the_return_of_a_turn_is_its_discounted_reward_to_go():
    facts = rewarded(None, a=1.0, b=2.0, c=4.0)

    assert returns("abc", facts, 1.0) == (7.0, 6.0, 4.0)
    assert returns("abc", facts, 0.5) == (1.0 + 0.5 * 2.0 + 0.25 * 4.0, 2.0 + 0.5 * 4.0, 4.0)


def test_the_rollouts_reward_belongs_to_the_last_turn_unless_it_has_its_own():
    assert returns("ab", rewarded(1.0), 0.5) == (0.5, 1.0)
    assert returns("ab", rewarded(8.0, a=1.0, b=0.5), 0.5) == (1.25, 0.5)


def test_the_reward_of_a_turn_with_rewards_by_token_is_their_sum():
    assert returns("ab", rewarded(1.0, a=[0.5, 0.25, 0.0]), 1.0) == (1.75, 1.0)


def test_without_a_reward_of_the_last_turn_there_are_no_returns():
    assert returns("ab", rewarded(None, a=1.0), 1.0) == ()
    assert returns("", rewarded(1.0), 1.0) == ()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0.01, 1))
def test_returns_are_the_sums_of_their_definition(rewards, discount):
    names = [f"s{index}" for index in range(len(rewards))]
    expected = [
        sum(discount ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]

    assert pytest.approx(returns(names, rewarded(**dict(zip(names, rewards, strict=True))), discount)) == expected


def test_turns_are_trained_steps_and_rewarded_ones_in_the_order_of_their_recording():
    """A flagged step with a reward counts, one without does not; the branch of a step does not matter."""
    steps = [
        make_step("e", [7], [20]),
        make_step("d", [1, 10, 2], [11]),
        make_step("c", [1, 10, 3], [12], problems=("echo",)),
        make_step("b", [1, 10, 3], [13], problems=("echo",)),
        make_step("a", [1], [10]),
    ]
    played = episodes(steps, FACTS, Options())[0]

    assert played.turns(rewarded(1.0)) == ("a", "d", "e")
    assert played.turns(rewarded(1.0, b=0.5, a=1.0)) == ("a", "b", "d", "e")


@given(rollouts())
def test_the_trained_turns_are_in_the_rows(steps):
    rows = sequences(steps, FACTS).rows
    played = episodes(steps, FACTS, Options())[0]

    assert {span.step_id for row in rows for span in row.spans if span.owned} == {*played.trained}
    assert list(played.trained) == sorted(played.trained)
    assert max((len(row.token_ids) - row.prompt_len for row in rows), default=0) == played.response_len


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10**9, -1.0)],
)
def test_the_penalty_is_linear_over_the_buffer(length, expected):
    assert SoftPenalty(100, 20).of(length) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (50, -0.5), (100, -1.0)])
def test_the_buffer_can_be_the_whole_length(length, expected):
    assert SoftPenalty(100, 100).of(length) == expected


def test_the_length_of_a_response_includes_tool_outputs():
    assert PLAYED.response_len == 9


def test_the_penalty_lowers_the_rollouts_reward_and_its_last_trained_steps_own():
    penalty = SoftPenalty(11, 4)  # -0.5 for 9 tokens

    assert rewarded(0.5) == PLAYED.penalized(rewarded(1.0), penalty)
    assert rewarded(0.5, a=1.0) == PLAYED.penalized(rewarded(1.0, a=1.0), penalty)
    assert rewarded(0.5, a=1.0, b=1.5) == PLAYED.penalized(rewarded(1.0, a=1.0, b=2.0), penalty)
    assert rewarded(None, b=[1.0, 0.5]) == PLAYED.penalized(rewarded(None, b=[1.0, 1.0]), penalty)


def test_a_short_response_keeps_its_reward():
    facts = rewarded(1.0, b=2.0)

    assert facts is PLAYED.penalized(facts, SoftPenalty(100, 10))
    assert facts is episodes([], facts, Options())[0].penalized(facts, SoftPenalty(1, 1))


def test_the_longest_response_of_a_rollout_counts():
    steps = [make_step("a", [1], make_choice(0, [10] * 3)), make_step("b", [2], make_choice(0, [11] * 7))]

    assert episodes(steps, FACTS, Options())[0].response_len == 7
    assert episodes(steps[:1], FACTS, Options())[0].response_len == 3


def test_the_steps_of_a_rewarded_thread_are_an_episode():
    """The penalty of the thread depends on its own length."""
    steps = [replace(step, thread=name) for step, name in zip(STEPS, ("main", "a", "main"), strict=False)]
    facts = replace(FACTS, reward=1.0, step_rewards={}, thread_rewards={"a": 0.5, "other": 9.0})
    whole, of_thread = episodes(steps, facts, Options())

    assert (whole.thread, of_thread.thread) == (None, "a")
    assert {step.step_id for step in steps if step.thread == "a"} == {*of_thread.steps}
    assert {*whole.steps}.isdisjoint(of_thread.steps)
    assert of_thread.penalized(facts, SoftPenalty(1, 1)).thread_rewards == {"a": -0.5, "other": 9.0}
    assert of_thread.penalized(facts, SoftPenalty(1, 1)).reward == 1.0


LARGEST = 3.4028234663852886e38  # of float32
BASELINES = [name for name in ESTIMATORS if name not in (STEP, VINE)]
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)  # the mean of 0 and 5e-324 is 0
REWARDS = st.lists(NUMBERS, min_size=2, max_size=16)
RETURNS = st.lists(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=5), max_size=6)
MODERATE = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6)


def of_rewards(name, rewards):
    """Return the advantages of rollouts with one return each."""
    return [value for (value,) in ESTIMATORS[name]([[reward] for reward in rewards])]


@pytest.mark.parametrize("name", ["grpo", BATCH])
def test_grpo_and_reinforce_pp_scale_by_the_population_standard_deviation(name):
    assert of_rewards(name, [1.0, 0.0]) == [1.0, -1.0]
    assert [sqrt(3), -1 / sqrt(3), -1 / sqrt(3), -1 / sqrt(3)] == pytest.approx(of_rewards(name, [1.0, 0.0, 0.0, 0.0]))


def test_dr_grpo_subtracts_the_mean():
    assert of_rewards("dr_grpo", [1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_subtracts_the_mean_of_the_other_rewards():
    assert of_rewards("rloo", [1.0, 0.0]) == [1.0, -1.0]
    assert pytest.approx(of_rewards("rloo", [1.0, 0.0, 0.0, 0.0])) == [1.0, -1 / 3, -1 / 3, -1 / 3]


@pytest.mark.parametrize("name", [STEP, VINE])
def test_step_and_vine_return_the_returns(name):
    assert ESTIMATORS[name]([(1.5, 1.0), (0.0,)]) == [[1.5, 1.0], [0.0]]


@pytest.mark.parametrize(
    ("turns", "values", "expected"),
    [
        ([0, 1, 2, 3], {1: 0.5, 3: 0.25}, (0.5 - 0.125, 0.25 - 0.5, 0.25 - 0.5, 1 - 0.25)),
        ([0, 1], {0: 0.75}, (1 - 0.75, 1 - 0.75)),
        ([0, 2], {}, (1 - 0.125, 1 - 0.125)),
        ([0, 5], {2: 0.5, 4: 0.0}, (0.5 - 0.125, 1.0)),
        ([3], {7: 0.5}, (0.5 - 0.125,)),
        ([], {1: 0.5}, ()),
    ],
)
def test_vine_gives_a_turn_the_next_value_minus_the_last_one(turns, values, expected):
    """Before the first state there is the value 0.125 of the start, after the last one the reward 1."""
    assert vine(turns, values, start=0.125, reward=1.0) == expected


@given(st.dictionaries(st.integers(0, 9), st.integers(-8, 8)), st.integers(-8, 8), st.integers(-8, 8))
def test_vine_of_one_turn_for_each_state_adds_up_to_the_reward_minus_the_start(values, start, reward):
    """Each state is passed by one turn, and one turn comes before all of them."""
    assert sum(vine([-1, *sorted(values)], values, start=start, reward=reward)) == reward - start


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [0.1] * 7, [0.0, -0.0], [LARGEST] * 3])
def test_equal_rewards_have_zero_advantages(name, rewards):
    """One reward has as well: there is nothing to compare it with."""
    assert [0.0] * len(rewards) == of_rewards(name, rewards)


@given(REWARDS)
def test_advantages_sum_to_zero_and_are_ordered_like_the_rewards(rewards):
    for name in BASELINES:
        found = of_rewards(name, rewards)
        assert isclose(0.0, sum(found), abs_tol=1e-6 * (1 + max(map(abs, found))))
        assert sorted(found) == [value for _, value in sorted(zip(rewards, found, strict=True))]


@given(RETURNS)
def test_every_advantage_is_finite_and_has_its_turn(returns):
    """Returns up to the largest float32 and down to the smallest numbers; `grpo` is bounded by its definition."""
    for name, estimate in ESTIMATORS.items():
        found = estimate(returns)
        assert list(map(len, returns)) == list(map(len, found))
        assert all(isfinite(value) for rollout in found for value in rollout)
        if name in ("grpo", BATCH) and returns:
            turns = max(map(len, returns))
            assert all(abs(value) <= 1.0001 * sqrt(len(returns) * turns) for rollout in found for value in rollout)


@given(MODERATE)
def test_advantages_of_turns_follow_from_weighted_statistics(returns):
    """In numpy: each rollout has the weight 1 / n, divided among its turns."""
    values = np.array([value for rollout in returns for value in rollout])
    weights = np.array([1 / (len(rollout) * len(returns)) for rollout in returns for _ in rollout])
    owners = np.array([index for index, rollout in enumerate(returns) for _ in rollout])
    means = np.array(list(map(np.mean, returns)))
    mean = np.average(values, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, weights=weights))

    def flat(name):
        return [value for rollout in ESTIMATORS[name](returns) for value in rollout]

    assert flat("dr_grpo") == pytest.approx(values - mean, abs=1e-9)
    if spread > 1e-6:
        assert flat("grpo") == flat(BATCH) == pytest.approx((values - mean) / spread, rel=1e-6, abs=1e-6)
    if len(returns) > 1:
        others = (means.sum() - means) / (len(returns) - 1)
        assert flat("rloo") == pytest.approx(values - others[owners], abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=6), st.integers(1, 4))
def test_turns_that_all_have_the_reward_of_their_rollout_have_the_advantage_of_the_rollout(rewards, turns):
    for name in BASELINES:
        by_turn = ESTIMATORS[name]([[reward] * (1 + index % turns) for index, reward in enumerate(rewards)])
        for value, of_turns in zip(of_rewards(name, rewards), by_turn, strict=True):
            assert [value] * len(of_turns) == pytest.approx(of_turns, rel=1e-6, abs=1e-9)


def test_turns_and_responses_of_a_playback_are_those_of_its_live_steps():
    """The reward of an inherited step makes no turn; the response begins with the first live token."""
    facts = RolloutFacts("r1", reward=1.0, step_rewards={"a": 5.0, "b": 7.0})
    more = make_step("d", [1, 10, 9, 2, 11, 9, 3, 12, 9, 4], [13])
    for mode in ("prompt", "masked"):
        (episode,) = episodes([*branched(), more], facts, Options(inherited=mode))
        assert (episode.turns(facts), episode.response_len) == (("c", "d"), 4)
        assert returns(episode.turns(facts), facts, 0.5) == (0.5, 1.0)
    (episode,) = episodes([*branched(), more], facts, Options(inherited="trained"))

    assert (episode.turns(facts), episode.response_len) == (("a", "b", "c", "d"), 10)
    assert returns(episode.turns(facts), facts, 0.5) == (8.625, 7.25, 0.5, 1.0)


def test_a_thread_that_is_inherited_is_no_episode():
    steps = [replace(step, thread=thread) for step, thread in zip(branched(), ("sub", "sub", "main"), strict=True)]
    facts = RolloutFacts("r1", reward=1.0, thread_rewards={"sub": 3.0})

    assert [episode.thread for episode in episodes(steps, facts, Options())] == [None]
    assert [episode.thread for episode in episodes(steps, facts, Options(inherited="trained"))] == [None, "sub"]
