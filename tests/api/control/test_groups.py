"""Groups: opened with their rollouts, listed, looked at, exported, deleted."""

import asyncio

import pytest
from fakes import settings_for
from openai import AsyncOpenAI

from proxy.server.listener import running

OPENING = {"group_id": "a/b {c}", "size": 3, "rollout": {"metadata": {"task": 7}, "limits": {"max_steps": 3}}}
PATH = "/groups/a%2Fb%20%7Bc%7D"


async def test_a_group_is_opened_with_all_its_rollouts(proxy):
    """Each on the same terms, with a base URL and a key of its own that an agent can use."""
    opened = await proxy.post("/groups", OPENING)
    rollouts = opened.json["rollouts"]
    agent = AsyncOpenAI(base_url=rollouts[1]["base_url"], api_key=rollouts[1]["api_key"])
    await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    await agent.close()
    group = (await proxy.get(PATH)).json

    assert (201, 3) == (opened.status, len({rollout["rollout_id"] for rollout in rollouts}))
    assert [({"task": 7}, "a/b {c}", 3)] * 3 == [
        (rollout["metadata"], rollout["group_id"], rollout["limits"]["max_steps"]) for rollout in rollouts
    ]
    assert [0, 1, 0] == [rollout["steps"] for rollout in group["rollouts"]]
    assert [rollout["rollout_id"] for rollout in rollouts] == [one["rollout_id"] for one in group["rollouts"]]
    counts = [tuple(one[name] for name in ("steps", "exact", "flagged", "drift")) for one in group["rollouts"]]
    assert [(0, 0, 0, None), (1, 1, 0, None), (0, 0, 0, None)] == counts
    assert [False, True, False] == [one["sampled_tokens"] > 0 for one in group["rollouts"]]
    assert ("open", 3, 3, 0, [None] * 3) == tuple(
        group[name] for name in ("status", "size", "members", "finished", "rewards")
    )


async def test_terms_that_are_too_much_for_all_rollouts_are_refused(proxy):
    """One request writes them for each rollout: many times a megabyte would hold up everybody. Nothing is opened."""
    refused = await proxy.post("/groups", {"size": 64, "rollout": {"metadata": {"x": "y" * 2**17}}})
    taken = await proxy.post("/groups", {"size": 4, "rollout": {"metadata": {"x": "y" * 2**17}}})

    assert (413, "request_too_large") == (refused.status, refused.json["error"]["code"])
    assert "64 rollouts" in refused.json["error"]["message"]
    assert 201 == taken.status
    assert 4 == len((await proxy.get("/rollouts")).json["rollouts"])


async def test_opening_again_with_the_same_body_is_the_same_answer(proxy):
    """The rollouts and their keys included, also when many ask at once; with another body it is 409."""
    first, *others = await asyncio.gather(*(proxy.post("/groups", OPENING) for _ in range(5)))
    other = await proxy.post("/groups", {**OPENING, "size": 2})

    assert [200, 200, 200, 200, 201] == sorted([first.status, *(again.status for again in others)])
    assert all(again.json == first.json for again in others)
    assert (409, "group_id") == (other.status, other.json["error"]["param"])
    assert 3 == len((await proxy.get("/rollouts")).json["rollouts"])


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
async def test_a_group_that_cannot_be_is_refused_and_nothing_is_made(proxy, body):
    """422, and the field is named."""
    response = await proxy.post("/groups", body)

    assert 422 == response.status
    assert ([], []) == (
        (await proxy.get("/groups")).json["groups"],
        (await proxy.get("/rollouts")).json["rollouts"],
    )


async def test_a_group_is_complete_when_all_its_rollouts_are_finished(proxy):
    """However they are finished, and not before."""
    members = await proxy.group("g", None, None, None, finish=False)
    seen = []
    for member, status in zip(members, ("completed", "failed", "truncated"), strict=True):
        seen.append(await proxy.status("g"))
        await proxy.post(f"/rollouts/{member}/finish", {"status": status})
    group = (await proxy.get("/groups/g")).json

    assert ["open"] * 3 == seen
    assert ("complete", 3) == (group["status"], group["finished"])
    assert group["complete_ms"] >= group["created_ms"]


async def test_a_group_that_finishes_all_at_once_is_complete_once(proxy):
    """Through two processes over one store: one offers it, once."""
    members = await proxy.group("g", *[None] * 8, finish=False)
    await asyncio.gather(*(proxy.finish(member, reward=1) for member in members * 2))
    claimed = await proxy.claim(groups=5)

    assert ["g"] == [group["group_id"] for group in claimed["groups"]]
    assert 'tokentape_group_events_total{event="complete"} 1.0' in (await proxy.get("/metrics")).text.decode()


async def test_a_group_that_calls_brought_into_being_has_no_size(proxy):
    """Its members are those that named it; it is exported, but never complete by itself."""
    for name in ("r1", "r2"):
        await proxy.call(
            "POST", f"/rollouts/{name}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]}, headers={"X-Rollout-Group": "g"},
        )  # fmt: skip
        await proxy.finish(name, reward=1)
    await proxy.post("/rollouts", {"rollout_id": "r3", "group_id": "g"})
    group = (await proxy.get("/groups/g")).json
    rows = (await proxy.get("/groups/g/export")).json

    assert (None, "open", ["r1", "r2", "r3"]) == (
        group["size"], group["status"], [rollout["rollout_id"] for rollout in group["rollouts"]]
    )  # fmt: skip
    assert ["r1", "r2"] == [row["rollout_id"] for row in rows]


async def test_no_other_rollout_joins_a_group_that_was_opened_with_its_own(proxy):
    """409, by a call and by an opening, and no such rollout is made."""
    await proxy.group("g", None)
    call = await proxy.call(
        "POST", "/rollouts/x/v1/chat/completions", json={"messages": []}, headers={"X-Rollout-Group": "g"}
    )
    opening = await proxy.post("/rollouts", {"rollout_id": "y", "group_id": "g"})

    assert (409, 409) == (call.status, opening.status)
    assert [404, 404] == [(await proxy.get(f"/rollouts/{name}")).status for name in "xy"]


async def test_groups_are_listed_newest_first_by_status(proxy):
    """Cursor-paged; a filter may leave a page short."""
    for name in ("g1", "g2", "g3"):
        await proxy.group(name, 1, finish=name != "g2")
    listed = (await proxy.get("/groups?limit=2")).json
    following = (await proxy.get(f"/groups?limit=2&cursor={listed['cursor']}")).json
    complete = (await proxy.get("/groups?status=complete")).json

    assert ["g3", "g2", "g1"] == [group["group_id"] for group in [*listed["groups"], *following["groups"]]]
    assert following["cursor"] is None
    assert ["g3", "g1"] == [group["group_id"] for group in complete["groups"]]
    assert [400, 400, 400] == [
        (await proxy.get(f"/groups?{query}")).status for query in ("status=closed", "cursor=x", "groupid=1")
    ]


async def test_pages_of_groups_neither_repeat_nor_skip_while_others_are_made(proxy):
    """A cursor is stable under concurrent writes."""
    for number in range(12):
        await proxy.post("/groups", {"group_id": f"old{number}", "size": 1})
    seen, cursor = [], ""
    while cursor is not None:
        page = (await proxy.get(f"/groups?limit=5{cursor and '&cursor='}{cursor}")).json
        seen += [group["group_id"] for group in page["groups"]]
        cursor = page["cursor"]
        await proxy.post("/groups", {"size": 1})

    assert sorted(f"old{number}" for number in range(12)) == sorted(name for name in seen if name.startswith("old"))
    assert len(seen) == len(set(seen))


async def test_a_group_is_deleted_with_its_rollouts(proxy):
    """204, also the second time; and it is never claimed."""
    members = await proxy.group("g", 1, 1)
    deleted = [(await proxy.delete("/groups/g")).status for _ in range(2)]

    assert [204, 204] == deleted
    assert 404 == (await proxy.get("/groups/g")).status
    assert [404, 404] == [(await proxy.get(f"/rollouts/{member}")).status for member in members]
    assert None is (await proxy.claim())["batch_id"]


async def test_a_group_is_exported_as_the_trainer_takes_it(proxy):
    """In JSON the format's own object for a group; in other containers its rows."""
    members = await proxy.group("g", 1, 0)
    rows = (await proxy.get("/groups/g/export")).json
    scored = (await proxy.get("/groups/g/export?format=scored_data")).json
    lines = (await proxy.get("/groups/g/export?container=ndjson")).text.splitlines()
    reported = (await proxy.get("/groups/g/export?report=true")).json

    assert [1.0, 0.0] == [row["reward"] for row in rows]
    assert (2, [1.0, 0.0]) == (len(scored["tokens"]), scored["scores"])
    assert [row["token_ids"] for row in rows] == scored["tokens"]
    assert 2 == len(lines)
    assert ([], None, rows) == (reported["report"]["skipped"], reported["report"]["why"], reported["group"])
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
async def test_advantages_are_given_estimated_or_left_out(proxy, advantage, expected):
    """By the rewards of the group."""
    first, *_ = await proxy.group("g", 1, 0, 0)
    await proxy.patch(f"/rollouts/{first}", {"advantages": 5})
    rows = (await proxy.get(f"/groups/g/export?advantage={advantage}")).json

    assert [None if value is None else pytest.approx(value) for value in expected] == [
        row["advantages"] for row in rows
    ]


async def test_rollouts_that_are_equally_good_have_no_advantage(proxy):
    """A group without a difference gives zeros."""
    await proxy.group("g", 0.5, 0.5)
    rows = (await proxy.get("/groups/g/export?advantage=grpo")).json

    assert [0.0, 0.0] == [row["advantages"] for row in rows]


async def test_a_missing_reward_is_not_made_up(proxy):
    """A format that must have the advantage of a rollout without a reward is 409, and names the rollout."""
    _, bare = await proxy.group("g", 1, None)
    response = await proxy.get("/groups/g/export?format=scored_data&advantage=grpo")

    assert 409 == response.status
    assert bare in response.json["error"]["message"]


async def test_a_group_that_is_not_worth_training_gives_nothing_and_says_why(proxy):
    """Too few rollouts with rows, or rewards that are all equal."""
    await proxy.group("g", 1, 1)
    few = await proxy.get("/groups/g/export?min_group=3")
    equal = await proxy.get("/groups/g/export?only_mixed=true&container=ndjson")

    assert ([], True) == (few.json, "min_group is 3" in few.headers["X-Export-Skipped"])
    assert (b"", True) == (equal.text, "have the same reward" in equal.headers["X-Export-Skipped"])


async def test_an_estimate_needs_a_group(proxy):
    """An export of rollouts one by one refuses it, naming what it takes."""
    await proxy.chat("r1")
    response = await proxy.get("/rollouts/r1/export?advantage=grpo")

    assert 400 == response.status
    assert "given, none" in response.json["error"]["message"]


async def test_a_group_that_is_not_there_is_404(proxy):
    """Looked at or exported."""
    assert [404, 404] == [(await proxy.get(f"/groups/none{rest}")).status for rest in ("", "/export")]


async def test_a_group_is_the_same_at_every_process_that_shares_the_store(proxy, store):
    """Opened at one, finished at another, complete at both."""
    members = await proxy.group("g", None, finish=False)
    async with running(settings_for(None), store) as other:
        async with proxy.http.post(
            f"{other.url}/rollouts/{members[0]}/finish", json={"status": "completed"}
        ) as response:
            assert 200 == response.status
        async with proxy.http.get(f"{other.url}/groups/g") as response:
            elsewhere = await response.json()

    assert (await proxy.get("/groups/g")).json == elsewhere
    assert "complete" == elsewhere["status"]
