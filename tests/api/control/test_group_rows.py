"""The rows of a group, the description of each row, and the advantages of its rollouts."""

import asyncio
from array import array
from collections import Counter
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step
from tests.support.grouped import members, query_for, read_rows, rollouts
from tests.support.reading_rows import entries, trained_ids

from proxy.api.control.outcomes import Outcome, estimated
from proxy.api.control.schemas import InGroup
from proxy.errors import Conflict, DamagedStep
from proxy.export import FORMATS


@settings(max_examples=2 * settings.default.max_examples)
@given(
    group=members(),
    branches=st.sampled_from(["all", "longest", "last"]),
    max_len=st.sampled_from([None, None, 4]),
    advantage=st.sampled_from([name for name in get_args(InGroup) if name not in ("step", "vine")]),
)
def test_the_description_of_rows_is_parallel_to_the_rows(group, branches, max_len, advantage):
    """It is compared with the token ids of the rows, in every format; every omitted rollout has a reason."""

    async def check() -> None:
        for name in FORMATS:
            await check_parallel(name, group, advantage, branches=branches, max_len=max_len)

    asyncio.run(check())


async def check_parallel(name, group, advantage, **options):
    query = query_for(name, advantage, **options)
    step_of = {
        token: step for _, steps in group if isinstance(steps, list)
        for step in steps for choice in step.choices for token in choice.ids
    }  # fmt: skip
    with suppress(Conflict):  # the format cannot express one of them
        gathered = await read_rows(group, query)
        data = await gathered.whole(query) if gathered.reason is None else []
        description = gathered.described(query)
        rows = entries(name, data)
        present = [rollout for rollout, steps in group if steps != "deleted before"]
        estimated = {rollout.rollout_id: rollout for rollout in with_advantages(present, advantage)}
        of_rows = {entry["rollout_id"] for entry in description["rows"]}

        assert len(rows) == len(description["rows"])
        for row, entry in zip(rows, description["rows"], strict=True):
            steps = [step_of[token] for token in trained_ids(name, row)]
            assert list(dict.fromkeys(step.step_id for step in steps)) == entry["step_ids"]
            assert {step.rollout_id for step in steps} <= {entry["rollout_id"]}
            if name == "verifiers":
                assert row["extras"]["step_id"].startswith(f"{entry['rollout_id']}-")
        names = [rollout.rollout_id for rollout, _ in group if rollout.rollout_id in of_rows]
        assert names == description["rollouts"]
        assert [rollout.reward for rollout, _ in group if rollout.rollout_id in of_rows] == description["rewards"]
        advantages = {name: estimated[name].advantages for name in names}
        assert (None if advantage == "none" else [*advantages.values()]) == description["advantages"]
        for entry in description["rows"]:
            reward = estimated[entry["rollout_id"]].reward
            expected = None if advantage == "none" else advantages[entry["rollout_id"]]
            assert (entry["reward"], entry["advantage"]) == (reward, expected)
        if gathered.reason is None:
            omitted = Counter(entry["rollout_id"] for entry in description["skipped"] if "step_id" not in entry)
            assert Counter(rollout.rollout_id for rollout, _ in group if rollout.rollout_id not in of_rows) == omitted
            check_steps(name, group, description, advantage, options)


def check_steps(name, group, description, advantage, options):
    """Check that each step with ids is trained in a row or listed with the reason."""
    trained = {step_id for entry in description["rows"] for step_id in entry["step_ids"]}
    named = {entry["step_id"] for entry in description["skipped"] if "step_id" in entry}
    cut = name == "verifiers" and options["max_len"]
    unrewarded = {entry["rollout_id"] for entry in description["skipped"] if entry["why"] == "it has no reward"}
    for rollout, steps in group:
        for step in steps if isinstance(steps, list) and rollout.rollout_id not in unrewarded else ():
            assert step.step_id in trained | named or cut, (rollout, step)


def test_the_property_detects_a_format_with_a_wrong_order_of_rows(monkeypatch):
    first = [
        make_step("r0-0", [1, 2], [100], rollout_id="r0", policy_version="3"),
        make_step("r0-1", [3], [101], rollout_id="r0", policy_version="3"),
    ]
    second = [make_step("r1-0", [1, 2], [102], rollout_id="r1", policy_version="3")]
    group = [(rollout, steps) for rollout, steps in zip(rollouts(1, 0), (first, second), strict=True)]
    asyncio.run(check_parallel("marin", group, "given", branches="all", max_len=None))
    monkeypatch.setattr(
        FORMATS["marin"],
        "order",
        lambda rows: [(number, index) for number, member in enumerate(rows) for index in range(len(member.rows))],
        raising=False,
    )

    with pytest.raises(AssertionError):
        asyncio.run(check_parallel("marin", group, "given", branches="all", max_len=None))


async def test_with_whole_an_unreadable_member_raises_damaged_step():
    """Otherwise it is skipped with the reason."""
    rollout, other = rollouts(1, 0)
    steps = [make_step("r1-0", [1], [10], rollout_id="r1")]
    group = [(rollout, "damaged"), (other, steps)]
    gathered = await read_rows(group, query_for("sequences"))

    with pytest.raises(DamagedStep, match="'r0'"):
        await read_rows(group, query_for("sequences"), whole=True)
    assert [rollout.rollout_id for rollout in gathered.rollouts] == ["r1"]
    assert [(entry["rollout_id"], "cannot be read" in entry["why"]) for entry in gathered.skipped] == [("r0", True)]


def with_advantages(members, advantage):
    """Return the rollouts with advantages for their rewards."""
    outcomes = [Outcome(member, () if member.reward is None else (member.reward,)) for member in members]
    return [outcome.rollout for outcome in estimated(outcomes, advantage)]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
async def test_a_rollout_without_rows_is_in_the_baseline(estimator):
    """Its reward is a sample of the policy's return."""
    steps = [[make_step(f"r{n}-0", [1], [10 + n], rollout_id=f"r{n}")] for n in range(3)]
    whole = list(zip(rollouts(1, 0, 0), steps, strict=True))
    lacking = [*whole[:2], (whole[2][0], [])]
    advantages = [
        (await read_rows(group, query_for("sequences", estimator))).described(query_for("sequences", estimator))[
            "advantages"
        ]
        for group in (whole, lacking)
    ]

    assert advantages[0][:2] == advantages[1]


@pytest.mark.parametrize("value", [[0.5, 0.5], {"r0-0": 1.0}, True, "much", None])
async def test_an_advantage_that_is_not_a_number_is_null_in_the_description_of_rows(value):
    """`advantages` has the value as it was set."""
    (rollout,) = rollouts(1)
    rollout = msgspec.structs.replace(rollout, advantages=value)
    query = query_for("sequences")
    step = make_step("r0-0", [1], make_choice(0, [10], logprobs=array("f", [-1.0])), rollout_id="r0")
    description = (await read_rows([(rollout, [step])], query)).described(query)

    assert (
        description["rows"],
        description["advantages"],
    ) == ([{"rollout_id": "r0", "step_ids": ["r0-0"], "reward": 1, "advantage": None, "weight": 1.0}], [value])
