"""Claims of groups with the logprobs of another engine in their rows."""

import asyncio

import pytest
from tests.support.fakes import fake_engine
from tests.support.rescored import BELOW, Teacher, length_of, record_group, trained
from tests.support.session import names_in


@pytest.fixture
async def teacher():
    async with fake_engine() as engine:
        engine.respond = taught = Teacher()
        taught.url = engine.url
        yield taught


@pytest.fixture
def sections(teacher):
    scorer = {"endpoints": [{"url": teacher.url, "kind": "vllm", "name": "big-0"}], "version": "t1"}
    return {"rescore": {"scorers": {"teacher": scorer}, "timeout_s": 50}}


async def test_a_claimed_group_has_the_scores_of_a_teacher(proxy, teacher):
    """Its `rows` have what scored them; an export of the group has the same data."""
    await record_group(proxy, "g", 1, 0)
    claimed = await proxy.claim(rescore="teacher", format="slime")
    exported = await proxy.get("/groups/g/export?format=slime&rescore=teacher")
    (group,) = claimed["groups"]

    assert exported.json == group["data"]
    assert len(teacher.scored) == 2
    for sample, row in zip(group["data"], group["rows"], strict=True):
        assert row["rescored"] == {"engine": "big-0", "model": "big", "policy_version": "t1"}
        recorded, scored = (
            trained(sample[name], sample["loss_mask"]) for name in ("rollout_log_probs", "teacher_log_probs")
        )
        assert [value - BELOW for value in recorded] == pytest.approx(scored, abs=1e-6)


async def test_a_claim_without_a_working_scorer_takes_no_group(proxy, teacher):
    """The rewards of its groups can still be set; the next claim gets the group, and its scored rows from the cache."""
    members = await record_group(proxy, "g", 1, None)
    teacher.longest = await length_of(proxy, members[0])
    failed = await proxy.post("/batches/claim", {"consumer": "c", "rescore": "teacher", "lease_s": 60, "reward_s": 0})
    teacher.longest = 10**9

    assert (failed.status, failed.json["error"]["code"]) == (502, "engine_error")
    assert await proxy.status("g") == "complete"
    assert (await proxy.patch(f"/rollouts/{members[1]}", {"reward": 0.5})).status == 200
    assert [group["rewards"] for group in (await proxy.claim(rescore="teacher"))["groups"]] == [[1.0, 0.5]]
    assert len(teacher.scored) == 2


async def test_a_group_with_a_row_that_cannot_be_scored_is_refused(proxy, teacher):
    """The other groups of the claim are returned."""
    members = await record_group(proxy, "long", 1, 0)
    await record_group(proxy, "short", 1)
    teacher.window = await length_of(proxy, members[1])
    claimed = await proxy.claim(groups=2, rescore="teacher")

    assert names_in(claimed) == ["short"]
    assert [(entry["group_id"], entry["code"]) for entry in claimed["refused"]] == [("long", "not_scored")]
    assert await proxy.status("long") == "complete"


async def test_the_groups_of_a_claim_are_scored_at_the_same_time(proxy, teacher):
    """An exact claim does so, too; the groups keep the order of the queue."""
    for exact in (False, True):
        names = [f"{name}-{exact}" for name in "abc"]
        for name in names:
            await record_group(proxy, name, 1)
        teacher.together = asyncio.Barrier(3)
        claimed = await proxy.claim(groups=3, rescore="teacher", exact=exact)
        teacher.together = None

        assert names == names_in(claimed)


async def test_a_lease_does_not_expire_while_its_rows_are_scored(proxy, teacher):
    """Another consumer waits for longer than the lease, and gets nothing."""
    await record_group(proxy, "g", 1, 0)
    teacher.together = asyncio.Barrier(3)
    first = asyncio.create_task(proxy.claim(rescore="teacher", lease_s=3))
    await asyncio.wait_for(teacher.reached.wait(), 50)
    other = await proxy.claim(consumer="other", wait_s=4)
    await asyncio.wait_for(teacher.together.wait(), 50)

    assert other["groups"] == []
    assert names_in(await first) == ["g"]


async def test_advantages_over_the_batch_do_not_score_rows_again(proxy, teacher):
    """Rows are rendered twice for them."""
    await record_group(proxy, "g", 1, 0)
    await record_group(proxy, "h", 1, 0)
    claimed = await proxy.claim(groups=2, rescore="teacher", advantage="reinforce_pp", format="scored_data")

    assert len(claimed["groups"]) == 2
    assert len(teacher.scored) == 4
    assert all("ref_logprobs" in group["data"] for group in claimed["groups"])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"rescore": "nobody"}, 400, "Unknown scorer 'nobody'"),
        ({"rescore": "teacher", "format": "tinker"}, 400, "no place for logprobs of a teacher"),
        ({"rescore": 3}, 422, "rescore"),
        ({"rescore": "teacher", "rescore_top_k": -1}, 422, "rescore_top_k"),
    ],
)
async def test_a_claim_that_cannot_be_scored_is_rejected(proxy, fields, status, words):
    response = await proxy.post("/batches/claim", {"consumer": "c", **fields})

    assert status == response.status
    assert words in response.json["error"]["message"]
