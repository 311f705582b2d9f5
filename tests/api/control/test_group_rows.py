"""The rows of a group, the description of each row, and the advantages of its rollouts."""

import asyncio
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
from forests import make_choice, make_step
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_rows import entries, trained_ids

from proxy.api.control.export_query import IN_GROUP, ExportQuery
from proxy.api.control.group_rows import GroupFilter, read_group_rows
from proxy.api.control.outcomes import Outcome, estimated
from proxy.errors import Conflict, DamagedStep
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import Rollout, no_rollout
from proxy.trajectory.sequence import Options

EOS = 9
FILL = Fill(prompt_length=64, response_length=64)
PROMPTS = ([1, 2], [1, 2], [3], [4, 5])  # shared by several rollouts


@st.composite
def members(draw):
    """Draw rollouts with their steps, or the reason why they are unreadable; every sampled id is unique in the group."""
    fresh = iter(range(100, 1_000_000))
    rewards = draw(st.sampled_from([st.floats(0, 1), st.none(), st.sampled_from([None, 1.0])]))
    group = []
    for number in range(draw(st.sampled_from([1, 2, 2, 3, 4]))):
        rollout = Rollout(
            f"r{number}",
            "b",
            1,
            1,
            reward=draw(rewards),
            advantages=draw(st.sampled_from([0.5, 0.5, -1.0, None])),
            group_id="g",
            metadata={"env_name": "demo"},
        )
        fault = draw(st.sampled_from([None] * 6 + ["deleted", "deleted before", "damaged"]))
        group.append((rollout, fault or draw(conversations(rollout.rollout_id, fresh))))
    return group


@st.composite
def conversations(draw, name, fresh):
    """Draw up to five steps: continuations, repeated prompts, several choices, and steps without a row."""
    steps, histories = [], []
    for number in range(draw(st.sampled_from([0, 1, 2, 3, 4, 5]))):
        prompt = list(PROMPTS[0]) if not steps else [*draw(st.sampled_from([*histories, *PROMPTS])), EOS]
        choices = [
            make_choice(index, [next(fresh) for _ in range(draw(st.sampled_from([0, 1, 2, 2])))])
            for index in range(draw(st.sampled_from([1, 1, 1, 2])))
        ]
        odd = [{"delivered": False}, {"problems": ("echo",)}, {"status": "error", "choices": ()}]
        facts = draw(st.sampled_from([*[{}] * (6 if steps else 20), *odd]))
        response = {"choices": [{"index": choice.index, "message": {"content": "x"}} for choice in choices]}
        step = make_step(
            f"{name}-{number}", prompt, *choices, policy_version="3", rollout_id=name, response=response,
            request={"messages": []},
        )  # fmt: skip
        if steps and draw(st.integers(0, 9)) == 0:  # an engine that returned no ids
            step = replace(step, prompts=(), choices=tuple(make_choice(choice.index, []) for choice in choices))
        steps.append(replace(step, **facts))
        histories += [[*prompt, *choice.ids] for choice in choices if choice.ids]
    return steps


async def read_rows(group, query, *, whole=False):
    """Read the rows of a group as if a store had these steps."""
    by_name = {rollout.rollout_id: steps for rollout, steps in group}

    async def read_steps(_store, rollout, *, whole):
        match by_name[rollout.rollout_id]:
            case "deleted":
                raise no_rollout(rollout.rollout_id)
            case "damaged":
                raise DamagedStep(f"the step at index 0 of rollout {rollout.rollout_id!r} cannot be read")
            case steps:
                return steps

    present = [rollout for rollout, steps in group if steps != "deleted before"]
    with patch("proxy.api.control.export_query.read_steps", read_steps):
        return await read_group_rows(
            CONTEXT, query, Group("g", "b", 1, members=tuple(by_name)), present, GroupFilter(), whole=whole
        )


async def no_tokenizer(_name):
    return None


# What read_group_rows uses of the context.
CONTEXT = SimpleNamespace(store=None, tokenizers=SimpleNamespace(get=no_tokenizer))


def query_for(name, advantage="given", **options):
    return ExportQuery(FORMATS[name], CONTAINERS["json"], Options(**options), FILL, advantage)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    group=members(),
    branches=st.sampled_from(["all", "longest", "last"]),
    max_len=st.sampled_from([None, None, 4]),
    advantage=st.sampled_from([name for name in IN_GROUP if name != "step"]),
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
        data = await gathered.whole(query) if gathered.why is None else []
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
            assert (reward, expected) == (entry["reward"], entry["advantage"])
        if gathered.why is None:
            omitted = Counter(entry["rollout_id"] for entry in description["skipped"] if "step_id" not in entry)
            assert Counter(rollout.rollout_id for rollout, _ in group if rollout.rollout_id not in of_rows) == omitted
            check_steps(name, group, description, advantage, options)


def check_steps(name, group, description, advantage, options):
    """Check that each step with ids is trained in a row or listed with the reason."""
    trained = {step_id for entry in description["rows"] for step_id in entry["step_ids"]}
    named = {entry["step_id"] for entry in description["skipped"] if "step_id" in entry}
    cut = name == "verifiers" and options["max_len"]
    for rollout, steps in group:
        for step in steps if isinstance(steps, list) else ():
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
    assert ["r1"] == [member.rollout.rollout_id for member in gathered.members]
    assert [("r0", True)] == [(entry["rollout_id"], "cannot be read" in entry["why"]) for entry in gathered.skipped]


def with_advantages(members, advantage):
    """Return the rollouts with advantages for their rewards."""
    outcomes = [Outcome(member, () if member.reward is None else (member.reward,)) for member in members]
    return [outcome.rollout for outcome in estimated(outcomes, advantage)]


def rollouts(*rewards):
    return [
        Rollout(f"r{n}", "b", 1, 1, reward=reward, advantages=9, metadata={"env_name": "demo"})
        for n, reward in enumerate(rewards)
    ]


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

    assert ([{"rollout_id": "r0", "step_ids": ["r0-0"], "reward": 1, "advantage": None, "weight": 1.0}], [value]) == (
        description["rows"],
        description["advantages"],
    )
