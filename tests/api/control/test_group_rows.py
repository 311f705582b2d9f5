"""The rows of a group, what is said of each, and the advantages of its rollouts."""

import asyncio
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from forests import make_choice, make_step
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_rows import entries, trained_ids

from proxy.api.control.export_query import ExportQuery
from proxy.api.control.group_rows import ADVANTAGES, GroupFilter, read_group_rows, with_advantages
from proxy.errors import Conflict, DamagedStep
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import Rollout, no_rollout
from proxy.trajectory.sequence import Options

EOS = 9
FILL = Fill(prompt_length=64, response_length=64)
PROMPTS = ([1, 2], [1, 2], [3], [4, 5])  # that several rollouts have


@st.composite
def members(draw):
    """Rollouts with their steps, or with why they cannot be read: every sampled id occurs once in the whole group."""
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
        gone = draw(st.sampled_from([None] * 6 + ["deleted", "deleted before", "damaged"]))
        group.append((rollout, gone or draw(conversations(rollout.rollout_id, fresh))))
    return group


@st.composite
def conversations(draw, name, fresh):
    """Up to five steps: calls that go on, that begin as another rollout's does, of several choices, or that give no row."""
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
        if steps and draw(st.integers(0, 9)) == 0:  # an engine that gave no ids
            step = replace(step, prompts=(), choices=tuple(make_choice(choice.index, []) for choice in choices))
        steps.append(replace(step, **facts))
        histories += [[*prompt, *choice.ids] for choice in choices if choice.ids]
    return steps


async def gathered_of(group, wanted, *, whole=False):
    """The group, gathered from these steps as if a store had them."""
    by_name = {rollout.rollout_id: steps for rollout, steps in group}

    async def read_steps(_store, rollout, *, whole):
        match by_name[rollout.rollout_id]:
            case "deleted":
                raise no_rollout(rollout.rollout_id)
            case "damaged":
                raise DamagedStep(f"the step at index 0 of rollout {rollout.rollout_id!r} cannot be read")
            case steps:
                return steps

    there = [rollout for rollout, steps in group if steps != "deleted before"]
    with patch("proxy.api.control.export_query.read_steps", read_steps):
        return await read_group_rows(
            PARTS, wanted, Group("g", "b", 1, members=tuple(by_name)), there, GroupFilter(), whole=whole
        )


async def no_tokenizer(_name):
    return None


PARTS = SimpleNamespace(store=None, tokenizers=SimpleNamespace(get=no_tokenizer))  # all that rows need of them


def wanted_of(name, advantage="given", **options):
    return ExportQuery(FORMATS[name], CONTAINERS["json"], Options(**options), FILL, advantage)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150)
@given(
    group=members(),
    branches=st.sampled_from(["all", "longest", "last"]),
    max_len=st.sampled_from([None, None, 4]),
    advantage=st.sampled_from(ADVANTAGES),
)
def test_what_is_said_of_rows_is_parallel_to_them(name, group, branches, max_len, advantage):
    """By the token ids in the rows themselves, in every format; nobody is missing without a reason."""
    asyncio.run(check_parallel(name, group, advantage, branches=branches, max_len=max_len))


async def check_parallel(name, group, advantage, **options):
    wanted = wanted_of(name, advantage, **options)
    step_of = {
        token: step for _, steps in group if isinstance(steps, list)
        for step in steps for choice in step.choices for token in choice.ids
    }  # fmt: skip
    with suppress(Conflict):  # the format cannot express one of them
        gathered = await gathered_of(group, wanted)
        data = await gathered.whole(wanted) if gathered.why is None else []
        said = gathered.described(wanted)
        rows = entries(name, data)
        there = [one for one, steps in group if steps != "deleted before"]
        estimated = {one.rollout_id: one for one in with_advantages(there, advantage)}
        of_rows = {about["rollout_id"] for about in said["rows"]}

        assert len(rows) == len(said["rows"])
        for row, about in zip(rows, said["rows"], strict=True):
            steps = [step_of[token] for token in trained_ids(name, row)]
            assert list(dict.fromkeys(step.step_id for step in steps)) == about["step_ids"]
            assert {step.rollout_id for step in steps} <= {about["rollout_id"]}
            if name == "verifiers":
                assert row["extras"]["step_id"].startswith(f"{about['rollout_id']}-")
        names = [one.rollout_id for one, _ in group if one.rollout_id in of_rows]
        assert names == said["rollouts"]
        assert [one.reward for one, _ in group if one.rollout_id in of_rows] == said["rewards"]
        advantages = {one: estimated[one].advantages for one in names}
        assert (None if advantage == "none" else [*advantages.values()]) == said["advantages"]
        for about in said["rows"]:
            reward = estimated[about["rollout_id"]].reward
            one = None if advantage == "none" else advantages[about["rollout_id"]]
            assert (reward, one) == (about["reward"], about["advantage"])
        if gathered.why is None:
            left_out = Counter(left["rollout_id"] for left in said["skipped"] if "step_id" not in left)
            assert Counter(one.rollout_id for one, _ in group if one.rollout_id not in of_rows) == left_out
            check_steps(name, group, said, advantage, options)


def check_steps(name, group, said, advantage, options):
    """Each step with ids is trained in some row, or named with the reason."""
    trained = {step_id for about in said["rows"] for step_id in about["step_ids"]}
    named = {left["step_id"] for left in said["skipped"] if "step_id" in left}
    cut = name == "verifiers" and options["max_len"]
    for rollout, steps in group:
        for step in steps if isinstance(steps, list) else ():
            assert step.step_id in trained | named or cut, (rollout, step)


def test_the_property_finds_a_format_that_regroups_its_rows_in_silence(monkeypatch):
    """A format whose order is not that of its rows does not pass."""
    two = [
        make_step("r0-0", [1, 2], [100], rollout_id="r0", policy_version="3"),
        make_step("r0-1", [3], [101], rollout_id="r0", policy_version="3"),
    ]
    one = [make_step("r1-0", [1, 2], [102], rollout_id="r1", policy_version="3")]
    group = [(rollout, steps) for rollout, steps in zip(rollouts(1, 0), (two, one), strict=True)]
    asyncio.run(check_parallel("marin", group, "given", branches="all", max_len=None))
    monkeypatch.setattr(
        FORMATS["marin"],
        "order",
        lambda rows: [(number, at) for number, each in enumerate(rows) for at in range(len(each.rows))],
        raising=False,
    )

    with pytest.raises(AssertionError):
        asyncio.run(check_parallel("marin", group, "given", branches="all", max_len=None))


async def test_a_group_that_must_be_whole_is_refused_for_a_member_that_cannot_be_read():
    """By its name; a group need not be: then it is named and left out."""
    rollout, other = rollouts(1, 0)
    steps = [make_step("r1-0", [1], [10], rollout_id="r1")]
    group = [(rollout, "damaged"), (other, steps)]
    gathered = await gathered_of(group, wanted_of("sequences"))

    with pytest.raises(DamagedStep, match="'r0'"):
        await gathered_of(group, wanted_of("sequences"), whole=True)
    assert ["r1"] == [member.rollout.rollout_id for member in gathered.members]
    assert [("r0", True)] == [(left["rollout_id"], "cannot be read" in left["why"]) for left in gathered.skipped]


def rollouts(*rewards):
    return [
        Rollout(f"r{n}", "b", 1, 1, reward=reward, advantages=9, metadata={"env_name": "demo"})
        for n, reward in enumerate(rewards)
    ]


def test_given_and_none_leave_the_rollouts_as_they_are():
    """What none leaves out is left out when rows are made."""
    given = rollouts(1, None)

    assert given == with_advantages(given, "given") == with_advantages(given, "none")
    assert ("given", "none", "grpo", "rloo") == ADVANTAGES


@pytest.mark.parametrize(("how", "expected"), [("grpo", [1.0, None, -1.0]), ("rloo", [1.0, None, -1.0])])
def test_a_rollout_without_a_reward_gets_none_and_counts_for_nothing(how, expected):
    """The others are compared with each other."""
    assert expected == [rollout.advantages for rollout in with_advantages(rollouts(1, None, 0), how)]


@pytest.mark.parametrize("how", ["grpo", "rloo"])
async def test_a_rollout_without_rows_counts_in_the_baseline(how):
    """Its reward is a sample of the policy's return, whether or not a format has a row of it."""
    steps = [[make_step(f"r{n}-0", [1], [10 + n], rollout_id=f"r{n}")] for n in range(3)]
    whole = list(zip(rollouts(1, 0, 0), steps, strict=True))
    lacking = [*whole[:2], (whole[2][0], [])]
    advantages = [
        (await gathered_of(group, wanted_of("sequences", how))).described(wanted_of("sequences", how))["advantages"]
        for group in (whole, lacking)
    ]

    assert advantages[0][:2] == advantages[1]


@pytest.mark.parametrize("given", [[0.5, 0.5], {"r0-0": 1.0}, True, "much", None])
async def test_what_is_not_one_number_is_null_beside_a_row(given):
    """`advantages` has it as it was given."""
    (rollout,) = rollouts(1)
    rollout = replace(rollout, advantages=given)
    wanted = wanted_of("sequences")
    step = make_step("r0-0", [1], make_choice(0, [10], logprobs=array("f", [-1.0])), rollout_id="r0")
    said = (await gathered_of([(rollout, [step])], wanted)).described(wanted)

    assert ([{"rollout_id": "r0", "step_ids": ["r0-0"], "reward": 1, "advantage": None}], [given]) == (
        said["rows"],
        said["advantages"],
    )
