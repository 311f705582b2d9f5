"""Which members of a group count, and what is required of them."""

import asyncio
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.forests import make_step
from tests.support.grouped import members, query_for, read_rows, rollouts

from proxy.api.control.schemas import GroupFilter, InGroup, Members
from proxy.errors import Conflict
from proxy.export import FORMATS
from proxy.rollouts.group import Group
from proxy.trajectory.advantages import ESTIMATORS


def played(*rewards, statuses=None):
    """Return rollouts of one step each."""
    found = rollouts(*rewards)
    if statuses:
        found = [replace(rollout, status=status) for rollout, status in zip(found, statuses, strict=True)]
    return [
        (rollout, [make_step(f"r{n}-0", [1, 2], [10 + n, 9], rollout_id=f"r{n}", policy_version="1")])
        for n, rollout in enumerate(found)
    ]


async def kept(group, name="sequences", advantage="given", **conditions):
    """Return the members with rows and those without, and the code of the reason if the group is dropped."""
    found = await read_rows(group, query_for(name, advantage), GroupFilter(**conditions), size=len(group))
    names = [rollout.rollout_id for rollout in found.rollouts]
    return names, {entry["rollout_id"]: entry["why"] for entry in found.skipped}, found.reason and found.reason.code


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.reward == "required"])
async def test_members_without_a_required_reward_are_omitted(name):
    assert await kept(played(1, None, 0), name) == (["r0", "r2"], {"r1": "it has no reward"}, None)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.reward == "optional"])
async def test_formats_that_require_no_reward_lose_no_member(name):
    assert await kept(played(1, None, 0), name) == (["r0", "r1", "r2"], {}, None)


@pytest.mark.parametrize("name", ["trl", "verl_dataproto"])
async def test_a_batch_has_the_rewards_of_all_members_or_of_none(name):
    assert await kept(played(1, None, 0), name) == (["r0", "r2"], {"r1": "it has no reward"}, None)
    assert await kept(played(None, None), name) == (["r0", "r1"], {}, None)


@pytest.mark.parametrize("advantage", [name for name in ESTIMATORS if name != "step"])
async def test_an_estimated_advantage_requires_a_reward(advantage):
    assert await kept(played(1, None, 0), advantage=advantage) == (["r0", "r2"], {"r1": "it has no reward"}, None)


async def test_rewards_of_steps_replace_the_reward_of_a_rollout_if_the_format_takes_them():
    """A rollout without rewards of its steps is omitted if the format needs them."""
    group = [
        (replace(rollout, step_rewards=given), steps)
        for (rollout, steps), given in zip(
            played(None, None, 1, 1), ({"r0-0": 1.0}, {"other": 1.0}, {}, {}), strict=True
        )
    ]
    names, skipped, _ = await kept(group, "training_examples")

    assert (names, list(skipped)) == (["r0", "r2", "r3"], ["r1"])
    assert "requires a reward" in skipped["r1"]


async def test_rewarded_counts_members_with_a_reward_only():
    assert await kept(played(1, None, 0), members="rewarded") == (["r0", "r2"], {"r1": "it has no reward"}, None)


async def test_completed_counts_completed_members_only():
    """Their advantages are estimated with the rewards of all members."""
    group = played(1, 0, 0, statuses=("completed", "failed", "completed"))
    found = await read_rows(group, query_for("sequences", "rloo"), GroupFilter(members="completed"), size=3)

    assert await kept(group, members="completed") == (["r0", "r2"], {"r1": "its status is failed"}, None)
    assert [rollout.advantages for rollout in found.rollouts] == [1.0, -0.5]


@pytest.mark.parametrize(
    ("group", "name", "code"),
    [
        (played(1, None), "scored_data", "no_reward"),
        (played(1, None), "trl", "no_reward"),
        ([*played(1, 0), (rollouts(1, 1, 1)[2], [])], "sequences", "no_rows"),
        ([*played(1, 0), (rollouts(1, 1, 1)[2], "deleted before")], "sequences", "no_rows"),
        ([*played(1, 0), (rollouts(1, 1, 1)[2], "deleted")], "sequences", "no_rows"),
    ],
)
async def test_all_refuses_a_group_in_which_a_member_lacks_something(group, name, code):
    """The message names the rollout."""
    with pytest.raises(Conflict, match=rf"members=all requires .* rollout 'r{len(group) - 1}'") as refused:
        await kept(group, name, members="all")

    assert code == refused.value.reason


async def test_all_refuses_a_group_without_rewards_that_only_mixed_needs():
    """They may be set later; without `all` the group is dropped."""
    with pytest.raises(Conflict) as refused:
        await kept(played(1, None), members="all", only_mixed=True)

    assert refused.value.reason == "no_reward"
    assert (await kept(played(1, None), only_mixed=True))[2] == "equal_rewards"
    assert (await kept(played(None, None), only_mixed=True))[2] == "no_reward"


@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 2), (8, 2), (None, 1)])
def test_min_group_is_2_unless_the_group_is_smaller_or_has_no_size(size, least):
    group = Group("g", "b", 1, size)

    assert (GroupFilter().least(group), GroupFilter(min_group=5).least(group)) == (least, 5)


async def test_a_group_with_fewer_members_than_min_group_has_no_rows():
    """The code is `no_reward` if it has enough with rewards."""
    assert await kept(played(1, None), members="rewarded") == ([], {"r1": "it has no reward"}, "no_reward")
    assert (await kept(played(1, None), members="rewarded", min_group=3))[2] == "too_few_members"
    assert await kept(played(1, None), members="rewarded", min_group=1) == (["r0"], {"r1": "it has no reward"}, None)


@given(
    members(),
    st.sampled_from([None, *get_args(Members)]),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(get_args(InGroup)),
)
def test_every_member_has_rows_or_a_reason(group, choice, name, advantage):
    """Or the group is refused, or has too few members; with `all` no member is omitted."""

    async def check() -> None:
        query = query_for(name, advantage, branches="longest")
        try:
            found = await read_rows(group, query, GroupFilter(members=choice, min_group=1))
            await found.whole(query)
        except Conflict as refused:
            assert refused.reason in {"format", "no_reward", "no_rows", "no_advantage", "no_value", "damaged_step"}
            return
        counted = found.rollouts
        omitted = Counter(entry["rollout_id"] for entry in found.skipped if "step_id" not in entry)
        if found.reason is not None:
            assert found.reason.code in {"too_few_members", "no_reward"}
            return
        assert Counter(rollout.rollout_id for rollout, _ in group) == omitted + Counter(
            rollout.rollout_id for rollout in counted
        )
        if choice == "all":
            assert not omitted
        if choice == "rewarded" or advantage in ESTIMATORS:
            assert None not in {rollout.reward for rollout in counted}
        if choice == "completed":
            assert {"completed"} >= {rollout.status for rollout in counted}

    asyncio.run(check())
