"""`GET /search`: rollouts that have a text in a prompt, a reply or an error."""

import pytest

from proxy.api.control import rollouts
from storage.types import StepWrite


@pytest.fixture
async def recorded(proxy):
    """Rollouts `r0` to `r39`. Every tenth has another prompt, and the newest of these is finished."""
    for number in range(40):
        content = f"The needle {number}" if number % 10 == 0 else "Hello"
        body = {"model": "policy", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        assert (await proxy.post(f"/rollouts/r{number}/v1/chat/completions", body)).status == 200
    await proxy.finish("r30", reward=1)
    return proxy


def names(found):
    return [rollout["rollout_id"] for rollout in found.json["rollouts"]]


async def test_rollouts_with_the_text_are_found_newest_first(recorded):
    found = await recorded.get("/search?q=NEEDLE")
    (match,) = found.json["rollouts"][0]["matches"]

    assert names(found) == ["r30", "r20", "r10", "r0"]
    assert tuple(match[name] for name in ("place", "role", "before", "text", "after")) == (
        "prompt",
        "user",
        "The ",
        "needle",
        " 30",
    )
    assert (found.json["searched"]["rollouts"], found.json["searched"]["steps"], found.json["cursor"]) == (40, 40, None)


@pytest.mark.parametrize(("query", "expected"), [("status=completed", ["r30"]), ("group_id=g", [])])
async def test_the_search_has_the_filters_of_the_list(recorded, query, expected):
    assert names(await recorded.get(f"/search?q=needle&{query}")) == expected


async def test_a_response_ends_after_some_time_and_its_cursor_continues_it(recorded, monkeypatch):
    """Its `searched` has what it read."""
    monkeypatch.setattr(rollouts, "_BUDGET_S", 0)
    cursor, pages = "", []
    while cursor is not None:
        page = await recorded.get(f"/search?q=needle{cursor and f'&cursor={cursor}'}")
        pages.append((page.json["searched"]["rollouts"], names(page)))
        cursor = page.json["cursor"]

    assert [searched for searched, _ in pages] == [16, 16, 8]
    assert [name for _, found in pages for name in found] == ["r30", "r20", "r10", "r0"]


async def test_an_unreadable_rollout_is_counted(recorded, store):
    stored = await store.get("r30")
    await store.append(StepWrite("r30", stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)
    found = await recorded.get("/search?q=needle")

    assert (names(found), found.json["searched"]["unreadable"]) == (["r20", "r10", "r0"], 1)


@pytest.mark.parametrize(
    "query", ["", "q=", "q=%20", f"q={'x' * 501}", "q=a&limit=0", "q=a&limit=201", "q=a&cursor=%00", "text=a"]
)
async def test_wrong_parameters_are_refused(proxy, query):
    assert (await proxy.get(f"/search?{query}")).status == 400
