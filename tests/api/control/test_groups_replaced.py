"""Groups in which rollouts that fail are opened again."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fakes import settings_for
from tests.support.session import Session

from proxy.rollouts.group import Group
from proxy.server.listener import running


async def opened(proxy, size=1, **fields):
    response = await proxy.post("/groups", {"group_id": "g", "size": size, "replace": True, **fields})
    assert response.status == 201, response.text
    return [rollout["rollout_id"] for rollout in response.json["rollouts"]]


@pytest.mark.parametrize("status", ["failed", "aborted"])
async def test_a_rollout_that_fails_is_replaced(proxy, status):
    """The response names the new rollout, which has the same terms and its own key; the group waits for it."""
    terms = {"metadata": {"task": 7}, "limits": {"max_steps": 9}}
    (member,) = await opened(proxy, rollout=terms)
    await proxy.chat(member)
    replacement = (await proxy.finish(member, status=status, metadata={"odd": 1})).json["replaced_by"]
    before = await proxy.status("g")
    path = "/" + replacement["base_url"].split("/", 3)[3] + "/chat/completions"
    key = {"Authorization": f"Bearer {replacement['api_key']}"}
    call = await proxy.post(path, {"messages": [{"role": "user", "content": "hi"}]}, headers=key)
    await proxy.finish(replacement["rollout_id"], reward=1)
    claimed = (await proxy.claim())["groups"][0]

    assert before == "open"
    assert call.status == 200
    assert replacement["metadata"] == {"task": 7}
    assert replacement["limits"]["max_steps"] == 9
    assert [replacement["rollout_id"]] == claimed["rollouts"]
    assert [entry["rollout_id"] for entry in claimed["skipped"]] == [member]


async def test_the_mean_reward_is_of_the_rollouts_that_count(proxy):
    """Neither the list nor the Training page counts the rewards of replaced and surplus rollouts."""
    members = await opened(proxy, 2, over_sample=1)
    replacement = (await proxy.finish(members[0], status="failed", reward=-8)).json["replaced_by"]["rollout_id"]
    for name, reward in ((members[1], 1), (replacement, 0), (members[2], 4)):
        await proxy.chat(name)
        await proxy.patch(f"/rollouts/{name}", {"reward": reward})
    for name in (members[1], replacement):
        await proxy.finish(name)
    (listed,) = (await proxy.get("/groups?totals=true")).json["groups"]
    (trained,) = (await proxy.get("/training")).json["groups"]

    assert (listed["totals"]["reward"], trained["reward"]) == (0.5, 0.5)
    assert listed["totals"]["steps"] == 3


async def test_completed_and_truncated_rollouts_are_not_replaced(proxy):
    members = await opened(proxy, 2)
    responses = [
        (await proxy.finish(member, status=status)).json
        for member, status in zip(members, ("completed", "truncated"), strict=True)
    ]

    assert not any("replaced_by" in response for response in responses)
    assert await proxy.status("g") == "complete"


async def test_a_member_is_replaced_up_to_its_bound(proxy):
    (member,) = await opened(proxy, replace=2)
    names = [member]
    while (response := (await proxy.finish(names[-1], status="failed")).json).get("replaced_by"):
        names.append(response["replaced_by"]["rollout_id"])

    assert names == [member, f"{member}~1", f"{member}~2"]
    assert await proxy.status("g") == "complete"


async def test_repeated_and_concurrent_finishes_replace_a_rollout_once(proxy, store, http):
    """Through several processes."""
    (member,) = await opened(proxy)
    async with running(settings_for(None), store) as other:
        clients = [proxy, Session(http, other.url)] * 4
        responses = await asyncio.gather(*(client.finish(member, status="failed") for client in clients))

    assert {response.status for response in responses} == {200}
    assert {response.json["replaced_by"]["rollout_id"] for response in responses} == {f"{member}~1"}
    assert [rollout["rollout_id"] for rollout in (await proxy.get("/groups/g")).json["rollouts"]] == [
        member,
        f"{member}~1",
    ]


async def test_a_rollout_that_is_finished_by_its_deadline_is_replaced(proxy):
    """The group shows the key of the replacement; the time until its first call begins again."""
    (member,) = await opened(proxy, start_s=0.05)
    async with asyncio.timeout(50):
        while not (shown := (await proxy.get("/groups/g")).json["rollouts"])[0].get("replaced_by"):
            await asyncio.sleep(0.05)

    assert tuple(shown[0][name] for name in ("status", "reason", "replaced_by")) == (
        "aborted",
        "deadline",
        f"{member}~1",
    )
    assert {"base_url", "api_key"} <= shown[1].keys()
    assert not {"base_url", "api_key"} & shown[0].keys()


async def test_all_attempts_at_a_rollout_have_one_deadline(proxy):
    """Each replacement has what is left of it; at its end there is none."""
    (member,) = await opened(proxy, deadline_s=1000.0, replace=2)
    left = []
    for name in (member, f"{member}~1"):
        replacement = (await proxy.finish(name, status="failed")).json["replaced_by"]
        rollouts = [(await proxy.get(f"/rollouts/{each}")).json for each in (member, replacement["rollout_id"])]
        first, last = [rollout["created_ms"] / 1000 + rollout["deadline_s"] for rollout in rollouts]
        left.append(
            (replacement["deadline_s"], round(last - first, -1))
        )  # it is opened a moment after the other one ends

    assert 1000 > left[0][0] > left[1][0] > 900
    assert [difference for _, difference in left] == [0, 0]


async def test_a_rollout_without_time_left_is_not_replaced(proxy):
    """Its group completes at its deadline, however many attempts it may have."""
    (member,) = await opened(proxy, deadline_s=0.05, replace=100)
    async with asyncio.timeout(50):
        while await proxy.status("g") == "open":
            await asyncio.sleep(0.05)
    (shown,) = (await proxy.get("/groups/g")).json["rollouts"]

    assert tuple(shown[name] for name in ("rollout_id", "status", "reason")) == (member, "aborted", "deadline")


async def test_a_crash_before_the_replacement_is_part_of_the_group_is_repaired(proxy, store):
    """The next process that reads the group completes it, with the rollout that was opened already."""
    (member,) = await opened(proxy)
    await store.update_if(member, {"status": b'"failed"'}, expect={}, now_ms=1)
    await store.open(f"{member}~1", {"group_id": b'"g"'}, now_ms=1)

    shown = (await proxy.get("/groups/g")).json
    assert shown["status"] == "open"
    assert [rollout.get("replaced_by") for rollout in shown["rollouts"]] == [f"{member}~1", None]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
@settings(max_examples=50)
def test_each_place_of_a_group_has_one_current_member(failures):
    """Members keep their order, however often each was replaced."""
    chains = [[f"m{number}", *(f"m{number}~{n}" for n in range(1, count + 1))] for number, count in enumerate(failures)]
    replaced = {old: new for chain in chains for old, new in pairwise(chain)}
    later = tuple(sorted(name for chain in chains for name in chain[1:]))
    group = Group("g", "b", 1, members=(*(chain[0] for chain in chains), *later), replaced=replaced)

    assert [chain[-1] for chain in chains] == group.current
    assert [list(range(len(chain))) for chain in chains] == [
        [group.attempts(name) for name in chain] for chain in chains
    ]
