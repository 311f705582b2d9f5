"""Rollouts: opening, listing, reading, rewards, finishing, deleting."""

import asyncio

import pytest
from openai import AsyncOpenAI
from tests.support.fakes import settings_for

from proxy.server.listener import running

OPENING = {
    "rollout_id": "a/b {c}",
    "group_id": "g1",
    "metadata": {"task": 7},
    "sampling": {"override": {"temperature": 0}},
    "limits": {"max_steps": 3},
}


async def test_an_agent_needs_only_the_base_url_and_the_key_of_an_opened_rollout(proxy):
    opened = await proxy.post("/rollouts", OPENING)
    agent = AsyncOpenAI(base_url=opened.json["base_url"], api_key=opened.json["api_key"])
    await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    await agent.close()
    rollout = await proxy.get("/rollouts/a%2Fb%20%7Bc%7D")

    assert (opened.status, opened.json["rollout_id"]) == (201, "a/b {c}")
    assert {"steps": 1, "exact": 1, "flagged": 0}.items() <= rollout.json["counts"].items()
    assert (
        rollout.json["status"], rollout.json["metadata"], rollout.json["group_id"], rollout.json["limits"]["max_steps"]
    ) == ("open", {"task": 7}, "g1", 3)  # fmt: skip


@pytest.mark.parametrize("rollout", [".", ".."])
async def test_a_rollout_named_like_a_folder_is_identified_by_its_key(proxy, rollout):
    """HTTP clients remove `.` and `..` from paths."""
    opened = (await proxy.post("/rollouts", {"rollout_id": rollout})).json
    agent = AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
    response = await agent.chat.completions.with_raw_response.create(
        model="policy", messages=[{"role": "user", "content": "hi"}]
    )
    await agent.close()

    assert rollout == response.headers["X-Rollout-Id"]


async def test_with_separate_ports_the_base_url_is_the_model_apis(store, proxy):
    async with (
        running(settings_for(None, control={"listen": "127.0.0.1:0"}), store) as served,
        proxy.http.post(f"{served.control_url}/rollouts") as response,
    ):
        opened = await response.json()

    assert f"http://127.0.0.1:0/rollouts/{opened['rollout_id']}/v1" == opened["base_url"]


async def test_agents_url_sets_the_base_url(store, proxy):
    """It is needed behind a load balancer; a trailing /v1 is ignored."""
    agents = {"url": "https://tapes.example.com/models/v1"}
    async with (
        running(settings_for(None, agents=agents), store) as served,
        proxy.http.post(f"{served.url}/rollouts") as response,
    ):
        opened = await response.json()

    assert f"https://tapes.example.com/models/rollouts/{opened['rollout_id']}/v1" == opened["base_url"]


async def test_opening_a_rollout_is_idempotent(proxy):
    """The key is the same, also after calls."""
    first = await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"a": 1}})
    await proxy.chat("r1")
    second = await proxy.post("/rollouts", {"metadata": {"a": 1}, "rollout_id": "r1"})

    assert (first.status, second.status) == (201, 200)
    assert first.json == second.json


async def test_opening_a_rollout_again_with_another_body_is_409(proxy):
    """The first terms remain."""
    await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"a": 1}})
    second = await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"a": 2}})

    assert (second.status, second.json["error"]["type"]) == (409, "conflict_error")
    assert (await proxy.get("/rollouts/r1")).json["metadata"] == {"a": 1}


@pytest.mark.parametrize(("sent", "mode"), [("append", "append"), ("off", "off"), (False, "off")])
async def test_the_continuation_mode_of_a_rollout_is_set_at_the_opening_and_by_patches(proxy, sent, mode):
    """False is `off`, as YAML reads it. The same opening again returns the same response; null restores the configured mode."""
    opened = await proxy.post("/rollouts", {"rollout_id": "r1", "continuation": sent})
    again = await proxy.post("/rollouts", {"rollout_id": "r1", "continuation": mode})
    assert (opened.status, again.status, opened.json["continuation"]) == (201, 200, mode)
    assert opened.json == again.json

    await proxy.post("/rollouts", {"rollout_id": "r2"})
    patched = await proxy.patch("/rollouts/r2", {"continuation": sent})
    assert (patched.json["continuation"], (await proxy.get("/rollouts/r2")).json["continuation"]) == (mode, mode)

    await proxy.patch("/rollouts/r2", {"reward": 1})
    assert mode == (await proxy.get("/rollouts/r2")).json["continuation"]

    await proxy.patch("/rollouts/r2", {"continuation": None})
    assert "continuation" not in (await proxy.get("/rollouts/r2")).json


async def test_a_rollout_without_a_continuation_mode_does_not_show_one(proxy):
    """The configured mode applies."""
    opened = await proxy.post("/rollouts", {"rollout_id": "r1"})

    assert "continuation" not in {**opened.json, **(await proxy.get("/rollouts/r1")).json}


@pytest.mark.parametrize("mode", [True, "on", "", 0, ["append"]])
async def test_an_unknown_continuation_mode_is_422_and_the_error_lists_the_modes(proxy, mode):
    """At the opening of a rollout or a group, and in a patch."""
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    refused = [
        await proxy.post("/rollouts", {"rollout_id": "r2", "continuation": mode}),
        await proxy.post("/groups", {"group_id": "g1", "size": 2, "rollout": {"continuation": mode}}),
        await proxy.patch("/rollouts/r1", {"continuation": mode}),
    ]

    assert [response.status for response in refused] == [422] * 3
    assert all("'off', 'faithful' or 'append'" in response.json["error"]["message"] for response in refused)


async def test_opening_a_rollout_that_a_call_created_is_409(proxy):
    """Its terms did not apply to that call."""
    await proxy.chat("r1")

    assert (await proxy.post("/rollouts", {"rollout_id": "r1"})).status == 409


async def test_opening_a_rollout_without_an_id_creates_one(proxy):
    first, second = await proxy.post("/rollouts", {}), await proxy.post("/rollouts")

    assert (first.status, second.status) == (201, 201)
    assert first.json["rollout_id"] != second.json["rollout_id"]


async def test_an_invalid_opening_is_422_and_names_the_field(proxy):
    """A body that is not an object is 400; nothing is created."""
    for body, status, named in [
        ({"rolout_id": "x"}, 422, "rolout_id"),
        ({"rollout_id": ""}, 422, "rollout_id"),
        ({"rollout_id": "x" * 257}, 422, "rollout_id"),
        ({"rollout_id": "a\nb"}, 422, "rollout_id"),
        ({"rollout_id": 7}, 422, "rollout_id"),
        ({"limits": {"max_steps": -1}}, 422, "limits.max_steps"),
        ({"sampling": {"cap": {"max_tokens": "most"}}}, 422, "sampling.cap"),
        ({"sampling": {"cap": {"top_k": "auto"}}}, 422, "sampling.cap"),
        ([], 400, "object"),
    ]:
        response = await proxy.post("/rollouts", body)
        assert status == response.status, body
        assert named in response.json["error"]["message"]
        assert (await proxy.get("/rollouts")).json["rollouts"] == []


async def test_pages_of_rollouts_are_newest_first_and_stable_under_concurrent_openings(proxy):
    for number in range(7):
        await proxy.post("/rollouts", {"rollout_id": f"r{number}"})
        await asyncio.sleep(0.002)  # rollouts of one millisecond have no order of age
    listed, cursor = [], ""
    while True:
        page = (await proxy.get(f"/rollouts?limit=3{cursor}")).json
        listed += [rollout["rollout_id"] for rollout in page["rollouts"]]
        await proxy.post("/rollouts", {})
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"

    assert [f"r{number}" for number in reversed(range(7))] == listed


async def test_rollouts_can_be_filtered_by_status_group_and_time(proxy):
    await proxy.post("/rollouts", {"rollout_id": "r1", "group_id": "g1"})
    await proxy.post("/rollouts", {"rollout_id": "r2", "group_id": "g2"})
    await proxy.post("/rollouts/r2/finish", {"status": "failed"})

    async def listed(query):
        return [rollout["rollout_id"] for rollout in (await proxy.get(f"/rollouts?{query}")).json["rollouts"]]

    assert await listed("group_id=g1") == ["r1"]
    assert await listed("group_id=g2") == ["r2"]
    assert await listed("status=failed") == ["r2"]
    assert await listed("since=9999999999") == []


@pytest.mark.parametrize("is_indexed", [True, False])
async def test_filtered_pages_have_every_rollout_that_matches_once(proxy, store, monkeypatch, is_indexed):
    """By the index, or by all rollouts while the index may lack some; each is checked."""
    names = [f"r{number:02}" for number in range(24)]
    for number, name in enumerate(names):
        await proxy.post("/rollouts", {"rollout_id": name, **({"group_id": "g"} if number % 3 == 0 else {})})
        if number % 4 == 0:
            await proxy.turns(name, 1)
        if number % 6 == 0:
            await proxy.post(f"/rollouts/{name}/finish", {"status": "failed"})
    if not is_indexed:
        await store.open("unindexed", {}, now_ms=1)
        await store.delete("unindexed")
        bucket = store.layout.buckets[0]
        await store._servers.execute(
            bucket.indexes, [("ZADD", bucket.indexes, 0, 'f:status="open"\0000000000000001gone')]
        )

    async def listed(query):
        found, cursor = [], ""
        while True:
            page = (await proxy.get(f"/rollouts?limit=2&{query}{cursor}")).json
            found += [rollout["rollout_id"] for rollout in page["rollouts"]]
            if page["cursor"] is None:
                return sorted(found)
            cursor = f"&cursor={page['cursor']}"

    assert names[::6] == await listed("status=failed")
    assert names[::4] == await listed("policy=default")
    assert names[::12] == await listed("policy=default&status=failed")
    assert names[::3] == await listed("group_id=g")
    assert names[::6] == await listed("group_id=g&status=failed")
    assert names == await listed("until=9999999999")
    assert await listed("until=1&policy=default") == await listed("policy=other") == await listed("group_id=none") == []


async def test_an_invalid_query_of_rollouts_is_400_and_names_the_parameter(proxy):
    for query in [
        "limit=0",
        "limit=x",
        "limit=1001",
        f"limit={'9' * 5000}",
        f"since={10**30}",
        "limit=٣",
        "since=-1",
        "cursor=x",
        "cursor=%00",
        "status=new",
        "colour=red",
    ]:
        response = await proxy.get(f"/rollouts?{query}")
        assert (400, query.partition("=")[0]) == (response.status, response.json["error"]["param"])


async def test_rewards_and_metadata_can_be_patched_after_the_finish(proxy):
    """Other fields remain."""
    (step,) = await proxy.turns("r1", 1)
    await proxy.patch("/rollouts/r1", {"metadata": {"a": 1}})
    await proxy.post("/rollouts/r1/finish", {"status": "completed", "reward": 0.5})
    patched = await proxy.patch("/rollouts/r1", {"reward": 1, "step_rewards": {step: -2.5}, "advantages": [0.5, 0.25]})

    assert patched.status == 200
    expected = {"reward": 1.0, "step_rewards": {step: -2.5}, "advantages": [0.5, 0.25], "metadata": {"a": 1}}
    assert {name: patched.json[name] for name in expected} == expected


@pytest.mark.parametrize("body", [{"reward": "much"}, {"step_rewards": {"unknown": 1}}, {"status": "open"}])
async def test_an_invalid_patch_is_422_and_changes_nothing(proxy, body):
    await proxy.chat("r1")
    before = (await proxy.get("/rollouts/r1")).json
    response = await proxy.patch("/rollouts/r1", body)

    assert response.status == 422
    assert before == (await proxy.get("/rollouts/r1")).json


async def test_a_patch_of_a_rollout_that_is_deleted_during_the_patch_is_404(proxy, store):
    (step,) = await proxy.turns("r1", 1)
    store.waiting["update_if"], store.reached["update_if"] = asyncio.Event(), asyncio.Event()
    patching = asyncio.ensure_future(proxy.patch("/rollouts/r1", {"step_rewards": {step: 1}}))
    await store.reached["update_if"].wait()
    await proxy.delete("/rollouts/r1")
    store.waiting.pop("update_if").set()

    assert (await patching).status == 404


async def test_a_finish_is_idempotent_and_closes_the_rollout(proxy):
    """The same finish again is 200; another status or reward, and calls, are 409."""
    await proxy.chat("r1")
    first = await proxy.post("/rollouts/r1/finish", {"status": "completed", "reward": 1, "metadata": {"b": 2}})
    second = await proxy.post("/rollouts/r1/finish", {"status": "completed", "reward": 1})
    other = await proxy.post("/rollouts/r1/finish", {"status": "failed"})
    reward = await proxy.post("/rollouts/r1/finish", {"status": "completed", "reward": 2})
    call = await proxy.post("/rollouts/r1/v1/chat/completions", {"messages": []})

    assert (first.status, second.status, other.status, reward.status, call.status) == (200, 200, 409, 409, 409)
    counted_later = {"drift": None, "touched_ms": 0}  # in the background, after the response
    assert first.json | counted_later == second.json | counted_later
    assert (first.json["status"], first.json["reward"], first.json["metadata"]) == ("completed", 1.0, {"b": 2})
    assert (call.json["error"]["type"], call.headers["X-Should-Retry"]) == ("rollout_closed", "false")


async def test_concurrent_finishes_with_different_statuses_agree_on_one(proxy):
    """The others are 409."""
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    words = ["completed", "failed"] * 6
    responses = await asyncio.gather(*(proxy.post("/rollouts/r1/finish", {"status": word}) for word in words))
    status = (await proxy.get("/rollouts/r1")).json["status"]

    assert [200 if word == status else 409 for word in words] == [response.status for response in responses]


@pytest.mark.parametrize(("word", "status"), [("failed", 409), ("completed", 200)])
async def test_of_two_concurrent_finishes_the_first_stored_one_counts(proxy, store, word, status):
    """The slower one is compared with it."""
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    store.waiting["update_if"], store.reached["update_if"] = asyncio.Event(), asyncio.Event()
    slow = asyncio.ensure_future(proxy.post("/rollouts/r1/finish", {"status": word}))
    await store.reached["update_if"].wait()
    overtaken = store.waiting.pop("update_if")
    quick = await proxy.post("/rollouts/r1/finish", {"status": "completed"})
    overtaken.set()

    assert (quick.status, (await slow).status) == (200, status)
    assert (await proxy.get("/rollouts/r1")).json["status"] == "completed"


async def test_a_call_in_flight_does_not_recreate_a_deleted_rollout(proxy, store):
    """A repeated DELETE is 204; the call's response is delivered, and its step is not stored."""
    await proxy.chat("r0")
    store.waiting["append"], store.reached["append"] = asyncio.Event(), asyncio.Event()
    call = asyncio.ensure_future(proxy.chat("r1"))
    await store.reached["append"].wait()
    first, second = await proxy.delete("/rollouts/r1"), await proxy.delete("/rollouts/r1")
    store.waiting.pop("append").set()
    await call

    assert (first.status, second.status, (await proxy.get("/rollouts/r1")).status) == (204, 204, 404)
    assert await store.get("r1") is None
    assert [rollout["rollout_id"] for rollout in (await proxy.get("/rollouts")).json["rollouts"]] == ["r0"]


@pytest.mark.parametrize("path", ["", "/steps", "/steps/x", "/tree", "/export"])
async def test_an_unknown_rollout_is_404(proxy, path):
    response = await proxy.get(f"/rollouts/absent{path}")

    assert (response.status, response.json["error"]["type"]) == (404, "not_found_error")


async def test_a_step_reward_can_be_a_list_with_one_value_per_sampled_token(proxy):
    """Another length, or several choices, is 422."""
    single = await proxy.chat("r1", max_tokens=3)
    several = await proxy.chat("r1", n=2, max_tokens=3)
    (step, _) = await proxy.steps("r1")
    rewards = [0.5 * number for number, _ in enumerate(step["choices"][0]["ids"])]
    responses = [
        await proxy.patch("/rollouts/r1", {"step_rewards": {step_id: value}})
        for step_id, value in ((single.step_id, [*rewards, 1]), (several.step_id, rewards), (single.step_id, rewards))
    ]
    rollout = (await proxy.get("/rollouts/r1")).json
    shown = (await proxy.get(f"/rollouts/r1/steps/{single.step_id}")).json

    assert [response.status for response in responses] == [422, 422, 200]
    assert responses[0].json["error"]["param"] == "step_rewards"
    assert {single.step_id: rewards} == rollout["step_rewards"]
    assert rewards == shown["reward"]


async def test_concurrent_step_rewards_are_all_stored(proxy):
    steps = await proxy.turns("r1", 6)
    await asyncio.gather(*(proxy.patch("/rollouts/r1", {"step_rewards": {step: 1}}) for step in steps))

    assert dict.fromkeys(steps, 1.0) == (await proxy.get("/rollouts/r1")).json["step_rewards"]


ABSURD = ["NaN", "-Infinity", "1e400", "1e39", "-3.5e38"]


@pytest.mark.parametrize(
    "body",
    [
        '{"reward": %s}',
        '{"step_rewards": {"STEP": %s}}',
        '{"step_rewards": {"STEP": [%s]}}',
        '{"advantages": %s}',
        '{"advantages": [0.5, %s]}',
        '{"advantages": {"STEP": %s}}',
        '{"advantages": {"STEP": [0.5, %s]}}',
        '{"advantages": {"STEP": {"deeper": [%s]}}}',
    ],
)
async def test_a_reward_or_advantage_outside_float32_is_422_and_changes_nothing(proxy, body):
    step_id = (await proxy.chat("r1")).step_id
    before = (await proxy.get("/rollouts/r1")).json
    for number in ABSURD:
        refused = await proxy.call("PATCH", "/rollouts/r1", data=(body % number).replace("STEP", step_id))
        after = (await proxy.get("/rollouts/r1")).json
        assert (refused.status, after) == (422, before), refused.text


async def test_a_finish_with_a_reward_outside_float32_is_422(proxy):
    """The rollout remains open."""
    await proxy.chat("r1")
    for number in ABSURD:
        refused = await proxy.call("POST", "/rollouts/r1/finish", data=f'{{"status": "completed", "reward": {number}}}')
        assert (refused.status, (await proxy.get("/rollouts/r1")).json["status"]) == (422, "open"), number


async def test_a_reward_within_float32_is_stored_exactly(proxy):
    await proxy.chat("r1")
    for number in (3.4028234663852886e38, -3.4028234663852886e38, 0, 2**63, 1e-310):
        patched = await proxy.patch("/rollouts/r1", {"reward": number, "advantages": {"s": [number]}})
        assert (patched.status, patched.json["reward"], patched.json["advantages"]["s"]) == (200, number, [number])


async def test_the_error_of_many_invalid_rewards_is_short(proxy):
    unknown = await proxy.call("PATCH", "/rollouts/r1", data='{"advantages": [' + ", ".join(["1e39"] * 10_000) + "]}")
    await proxy.chat("r1")
    invalid = await proxy.call("PATCH", "/rollouts/r1", data='{"advantages": [' + ", ".join(["1e39"] * 10_000) + "]}")

    assert (unknown.status, invalid.status) == (404, 422)
    assert len(invalid.text) < 2_000
