"""Groups that get their rewards after their rollouts were finished."""

import asyncio

import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session, names_in

from proxy.api.control import claims
from proxy.server.listener import running


@pytest.fixture
def impatient(monkeypatch):
    """Claims examine refused groups many times per second."""
    monkeypatch.setattr(claims, "_EXAMINE_INTERVAL_S", 0.05)


def names(claimed, kind="groups"):
    return [(group["group_id"], group.get("code"), group.get("why")) for group in claimed[kind]]


@pytest.mark.parametrize("fields", [{}, {"format": "trl"}, {"advantage": "grpo"}, {"format": "slime", "exact": True}])
async def test_a_claim_waits_for_rewards_that_are_set_after_the_finish(proxy, impatient, fields):
    """The group stays in the queue with a true reason, its rewards are not frozen, and the waiting claim gets it with them."""
    members = await proxy.group("g", None, None)
    empty = await proxy.claim(**fields)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=60, **fields))
    patched = [
        await proxy.patch(f"/rollouts/{name}", {"reward": reward}) for name, reward in zip(members, (1, 0), strict=True)
    ]
    (group,) = (await waiting)["groups"]
    ((name, code, why),) = names(empty, "refused")

    assert (empty["groups"], empty["dropped"], name, code) == ([], [], "g", "reward_pending")
    assert why.startswith("2 of 2 rollouts lack rewards; claims wait for them for another ")
    assert [response.status for response in patched] == [200, 200]
    assert not any("warning" in response.json for response in patched)
    assert (group["group_id"], group["rewards"]) == ("g", [1.0, 0.0])


async def test_a_claim_does_not_wait_for_rewards_of_rollouts_that_failed(proxy):
    """They are named in `skipped`; a truncated one gets a reward."""
    members = await proxy.group("g", 1, 0, 0, 0, finish=False)
    for member, status in zip(members, ("completed", "completed", "failed", "aborted"), strict=True):
        reward = 1.0 if status == "completed" else None
        await proxy.finish(member, status=status, reward=reward)
    truncated = await proxy.group("t", 1, 0, finish=False)
    await proxy.finish(truncated[0], reward=1)
    await proxy.finish(truncated[1], status="truncated")
    claimed = await proxy.claim(groups=9, format="slime")

    assert members[:2] == claimed["groups"][0]["rollouts"]
    assert [(name, "it has no reward") for name in members[2:]] == [
        (entry["rollout_id"], entry["why"]) for entry in claimed["groups"][0]["skipped"]
    ]
    assert [entry[:2] for entry in names(claimed, "refused")] == [("t", "reward_pending")]


@pytest.mark.parametrize(
    "signals", [{"step_rewards": {"STEP": 1}}, {"advantages": 0.5}, {"thread_rewards": {"main": 1}}]
)
async def test_rewards_in_a_rollout_and_advantages_are_enough(proxy, signals):
    (member,) = await proxy.group("g", None, finish=False)
    (step,) = await proxy.steps(member)
    if "step_rewards" in signals:
        signals = {"step_rewards": {step["step_id"]: 1}}
    assert (await proxy.patch(f"/rollouts/{member}", signals)).status == 200
    await proxy.finish(member)

    assert names_in(await proxy.claim()) == ["g"]


@pytest.mark.parametrize("members", ["completed", "rewarded"])
async def test_a_claim_that_chooses_its_members_does_not_wait_unless_it_has_reward_s(proxy, members):
    await proxy.group("g", 1, 0, None)
    waiting = await proxy.claim(members=members, reward_s=600)
    claimed = await proxy.claim(members=members)

    assert ([entry[:2] for entry in names(waiting, "refused")], waiting["groups"]) == ([("g", "reward_pending")], [])
    assert names_in(claimed) == ["g"]


async def test_a_group_is_dropped_once_the_time_for_its_rewards_is_over(proxy):
    """With the true reason; those that have a reward are claimed if they are enough."""
    await proxy.group("none", None, None)
    await proxy.group("some", 1, 0, None)
    await proxy.group("one", 1, None)
    claimed = await proxy.claim(groups=9, format="slime", reward_s=0)
    why = "2 of 2 rollouts lack rewards; 0 can be trained, min_group is 2"

    assert names_in(claimed) == ["some"]
    assert [
        ("none", "no_reward", why),
        ("one", "no_reward", why.replace("2 of 2", "1 of 2").replace("0 can", "1 can")),
    ] == (names(claimed, "dropped"))


async def test_equal_rewards_of_a_group_that_lacks_others_are_named_as_such(proxy):
    await proxy.group("none", None, None)
    await proxy.group("some", 1, 1, None)
    claimed = await proxy.claim(groups=9, only_mixed=True, reward_s=0)

    assert names(claimed, "dropped") == [
        ("none", "no_reward", "2 of 2 rollouts lack rewards"),
        ("some", "equal_rewards", "its rewards are equal: 2 of 3 rollouts; 1 lack rewards"),
    ]


async def test_the_settings_have_the_default_of_reward_s(store, proxy, http):
    """The time counts from the end of the last rollout."""
    await proxy.group("g", None, None)
    async with running(settings_for(None, groups={"reward_s": 0}), store) as served:
        other = Session(http, served.url)
        refused = await proxy.claim(format="slime")
        dropped = await other.claim(format="slime")

    assert ([entry[:2] for entry in names(refused, "refused")], refused["dropped"]) == ([("g", "reward_pending")], [])
    assert [entry[:2] for entry in names(dropped, "dropped")] == [("g", "no_reward")]


async def test_a_reward_that_is_set_after_its_group_was_dropped_has_a_warning(proxy):
    """It is stored, and takes effect when the group is requeued. Metadata needs no group."""
    members = await proxy.group("g", None, None)
    await proxy.claim(format="slime", reward_s=0)
    rewarded = [
        await proxy.patch(f"/rollouts/{name}", {"reward": value}) for name, value in zip(members, (1, 0), strict=True)
    ]
    other = await proxy.patch(f"/rollouts/{members[0]}", {"metadata": {"a": 1}})
    requeued = await proxy.post("/groups/g/requeue")
    again = await proxy.patch(f"/rollouts/{members[0]}", {"reward": 2})
    claimed = await proxy.claim(format="slime")
    warning = (
        "Group 'g' was dropped for policy 'default' (no_reward): POST /groups/g/requeue puts it into the queue again."
    )

    assert [(response.status, response.json["warning"]) for response in rewarded] == [(200, warning)] * 2
    assert "warning" not in other.json
    assert (requeued.status, requeued.json["status"]) == (200, "complete")
    assert (again.status, "warning" in again.json) == (200, False)
    assert [group["rewards"] for group in claimed["groups"]] == [[2.0, 0.0]]


async def test_a_reward_set_while_claims_drop_its_group_is_in_a_batch_or_warned_of_or_refused(proxy):
    """A PATCH with 200 and without a warning is never lost."""
    for number in range(12):
        members = await proxy.group(f"g{number}", 1, None)
        claim = asyncio.ensure_future(proxy.claim(format="slime", reward_s=0))
        await asyncio.sleep(0.002 * number)
        patched = await proxy.patch(f"/rollouts/{members[1]}", {"reward": 0})
        claimed = [group["rewards"] for group in (await claim)["groups"]]

        assert claimed in ([], [[1.0, 0.0]])
        assert (patched.status == 200 and "warning" not in patched.json) == bool(claimed) or claimed
