"""The playbacks of a rollout, and the values of its states."""

import pytest
from prometheus_client import CollectorRegistry
from tests.support.branched import STEPS, Call, branch, mark, record, replay

from proxy.clock import SystemClock
from proxy.errors import Conflict, NotFound
from proxy.rollouts.group import FINISHED_MARK, MEMBER_MARK, REPLACED_MARK
from proxy.rollouts.rollout import write_fields
from proxy.rollouts.values import GROUP_MARK, ROLLOUT_MARK, note_playbacks, read_branches, read_values
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.step import Sampled

METRICS = make_metrics(CollectorRegistry())


async def values_of(store, source, **options):
    found = await read_values(store, source, METRICS, **options)
    return [(value.step_id, value.index, value.mean, value.branches) for value in found]


async def branches_of(store, source):
    return [(each.rollout.rollout_id, each.has_branched) for each in await read_branches(store, source, METRICS)]


async def with_branches(store, *rewards, before="s2", version="1", alone=()):
    """Record a source, and a branch for each reward, marked one by one."""
    source = await record(store, "r1", *STEPS, reward=1.0)
    names = [f"b{number}" for number in range(len(rewards))]
    for name, reward in zip(names, rewards, strict=True):
        await branch(store, source, before, name, Call("x", version), reward=reward)
    await mark(store, source, rollouts=(*names, *alone))
    return source


async def test_a_rollout_without_playbacks_has_no_values(store):
    assert await values_of(store, await record(store, "r1", *STEPS)) == []


async def test_a_value_is_the_mean_reward_of_the_branches_before_the_step(store):
    """Deviation is that of the population: rewards 1, 0, 0.5 deviate by 0.5, 0.5 and 0."""
    source = await with_branches(store, 1.0, 0.0, 0.5)
    (value,) = await read_values(store, source, METRICS)
    shown = value.as_dict()

    assert tuple(shown[name] for name in ("step_id", "index", "value", "count", "branches")) == ("s2", 2, 0.5, 3, 3)
    assert shown["std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert [{"policy_versions": ["1"], "value": 0.5, "count": 3, "std": shown["std"]}] == shown["versions"]


async def test_values_are_in_the_order_of_the_steps(store):
    source = await with_branches(store, 0.25, before="s3", alone=("c0", "c1"))
    await branch(store, source, "s1", "c0", Call("x"), reward=0.5)
    await branch(store, source, None, "c1", Call("x"), reward=0.75)

    assert await values_of(store, source) == [("s0", 0, 0.75, 1), ("s1", 1, 0.5, 1), ("s3", 3, 0.25, 1)]


async def test_branches_without_a_reward_and_those_that_were_not_there_do_not_count(store):
    source = await with_branches(store, 1.0, None, alone=("c0",))
    await branch(store, source, "s2", "c0", reached=False, reward=0.0)

    assert await values_of(store, source) == [("s2", 2, 1.0, 3)]


async def test_a_state_without_rewards_has_no_value(store):
    (value,) = await read_values(store, await with_branches(store, None), METRICS)

    assert tuple(value.as_dict()[name] for name in ("value", "count", "std", "versions")) == (None, 0, None, [])


async def test_playbacks_that_branch_nowhere_or_after_a_step_have_no_state(store):
    source = await record(store, "r1", *STEPS)
    await replay(store, source, "p1", reward=1.0)
    terms = {"of": "r1", "incarnation": source.incarnation, "end": 2, "answerable": 2, "on_mismatch": "branch"}
    await record(store, "p2", playback={**terms, "through": "s1"}, has_branched=True, reward=1.0)
    await record(store, "p3", playback={**terms, "before": "gone"}, has_branched=True, reward=1.0)
    await mark(store, source, rollouts=("p1", "p2", "p3"))

    assert await values_of(store, source) == []
    assert await branches_of(store, source) == [("p1", False), ("p2", True), ("p3", True)]


async def test_what_a_mark_names_may_be_gone_or_another_rollout(store):
    source = await with_branches(store, 1.0, alone=("gone", "other", "own"))
    other = await record(store, "r2", *STEPS)
    await branch(store, other, "s2", "other", Call("x"), reward=0.0)
    await record(store, "own", *STEPS, reward=0.0)
    await mark(store, source, groups=("no group",))

    assert await values_of(store, source) == [("s2", 2, 1.0, 1)]


async def test_marks_end_with_the_source(store):
    await with_branches(store, 1.0)
    await store.delete("r1")
    again = await record(store, "r1", *STEPS)

    assert await read_branches(store, again, METRICS) == []


async def test_the_values_of_a_source_that_is_deleted_meanwhile_are_not_found(store):
    source = await with_branches(store, 1.0)
    await store.delete("r1")
    await mark(store, await record(store, "r1", *STEPS), rollouts=("b0",))

    with pytest.raises(NotFound):
        await read_values(store, source, METRICS)


async def test_an_opening_marks_the_source_and_one_of_a_deleted_source_marks_nothing(store):
    source = await record(store, "r1", *STEPS)
    await branch(store, source, "s2", "b")
    opened = await store.get("b")
    await note_playbacks(store, SystemClock(), opened, f"{GROUP_MARK}g")
    await note_playbacks(store, SystemClock(), opened, f"{ROLLOUT_MARK}b")
    marks = await store.marks("r1")
    await store.delete("r1")
    await note_playbacks(store, SystemClock(), opened, f"{GROUP_MARK}g")

    assert marks == {f"{GROUP_MARK}g": b"", f"{ROLLOUT_MARK}b": b""}
    assert await store.get("r1") is None


async def grouped(store, source, members, replaced, **fields):
    """Store a group of these members, some of them replaced by others."""
    opened = await store.groups.open("g", write_fields({"size": len(members), "members": members, **fields}), now_ms=1)
    marks = {f"{FINISHED_MARK}{name}": b"" for name in members}
    for old, new in replaced.items():
        marks |= {f"{REPLACED_MARK}{old}": new.encode(), f"{MEMBER_MARK}{new}": b""}
    await store.groups.mark("g", opened.incarnation, marks, now_ms=1)
    await mark(store, source, groups=("g",))


async def test_a_replacement_counts_in_place_of_the_branch_that_failed(store):
    """It plays the failed branch back, and was at the branch step if it repeats a step that was sampled there."""
    source = await record(store, "r1", *STEPS)
    dead = await branch(store, source, "s1", "dead", "x0", "x1", status="failed", reward=0.0)
    inherited = Call("s0", sampled=Sampled("r1", "s0")), Call("x0", sampled=Sampled("dead", "x0"))
    await replay(store, dead, "again", *inherited, "y", reward=1.0)
    await grouped(store, source, ["dead"], {"dead": "again"})

    assert await branches_of(store, source) == [("again", True)]
    assert await values_of(store, source) == [("s1", 1, 1.0, 1)]


async def test_a_replacement_that_repeats_less_than_the_failed_branch_was_not_at_the_branch_step(store):
    source = await record(store, "r1", *STEPS)
    dead = await branch(store, source, "s1", "dead", "x0", status="failed")
    await replay(store, dead, "again", Call("s0", sampled=Sampled("r1", "s0")), "y", reward=1.0)
    await grouped(store, source, ["dead"], {"dead": "again"})

    assert await branches_of(store, source) == [("again", False)]
    assert await values_of(store, source) == [("s1", 1, None, 1)]


async def test_a_replacement_of_a_branch_that_was_not_at_its_branch_step_branches_there_itself(store):
    source = await record(store, "r1", *STEPS)
    await branch(store, source, "s2", "dead", reached=False, status="failed")
    await branch(store, source, "s2", "again", "y", reward=0.5)
    await grouped(store, source, ["dead"], {"dead": "again"})

    assert await values_of(store, source) == [("s2", 2, 0.5, 1)]


async def test_a_branch_that_sampled_nothing_does_not_count(store):
    """Its reward is none of the policy."""
    source = await record(store, "r1", *STEPS)
    await branch(store, source, "s1", "b", reward=1.0)
    await mark(store, source, rollouts=("b",))

    assert await branches_of(store, source) == [("b", False)]


async def test_a_replacement_after_a_deleted_member_does_not_count(store):
    source = await record(store, "r1", *STEPS)
    dead = await branch(store, source, "s1", "dead", "x0", status="failed")
    await replay(store, dead, "again", "y", reward=1.0)
    await grouped(store, source, ["dead"], {"dead": "again"})
    await store.delete("dead")

    assert await branches_of(store, source) == []


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (Call("x", "2"), "version 1, 2, the step by 1"),
        (Call("x", None), "version 1, unknown, the step by 1"),
        (Call("x", "1", epoch=1), "version 1, 1 of epoch 1, the step by 1"),
    ],
)
async def test_branches_of_another_version_than_the_step_are_refused(store, version, shown):
    """One of the two branches was sampled by another version."""
    source = await with_branches(store, 1.0, alone=("c0",))
    await branch(store, source, "s2", "c0", "y", version, reward=0.0)

    with pytest.raises(Conflict, match=f"1 of 2 branches before step 's2' of rollout 'r1' .*{shown}"):
        await read_values(store, source, METRICS)
    (value,) = await read_values(store, source, METRICS, any_version=True)
    assert value.mean == 0.5
    assert [entry["count"] for entry in value.as_dict()["versions"]] == [1, 1]


async def test_versions_are_shown_by_age(store):
    source = await with_branches(store, 1.0, version="10", alone=("c0", "c1"))
    await branch(store, source, "s2", "c0", Call("x", "10"), Call("y", "9"), reward=0.0)
    await branch(store, source, "s2", "c1", Call("x", "1", epoch=2), reward=0.5)
    (value,) = await read_values(store, source, METRICS, any_version=True)

    assert [
        (entry["policy_versions"], entry.get("policy_epoch"), entry["value"]) for entry in value.as_dict()["versions"]
    ] == [(["9", "10"], None, 0.0), (["10"], None, 1.0), (["1"], 2, 0.5)]


async def test_versions_of_inherited_steps_and_of_other_policies_do_not_count(store):
    """The source's first steps are of an earlier version, and its branches ask a judge of another policy."""
    source = await record(store, "r1", Call("s0", "1"), Call("s1", "2"), Call("s2", "3"))
    tape = [Call("s0", "1", Sampled("r1", "s0")), Call("s1", "2", Sampled("r1", "s1"))]
    live = [Call("x", "3"), Call("y", "judge", policy="judge")]
    playback = {"of": "r1", "incarnation": source.incarnation, "end": 2, "answerable": 2, "on_mismatch": "branch"}
    await record(store, "b", *tape, *live, playback={**playback, "before": "s2"}, has_branched=True, reward=1.0)
    await mark(store, source, rollouts=("b",))

    assert await values_of(store, source) == [("s2", 2, 1.0, 1)]


async def test_the_inherited_steps_of_a_source_are_of_the_rollout_that_sampled_them(store):
    """r1 was played back to r2, and r2 to a branch; each has the steps of r1 with their version."""
    await record(store, "r1", Call("s0", "1"))
    inherited = Call("s0", "1", Sampled("r1", "s0"))
    source = await record(store, "r2", inherited, Call("s1", "2"))
    playback = {"of": "r2", "incarnation": source.incarnation, "end": 1, "answerable": 1, "on_mismatch": "branch"}
    await record(
        store, "b", inherited, Call("x", "2"), playback={**playback, "before": "s1"}, has_branched=True, reward=1.0
    )
    await mark(store, source, rollouts=("b",))

    assert await values_of(store, source) == [("s1", 1, 1.0, 1)]


async def test_the_version_of_a_step_without_tokens_is_that_of_the_next_one(store):
    source = await record(store, "r1", "s0", "s1")
    playback = {"of": "r1", "incarnation": source.incarnation, "end": 0, "answerable": 0, "on_mismatch": "sample"}
    await record(store, "b", Call("x", "1"), playback=playback, reward=1.0)
    await record(store, "c", playback=playback, reward=0.0)
    await mark(store, source, rollouts=("b", "c"))

    assert await values_of(store, source) == [("s0", 0, 0.5, 2)]
