"""JSON from a running proxy's control API."""

import pytest
from aiohttp import web

from proxy.cli.api_client import ControlClient, rollout_path
from proxy.cli.export import Refused


@pytest.fixture
def client(http, address):
    return ControlClient(http, f"{address.url}/")


async def test_lists_are_read_page_by_page_up_to_the_limit(client, call_proxy):
    """Filters leave pages short: as many are asked for as it takes; the cursor says whether more follow."""
    for number in range(5):
        await call_proxy("POST", "/rollouts", {"rollout_id": f"r{number}", "group_id": "odd" if number % 2 else "even"})
    found, cursor = await client.list_items("rollouts", 2, group_id="even")
    assert ["r4", "r2"] == [each["rollout_id"] for each in found]
    assert cursor is not None
    found, cursor = await client.list_items("rollouts", 50, group_id="odd")
    assert (["r3", "r1"], None) == ([each["rollout_id"] for each in found], cursor)


async def test_steps_are_read_in_order_from_an_index_on(client, recorded):
    """All of them, or those from there."""
    assert [0, 1, 2] == [step["index"] async for step in client.steps("demo")]
    assert [2] == [step["index"] async for step in client.steps("demo", 2)]


async def test_a_refusal_is_its_sentence_and_its_status(client):
    """The control API's own words; the id is encoded, whatever is in it."""
    with pytest.raises(Refused, match="Rollout 'a/b c' not found.") as refused:
        await client.get(rollout_path("a/b c"))

    assert 404 == refused.value.status


async def test_what_answers_no_json_is_told(http, engine):
    """Something else listens there."""
    engine.fixed_responses = {}

    async def respond(request, body):
        return web.Response(text="<html>")

    engine.respond = respond
    with pytest.raises(OSError, match="check that it is the control API of a proxy"):
        await ControlClient(http, engine.url).get("/rollouts")


@pytest.mark.parametrize("knows", [True, False])
async def test_texts_are_asked_for_where_answers_tell_none(http, engine, knows):
    """Page by page, null where nobody knows; a proxy that has no such route is asked once, and nothing is made up."""
    engine.fixed_responses = {}

    async def respond(request, body):
        start = int(request.query["start"]) - 3  # a row is its prompt first
        assert "1" == request.query["choice"]
        if not knows:
            return web.json_response({"error": {"message": "there is no such thing here"}}, status=404)
        return web.json_response({"texts": [f"t{start}", None]})

    engine.respond = respond
    choices = [{"index": 1, "prompt": 0, "ids": [5, 6, 7, 8]}]
    told = {"choices": [{"index": 1, "logprobs": {"tokens": ["a", "b", "c", "d"]}}]}
    steps = [
        {"rollout_id": "r", "step_id": step_id, "prompt_ids": [1, 2, 3], "choices": choices, "response": response}
        for step_id, response in (("s1", told), ("s2", None), ("s3", {}))
    ]
    texts = await ControlClient(http, engine.url).texts(steps)

    sought = ["t0", None, "t2", None]
    assert ({("s2", 0): sought, ("s3", 0): sought} if knows else {}) == texts
    assert (4 if knows else 1) == len(engine.requests)
