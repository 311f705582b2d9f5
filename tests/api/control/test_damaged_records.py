"""One damaged field: readers of many have all other rollouts and name this one; its own routes are 409 until it is deleted."""

import pytest
from tests.support.session import names_in

FIELDS = {
    "metadata": b"{{{",
    "reward": b"NaN",
    "status": b'"zzz"',
    "finished_ms": b"1e99",
    "osmosis": b"{}",
    "claimed_by": b"5",
}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
QUERY = "format=sequences&include=flagged&report=true"


async def damage(store, name, field, value):
    await store.update_if(name, {field: value}, expect={}, now_ms=1)


def named(entries, key="rollout_id"):
    return [entry[key] for entry in entries if "unreadable" in entry.get("why", "")]


@pytest.mark.parametrize("field", FIELDS)
async def test_readers_of_many_leave_a_damaged_rollout_out_and_name_it(proxy, store, field):
    """In the response, the log and a metric. After its deletion nothing of it is left."""
    await proxy.turns("good", 1)
    await proxy.turns("bad", 1)
    await damage(store, "bad", field, FIELDS[field])
    listed, exported = (await proxy.get("/rollouts")).json, (await proxy.get(f"/export?{QUERY}")).json
    found = (await proxy.get("/search?q=e")).json
    own = [await proxy.get(f"/rollouts/bad{path}") for path in ("", "/steps", "/tree", "/export")]
    call = await proxy.post("/rollouts/bad/v1/chat/completions", BODY)
    metrics = (await proxy.get("/metrics")).text.decode()
    await proxy.delete("/rollouts/bad")
    after = (await proxy.get("/rollouts")).json

    assert ([each["rollout_id"] for each in listed["rollouts"]], named(listed["unreadable"])) == (["good"], ["bad"])
    assert (
        [each["rollout_id"] for each in exported["rows"]],
        named(exported["report"]["skipped"]),
    ) == (["good"], ["bad"])
    assert (found["searched"]["unreadable"], named(found["unreadable"])) == (1, ["bad"])
    assert {(each.status, each.json["error"]["code"]) for each in own} == {(409, "damaged_record")}
    assert (call.status, field in call.json["error"]["message"]) == (409, False)
    assert 'tokentape_unreadable_total{entity="rollout"}' in metrics
    assert (len(after["rollouts"]), "unreadable" in after) == (1, False)


async def test_the_group_of_a_damaged_rollout_is_refused_and_shown_without_it(proxy, store):
    """Other groups are claimed; `/training` has both."""
    bad, *good = await proxy.group("g", 1, 0, 1)
    await proxy.group("whole", 1, 0)
    await damage(store, bad, "reward", b"NaN")
    shown = (await proxy.get("/groups/g")).json
    exported = (await proxy.get("/groups/g/export?report=true&min_group=1")).json
    every = await proxy.get("/groups/g/export?members=all")
    training = (await proxy.get("/training")).json
    claimed = await proxy.claim(groups=9)
    await proxy.delete(f"/rollouts/{bad}")
    later = await proxy.claim(groups=9)

    assert ([each["rollout_id"] for each in shown["rollouts"]], named(shown["unreadable"])) == (good, [bad])
    assert (
        [row["rollout_id"] for row in exported["group"]],
        named(exported["report"]["skipped"]),
    ) == (good, [bad])
    assert (every.status, every.json["error"]["code"]) == (409, "damaged_record")
    assert (len(training["groups"]), named(training["unreadable"])) == (2, [bad])
    assert names_in(claimed) == ["whole"]
    assert [(each["group_id"], each["code"]) for each in claimed["refused"]] == [("g", "damaged_record")]
    assert names_in(later) == ["g"]


@pytest.mark.parametrize(
    ("field", "value"), [("status", b'"zzz"'), ("members", b"{{{"), ("lease_ms", b'"x"'), ("size", b"-1")]
)
async def test_a_damaged_group_is_named_and_can_be_deleted_and_its_rollouts_are_read(proxy, store, field, value):
    names = await proxy.group("bad", 1, 0)
    await proxy.group("good", 1, 0)
    await store.groups.update_if("bad", {field: value}, expect={}, now_ms=1)
    listed, training = [(await proxy.get(path)).json for path in ("/groups", "/training")]
    own = [await proxy.get(f"/groups/bad{path}") for path in ("", "/export")]
    rewarded = await proxy.patch(f"/rollouts/{names[0]}", {"reward": 3})
    claimed = await proxy.claim(groups=9)
    deleted = await proxy.delete("/groups/bad")

    for found in (listed, training):
        assert (
            [each["group_id"] for each in found["groups"]],
            named(found["unreadable"], "group_id"),
        ) == (["good"], ["bad"])
    assert {(each.status, each.json["error"]["code"]) for each in own} == {(409, "damaged_record")}
    assert rewarded.status == 200
    assert "good" in names_in(claimed)
    assert not claimed["refused"] or [each["group_id"] for each in claimed["refused"]] == ["bad"]
    assert deleted.status == 204
    assert await store.groups.get("bad") is None


async def test_damaged_announcements_and_notes_stop_no_call_and_no_claim(proxy, store):
    """The values before stay in use; a note without a version counts as older than any."""
    await proxy.put("/policy", {"version": 4})
    await proxy.group("g", 1, 0)
    for name in ("policy", "pause", "engines", "abort"):
        await store.announcements.announce(name, b"{{{")
    called = await proxy.post("/rollouts/r1/v1/chat/completions", BODY)
    version = await proxy.get("/policy")
    claimed = await proxy.claim(groups=1)

    assert (called.status, version.status) == (200, 200)
    assert len(claimed["groups"]) == 1


async def test_a_damaged_attempt_is_sent_again(proxy, store):
    """The proxy sends it as if it knew no earlier attempt."""
    path, headers = "/rollouts/r1/v1/chat/completions", {"Idempotency-Key": "k"}
    await proxy.post(path, BODY, headers=headers)
    marks = [name for name in await store.marks("r1") if name.startswith("attempt:")]
    stored = await store.get("r1")
    await store.mark("r1", stored.incarnation, dict.fromkeys(marks, b"[5]"), now_ms=1)

    assert len(marks) == 1
    assert (await proxy.post(path, BODY, headers=headers)).status == 200
