"""Groups: opening, listing, reading, exporting, deleting."""

import asyncio

import pytest
from openai import AsyncOpenAI
from tests.support.fakes import settings_for
from tests.support.session import names_in

from proxy.api.control import groups
from proxy.server.listener import running

OPENING = {"group_id": "a/b {c}", "size": 3, "rollout": {"metadata": {"task": 7}, "limits": {"max_steps": 3}}}
PATH = "/groups/a%2Fb%20%7Bc%7D"


async def test_opening_a_group_opens_all_its_rollouts(proxy):
    """They have the same terms, and a base URL and a key each."""
    opened = await proxy.post("/groups", OPENING)
    rollouts = opened.json["rollouts"]
    agent = AsyncOpenAI(base_url=rollouts[1]["base_url"], api_key=rollouts[1]["api_key"])
    await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    await agent.close()
    group = (await proxy.get(PATH)).json

    assert (opened.status, len({rollout["rollout_id"] for rollout in rollouts})) == (201, 3)
    assert [(rollout["metadata"], rollout["group_id"], rollout["limits"]["max_steps"]) for rollout in rollouts] == [
        ({"task": 7}, "a/b {c}", 3)
    ] * 3
    assert [rollout["steps"] for rollout in group["rollouts"]] == [0, 1, 0]
    assert [rollout["rollout_id"] for rollout in rollouts] == [rollout["rollout_id"] for rollout in group["rollouts"]]
    counts = [tuple(rollout[name] for name in ("steps", "exact", "flagged", "drift")) for rollout in group["rollouts"]]
    assert counts == [(0, 0, 0, None), (1, 1, 0, None), (0, 0, 0, None)]
    assert [rollout["sampled_tokens"] > 0 for rollout in group["rollouts"]] == [False, True, False]
    assert tuple(group[name] for name in ("status", "size", "members", "finished", "rewards")) == (
        "open",
        3,
        3,
        0,
        [None] * 3,
    )


async def test_all_rollouts_of_a_group_have_its_continuation_mode(proxy):
    opened = await proxy.post("/groups", {"group_id": "g1", "size": 2, "rollout": {"continuation": False}})
    shown = [(await proxy.get(f"/rollouts/{rollout['rollout_id']}")).json for rollout in opened.json["rollouts"]]

    assert [rollout["continuation"] for rollout in [*opened.json["rollouts"], *shown]] == ["off"] * 4


async def test_terms_that_are_too_large_for_all_rollouts_are_413(proxy):
    """They are written once per rollout; nothing is opened."""
    refused = await proxy.post("/groups", {"size": 64, "rollout": {"metadata": {"x": "y" * 2**17}}})
    accepted = await proxy.post("/groups", {"size": 4, "rollout": {"metadata": {"x": "y" * 2**17}}})

    assert (refused.status, refused.json["error"]["code"]) == (413, "request_too_large")
    assert "64 rollouts" in refused.json["error"]["message"]
    assert accepted.status == 201
    assert len((await proxy.get("/rollouts")).json["rollouts"]) == 4


async def test_opening_a_group_is_idempotent(proxy):
    """Concurrent and repeated requests return the same rollouts and keys; another body is 409."""
    first, *others = await asyncio.gather(*(proxy.post("/groups", OPENING) for _ in range(5)))
    other = await proxy.post("/groups", {**OPENING, "size": 2})

    assert sorted([first.status, *(repeated.status for repeated in others)]) == [200, 200, 200, 200, 201]
    assert all(repeated.json == first.json for repeated in others)
    assert (other.status, other.json["error"]["param"]) == (409, "group_id")
    assert len((await proxy.get("/rollouts")).json["rollouts"]) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"size": 0},
        {"size": 1001},
        {"size": "4"},
        {},
        {"size": 2, "rollout": {"rollout_id": "x"}},
        {"size": 2, "group_id": "a\nb"},
        {"size": 2, "rollout": {"limits": {"max_steps": -1}}},
    ],
)
async def test_an_invalid_group_is_422_and_nothing_is_opened(proxy, body):
    response = await proxy.post("/groups", body)

    assert response.status == 422
    assert (
        (await proxy.get("/groups")).json["groups"],
        (await proxy.get("/rollouts")).json["rollouts"],
    ) == ([], [])


async def test_a_group_is_complete_when_all_its_rollouts_are_finished(proxy):
    """The status with which they are finished does not matter."""
    members = await proxy.group("g", None, None, None, finish=False)
    statuses = []
    for member, status in zip(members, ("completed", "failed", "truncated"), strict=True):
        statuses.append(await proxy.status("g"))
        await proxy.post(f"/rollouts/{member}/finish", {"status": status})
    group = (await proxy.get("/groups/g")).json

    assert statuses == ["open"] * 3
    assert (group["status"], group["finished"]) == ("complete", 3)
    assert group["complete_ms"] >= group["created_ms"]


async def test_concurrent_finishes_complete_a_group_once(proxy):
    members = await proxy.group("g", *[None] * 8, finish=False)
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members * 2))
    claimed = await proxy.claim(groups=5)

    assert names_in(claimed) == ["g"]
    assert (
        'tokentape_group_events_total{event="complete",policy="default"} 1.0'
        in (await proxy.get("/metrics")).text.decode()
    )


async def test_a_group_created_by_calls_has_no_size_and_is_never_complete(proxy):
    """Its members are the rollouts that named it; it can be exported."""
    for name in ("r1", "r2"):
        await proxy.call(
            "POST", f"/rollouts/{name}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]}, headers={"X-Rollout-Group": "g"},
        )  # fmt: skip
        await proxy.finish(name, reward=1)
    await proxy.post("/rollouts", {"rollout_id": "r3", "group_id": "g"})
    group = (await proxy.get("/groups/g")).json
    rows = (await proxy.get("/groups/g/export")).json

    assert (
        group["size"], group["status"], [rollout["rollout_id"] for rollout in group["rollouts"]]
    ) == (None, "open", ["r1", "r2", "r3"])  # fmt: skip
    assert [row["rollout_id"] for row in rows] == ["r1", "r2"]


async def test_a_rollout_cannot_join_a_group_that_was_opened_with_its_rollouts(proxy):
    """The call and the opening are 409, and no rollout is created."""
    await proxy.group("g", None)
    call = await proxy.call(
        "POST", "/rollouts/x/v1/chat/completions", json={"messages": []}, headers={"X-Rollout-Group": "g"}
    )
    opening = await proxy.post("/rollouts", {"rollout_id": "y", "group_id": "g"})

    assert (call.status, opening.status) == (409, 409)
    assert [(await proxy.get(f"/rollouts/{name}")).status for name in "xy"] == [404, 404]


async def test_groups_are_listed_newest_first_in_pages_and_filtered_by_status(proxy):
    """A filter may shorten a page."""
    for name in ("g1", "g2", "g3"):
        await proxy.group(name, 1, finish=name != "g2")
    listed = (await proxy.get("/groups?limit=2")).json
    following = (await proxy.get(f"/groups?limit=2&cursor={listed['cursor']}")).json
    complete = (await proxy.get("/groups?status=complete")).json

    assert [group["group_id"] for group in [*listed["groups"], *following["groups"]]] == ["g3", "g2", "g1"]
    assert following["cursor"] is None
    assert names_in(complete) == ["g3", "g1"]
    assert [(await proxy.get(f"/groups?{query}")).status for query in ("status=closed", "cursor=x", "groupid=1")] == [
        400,
        400,
        400,
    ]


async def test_pages_of_groups_are_stable_under_concurrent_openings(proxy):
    for number in range(12):
        await proxy.post("/groups", {"group_id": f"old{number}", "size": 1})
    listed, cursor = [], ""
    while cursor is not None:
        page = (await proxy.get(f"/groups?limit=5{cursor and '&cursor='}{cursor}")).json
        listed += names_in(page)
        cursor = page["cursor"]
        await proxy.post("/groups", {"size": 1})

    assert sorted(f"old{number}" for number in range(12)) == sorted(name for name in listed if name.startswith("old"))
    assert len(listed) == len(set(listed))


async def test_deleting_a_group_deletes_its_rollouts(proxy):
    """A repeated DELETE is 204, and the group is never claimed."""
    members = await proxy.group("g", 1, 1)
    deleted = [(await proxy.delete("/groups/g")).status for _ in range(2)]

    assert deleted == [204, 204]
    assert (await proxy.get("/groups/g")).status == 404
    assert [(await proxy.get(f"/rollouts/{member}")).status for member in members] == [404, 404]
    assert None is (await proxy.claim())["batch_id"]


async def test_a_group_is_exported_as_the_formats_group_object(proxy):
    """Containers other than JSON have its rows."""
    members = await proxy.group("g", 1, 0)
    rows = (await proxy.get("/groups/g/export")).json
    scored = (await proxy.get("/groups/g/export?format=scored_data")).json
    lines = (await proxy.get("/groups/g/export?container=ndjson")).text.splitlines()
    reported = (await proxy.get("/groups/g/export?report=true")).json

    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert (len(scored["tokens"]), scored["scores"]) == (2, [1.0, 0.0])
    assert [row["token_ids"] for row in rows] == scored["tokens"]
    assert len(lines) == 2
    assert (reported["report"]["skipped"], reported["report"]["why"], reported["group"]) == ([], None, rows)
    assert members == [row["rollout_id"] for row in reported["report"]["rows"]]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("none", [None] * 3),
        ("given", [5, None, None]),
        ("grpo", [2**0.5, -(0.5**0.5), -(0.5**0.5)]),
        ("rloo", [1, -0.5, -0.5]),
    ],
)
async def test_advantages_are_set_values_estimated_or_omitted(proxy, advantage, expected):
    first, *_ = await proxy.group("g", 1, 0, 0)
    await proxy.patch(f"/rollouts/{first}", {"advantages": 5})
    rows = (await proxy.get(f"/groups/g/export?advantage={advantage}")).json

    assert [None if value is None else pytest.approx(value) for value in expected] == [
        row["advantages"] for row in rows
    ]


async def test_equal_rewards_have_advantage_0(proxy):
    await proxy.group("g", 0.5, 0.5)
    rows = (await proxy.get("/groups/g/export?advantage=grpo")).json

    assert [row["advantages"] for row in rows] == [0.0, 0.0]


async def test_with_members_all_an_export_is_409_for_a_rollout_without_a_required_reward(proxy):
    """The error names the rollout."""
    _, unrewarded = await proxy.group("g", 1, None)
    response = await proxy.get("/groups/g/export?format=scored_data&advantage=grpo&members=all")

    assert response.status == 409
    assert unrewarded in response.json["error"]["message"]


async def test_a_group_with_equal_rewards_or_too_few_rows_exports_no_rows_and_the_reason(proxy):
    await proxy.group("g", 1, 1)
    few = await proxy.get("/groups/g/export?min_group=3")
    equal = await proxy.get("/groups/g/export?only_mixed=true&container=ndjson")

    assert (few.json, "min_group is 3" in few.headers["X-Export-Skipped"]) == ([], True)
    assert (equal.text, "have the same reward" in equal.headers["X-Export-Skipped"]) == (b"", True)


async def test_an_invalid_condition_is_400_and_named(proxy):
    await proxy.group("g", 1, 1)
    for query in ("members=some", "members=", "min_group=0", "only_mixed=1", "rewarded=true", "row_weight=half"):
        response = await proxy.get(f"/groups/g/export?{query}")
        assert (400, query.partition("=")[0]) == (response.status, response.json["error"]["param"]), query


async def test_an_estimated_advantage_is_400_for_a_single_rollout(proxy):
    """The error lists the accepted values."""
    await proxy.chat("r1")
    response = await proxy.get("/rollouts/r1/export?advantage=grpo")

    assert response.status == 400
    assert "given, none" in response.json["error"]["message"]


async def test_an_unknown_group_is_404(proxy):
    assert [(await proxy.get(f"/groups/none{rest}")).status for rest in ("", "/export")] == [404, 404]


async def test_a_group_is_the_same_at_every_process(proxy, store):
    members = await proxy.group("g", None, finish=False)
    async with running(settings_for(None), store) as other:
        async with proxy.http.post(
            f"{other.url}/rollouts/{members[0]}/finish", json={"status": "completed"}
        ) as response:
            assert response.status == 200
        async with proxy.http.get(f"{other.url}/groups/g") as response:
            elsewhere = await response.json()

    assert (await proxy.get("/groups/g")).json == elsewhere
    assert elsewhere["status"] == "complete"


async def test_a_list_has_totals_on_request(proxy, monkeypatch):
    """Of the rollouts of each group, which are read up to a bound; null for the other groups."""
    for name, rewards in (("first", (0.0, 1.0)), ("second", (None, None))):
        opened = (await proxy.post("/groups", {"group_id": name, "size": 2})).json
        for rollout, reward in zip(opened["rollouts"], rewards, strict=True):
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            await proxy.post(f"/rollouts/{rollout['rollout_id']}/v1/chat/completions", body)
            await proxy.post(f"/rollouts/{rollout['rollout_id']}/finish", {"status": "completed", "reward": reward})
    second, first = (await proxy.get("/groups?totals=true")).json["groups"]
    shown = (await proxy.get("/groups/first")).json["rollouts"]

    assert (first["totals"]["reward"], second["totals"]["reward"]) == (0.5, None)
    for name in ("steps", "exact", "flagged", "error", "sampled_tokens"):
        assert sum(rollout[name] for rollout in shown) == first["totals"][name]
    assert first["totals"]["steps"] == 2
    assert "totals" not in (await proxy.get("/groups")).json["groups"][0]
    monkeypatch.setattr(groups, "_MAX_ROLLOUTS", 3)
    assert [
        None if group["totals"] is None else group["totals"]["steps"]
        for group in (await proxy.get("/groups?totals=true")).json["groups"]
    ] == [2, None]
