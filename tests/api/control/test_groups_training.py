"""`GET /training`: what the newest groups of a policy earned."""

import pytest
from tests.support.session import names_in

from proxy.api.control import groups
from proxy.rollouts.group import Group, PolicyState
from proxy.telemetry.multiprocess import WorkerMetrics


async def opened(proxy, name: str, rewards: list[float | None], version: int) -> None:
    """Open a group at a policy version, and finish its rollouts with these rewards after one call each."""
    await proxy.put("/policy", {"version": version})
    group = (await proxy.post("/groups", {"group_id": name, "size": len(rewards)})).json
    for rollout, reward in zip(group["rollouts"], rewards, strict=True):
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert (await proxy.post(f"/rollouts/{rollout['rollout_id']}/v1/chat/completions", body)).status == 200
        await proxy.post(f"/rollouts/{rollout['rollout_id']}/finish", {"status": "completed", "reward": reward})


async def test_each_group_has_what_it_earned(proxy):
    """Mean, spread and extreme advantages of its rewards, tokens, and how far its oldest token is behind."""
    await opened(proxy, "mixed", [0, 1], 3)
    await opened(proxy, "equal", [0.5, 0.5], 5)
    await proxy.post("/groups", {"group_id": "waiting", "size": 2})
    found = (await proxy.get("/training")).json
    waiting, equal, mixed = found["groups"]
    fields = ("group_id", "status", "rewards", "reward", "spread", "equal", "advantages", "version", "staleness")

    assert [mixed[name] for name in fields] == ["mixed", "complete", 2, 0.5, 0.5, False, [-1, 1], "3", 2]
    assert [equal[name] for name in fields] == ["equal", "complete", 2, 0.5, 0, True, [0, 0], "5", 0]
    assert [waiting[name] for name in fields] == ["waiting", "open", 0, None, None, None, None, None, None]
    assert mixed["tokens"] > 0 == waiting["tokens"]
    assert (found["policy"], found["version"], found["equal"]) == ("default", "5", 0.5)
    assert found["statuses"] == {"open": 1, "complete": 2}
    assert (found["covered"], found["older"]) == ({"groups": 3, "rollouts": 6}, False)


async def test_a_response_covers_a_bounded_number_of_groups_and_rollouts(proxy, monkeypatch):
    """And has how many; `older` is whether there are more."""
    for number in range(5):
        await proxy.post("/groups", {"group_id": f"g{number}", "size": 2})
    found = (await proxy.get("/training?limit=3")).json
    assert (names_in(found), found["older"]) == (["g4", "g3", "g2"], True)
    monkeypatch.setattr(groups, "_MAX_ROLLOUTS", 5)
    found = (await proxy.get("/training")).json
    assert (found["covered"], found["older"]) == ({"groups": 2, "rollouts": 4}, True)


async def test_refused_groups_are_counted_by_reason(proxy):
    """Each refusal by a claim counts; refusals for other policies do not."""
    await opened(proxy, "unrewarded", [None, 1], 3)
    for _ in range(2):
        await proxy.claim(members="all", format="scored_data")

    assert (await proxy.get("/training")).json["refused"] == {"no_reward": 2}


async def test_interrupted_calls_are_counted_by_result_with_their_tokens_and_waits(proxy, monkeypatch):
    """Of all engines; zeros are omitted."""
    found = (await proxy.get("/training")).json["interrupted"]
    assert found == {"calls": {}, "reasons": {}, "tokens": {}, "waits": 0, "waited_s": 0}
    lines = (
        b'tokentape_resumed_calls_total{engine="a",reason="none",result="resumed"} 3.0\n'
        b'tokentape_resumed_calls_total{engine="b",reason="none",result="resumed"} 4.0\n'
        b'tokentape_resumed_calls_total{engine="b",reason="parser",result="ended"} 1.0\n'
        b'tokentape_cut_tokens_total{result="kept"} 90.0\ntokentape_cut_tokens_total{result="lost"} 0.0\n'
        b"tokentape_resume_wait_seconds_sum 4.5\ntokentape_resume_wait_seconds_count 7.0\n"
        b'tokentape_resume_wait_seconds_bucket{le="1.0"} 7.0\n'
    )

    async def exposition(_):
        return lines

    monkeypatch.setattr(WorkerMetrics, "exposition", exposition)
    calls = {"resumed": 7, "ended": 1}
    expected = {"calls": calls, "reasons": {"parser": 1}, "tokens": {"kept": 90}, "waits": 7, "waited_s": 4.5}
    assert (await proxy.get("/training")).json["interrupted"] == expected


@pytest.mark.parametrize(
    ("query", "status"), [("limit=0", 400), ("limit=1001", 400), ("policy=other", 404), ("policies=a", 400)]
)
async def test_wrong_parameters_are_refused(proxy, query, status):
    assert status == (await proxy.get(f"/training?{query}")).status


@pytest.mark.parametrize(
    ("states", "is_of"),
    [({}, True), ({"solver": PolicyState("complete")}, True), ({"critic": PolicyState("done")}, False)],
)
def test_a_complete_group_belongs_to_the_policies_that_have_steps_in_it(states, is_of):
    """An open one may still get some."""
    assert is_of == groups._is_of(Group("g1", "1", 1, states=states), "solver")
