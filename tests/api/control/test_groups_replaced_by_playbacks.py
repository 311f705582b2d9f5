"""Groups in which a rollout that fails is played back by the one in its place."""

import pytest
from tests.support.stored import stored_rollout, stored_steps


async def opened(proxy, name="g", size=1, replace=None, **fields):
    return await proxy.open_group(name, size, replace={"playback": True} if replace is None else replace, **fields)


async def failed(proxy, member):
    """Finish a rollout as failed; return the one in its place."""
    response = await proxy.finish(member, status="failed")
    return response.json["replaced_by"]["rollout_id"]


async def inherited(store, rollout):
    """Return for each step of a rollout the rollout that sampled it."""
    return [step.inherited.rollout_id if step.inherited else rollout for step in await stored_steps(store, rollout)]


async def test_the_new_rollout_repeats_the_one_that_failed_and_continues(proxy, store):
    """The agent runs from its start: two calls are answered, and the third is sampled."""
    (member,) = await opened(proxy)
    steps = await proxy.turns(member, 2)
    name = await failed(proxy, member)
    again = await proxy.turns(name, 3)
    await proxy.finish(name, reward=1)
    (claimed,) = (await proxy.claim())["groups"]

    assert name == f"{member}~1"
    assert steps == again[:2]
    assert await inherited(store, name) == [member, member, name]
    assert claimed["rollouts"] == [name]


async def test_a_third_attempt_repeats_both(proxy, store):
    (member,) = await opened(proxy, replace={"playback": True, "attempts": 2})
    await proxy.turns(member, 1)
    second = await failed(proxy, member)
    await proxy.turns(second, 2)
    third = await failed(proxy, second)
    await proxy.turns(third, 3)

    assert await inherited(store, third) == [member, second, third]
    assert "replaced_by" not in (await proxy.finish(third, status="failed")).json


async def test_a_rollout_without_steps_is_opened_again_without_a_tape(proxy, store):
    (member,) = await opened(proxy)
    name = await failed(proxy, member)
    await proxy.turns(name, 1)

    assert (await stored_rollout(store, name)).playback is None
    assert await inherited(store, name) == [name]


async def test_another_prompt_than_that_of_the_failed_rollout_is_sampled(proxy, store):
    (member,) = await opened(proxy)
    await proxy.turns(member, 1)
    name = await failed(proxy, member)
    await proxy.chat(name, {"role": "user", "content": "another prompt"})

    assert await inherited(store, name) == [name]


async def test_texts_that_are_ignored_are_terms_of_the_replacement(proxy, store):
    """Also those of the failed rollout's own playback."""
    await proxy.chat("r1", {"role": "user", "content": "at 10:04: hi"})
    (step,) = await stored_steps(store, "r1")
    playback = {"of": "r1", "before": step.step_id, "ignore": ["at *: "]}
    replace = {"playback": True, "ignore": ["by *: "]}
    (member,) = await opened(proxy, replace=replace, rollout={"playback": playback})
    await proxy.chat(member, {"role": "user", "content": "at 11:17: hi"})
    name = await failed(proxy, member)
    await proxy.chat(name, {"role": "user", "content": "at 12:00: hi"})

    assert set((await stored_rollout(store, name)).playback.ignore) == {"at *: ", "by *: "}
    assert await inherited(store, name) == [member]


async def test_a_branch_that_failed_after_its_branch_step_is_repeated_with_its_own_steps(proxy, store):
    """Its replacement counts in the value of the state."""
    steps = await proxy.turns("r1", 3)
    body = {"before": steps[1], "count": 1, "replace": {"playback": True}}
    (member,) = [it["rollout_id"] for it in (await proxy.post("/rollouts/r1/branches", body)).json["rollouts"]]
    await proxy.turns(member, 2)
    name = await failed(proxy, member)
    await proxy.turns(name, 3)
    await proxy.finish(name, reward=0.5)
    (value,) = (await proxy.get("/rollouts/r1/values")).json["values"]

    assert await inherited(store, name) == ["r1", member, name]
    assert (steps[1], 0.5, 1) == tuple(value[key] for key in ("step_id", "value", "count"))


@pytest.mark.parametrize("replace", [{"playback": True}, True])
async def test_a_branch_that_failed_before_its_branch_step_is_opened_again_as_it_was(proxy, store, replace):
    """So is every branch of a group whose replacements play nothing back."""
    steps = await proxy.turns("r1", 3)
    body = {"before": steps[2], "count": 1, "replace": replace, "rollout": {"metadata": {"x": 1}}}
    (member,) = [it["rollout_id"] for it in (await proxy.post("/rollouts/r1/branches", body)).json["rollouts"]]
    await proxy.turns(member, 1)
    name = await failed(proxy, member)
    await proxy.turns(name, 3)
    rollout, before = await stored_rollout(store, name), await stored_rollout(store, member)

    assert (before.playback, {"x": 1}) == (rollout.playback, rollout.metadata)
    assert await inherited(store, name) == ["r1", "r1", name]


@pytest.mark.parametrize(
    "replace", [{"playback": 1}, {"attempts": 101}, {"attempts": -1}, {"presets": ["unknown"]}, {"of": "r1"}, "true"]
)
async def test_an_invalid_replacement_is_422(proxy, replace):
    assert (await proxy.post("/groups", {"size": 1, "replace": replace})).status == 422
