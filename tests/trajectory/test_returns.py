"""Returns of turns, and the penalty of long responses."""

from dataclasses import replace

import pytest
from forests import make_choice, make_step, rollouts
from hypothesis import given
from hypothesis import strategies as st
from worked import FACTS, STEPS

from proxy.trajectory.returns import SoftPenalty, episodes, returns
from proxy.trajectory.sequence import Options, sequences

PLAYED = episodes(STEPS, FACTS, Options())[0]


def rewarded(reward=None, **step_rewards):
    return replace(FACTS, reward=reward, step_rewards=step_rewards)


def test_the_return_of_a_turn_is_its_discounted_reward_to_go():
    facts = rewarded(None, a=1.0, b=2.0, c=4.0)

    assert (7.0, 6.0, 4.0) == returns("abc", facts, 1.0)
    assert (1.0 + 0.5 * 2.0 + 0.25 * 4.0, 2.0 + 0.5 * 4.0, 4.0) == returns("abc", facts, 0.5)


def test_the_rollouts_reward_is_that_of_the_last_turn_unless_it_has_its_own():
    assert (0.5, 1.0) == returns("ab", rewarded(1.0), 0.5)
    assert (1.25, 0.5) == returns("ab", rewarded(8.0, a=1.0, b=0.5), 0.5)


def test_the_reward_of_a_turn_with_rewards_by_token_is_their_sum():
    assert (1.75, 1.0) == returns("ab", rewarded(1.0, a=[0.5, 0.25, 0.0]), 1.0)


def test_without_a_reward_of_the_last_turn_there_are_no_returns():
    assert () == returns("ab", rewarded(None, a=1.0), 1.0)
    assert () == returns("", rewarded(1.0), 1.0)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0.01, 1))
def test_returns_are_the_sums_of_their_definition(rewards, discount):
    names = [f"s{index}" for index in range(len(rewards))]
    expected = [
        sum(discount ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]

    assert expected == pytest.approx(returns(names, rewarded(**dict(zip(names, rewards, strict=True))), discount))


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

    assert ("a", "d", "e") == played.turns(rewarded(1.0))
    assert ("a", "b", "d", "e") == played.turns(rewarded(1.0, b=0.5, a=1.0))


@given(rollouts())
def test_the_trained_turns_are_those_of_the_rows(steps):
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
    assert expected == SoftPenalty(100, 20).of(length)


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (50, -0.5), (100, -1.0)])
def test_the_buffer_can_be_the_whole_length(length, expected):
    assert expected == SoftPenalty(100, 100).of(length)


def test_the_length_of_a_response_includes_tool_outputs():
    assert 9 == PLAYED.response_len


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

    assert 7 == episodes(steps, FACTS, Options())[0].response_len
    assert 3 == episodes(steps[:1], FACTS, Options())[0].response_len


def test_the_steps_of_a_rewarded_thread_are_an_episode():
    """Its penalty is that of its own length."""
    steps = [replace(step, thread=name) for step, name in zip(STEPS, ("main", "a", "main"), strict=False)]
    facts = replace(FACTS, reward=1.0, step_rewards={}, thread_rewards={"a": 0.5, "other": 9.0})
    whole, of_thread = episodes(steps, facts, Options())

    assert (None, "a") == (whole.thread, of_thread.thread)
    assert {step.step_id for step in steps if step.thread == "a"} == {*of_thread.steps}
    assert {*whole.steps}.isdisjoint(of_thread.steps)
    assert {"a": -0.5, "other": 9.0} == of_thread.penalized(facts, SoftPenalty(1, 1)).thread_rewards
    assert 1.0 == of_thread.penalized(facts, SoftPenalty(1, 1)).reward
