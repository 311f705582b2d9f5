"""Responses that are served from recorded steps."""

import openai
import pytest
from tests.support.fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options

INPUT = [{"role": "user", "content": f"turn {number}"} for number in range(5)]


@pytest.fixture
async def urls(store):
    """The URLs of two proxies that share a store and an engine."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        proxying(engine, store) as first,
        proxying(engine, store) as second,
    ):
        yield first.url, second.url


@pytest.fixture
def clients(urls, sdk):
    """A client for each proxy, without a rollout ID."""
    return [sdk(openai.AsyncOpenAI, f"{url}/v1") for url in urls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_is_retrieved_by_its_id_at_any_process(clients, stream):
    """It equals the response that was created."""
    first, second = clients
    if stream:
        async with first.responses.stream(model="m", input="hi") as events:
            created = await events.get_final_response()
    else:
        created = await first.responses.create(model="m", input="hi")
    shown = await second.responses.retrieve(created.id)

    assert created.output_text == shown.output_text
    assert [item.id for item in created.output] == [item.id for item in shown.output]
    assert (created.id, created.created_at, created.usage, "completed") == (
        shown.id,
        shown.created_at,
        shown.usage,
        shown.status,
    )


async def test_input_items_are_listed_in_pages_in_both_orders(clients):
    client = clients[0]
    created = await client.responses.create(model="m", input=INPUT)
    latest = [item async for item in client.responses.input_items.list(created.id, limit=2)]
    first = [item async for item in client.responses.input_items.list(created.id, limit=2, order="asc")]

    assert [message["content"] for message in INPUT] == [item.content[0].text for item in first]
    assert [item.id for item in reversed(first)] == [item.id for item in latest]


async def test_a_deleted_response_is_404_and_its_step_remains(clients, urls, http):
    first, second = clients
    created = await first.responses.create(model="m", input="hi")
    await second.responses.delete(created.id)
    for method in (first.responses.retrieve, first.responses.delete, second.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await method(created.id)
    async with http.get(f"{urls[0]}/rollouts") as response:
        (rollout,) = (await response.json())["rollouts"]

    assert rollout["counts"]["exact"] == 1


async def test_a_response_with_store_false_is_404(clients):
    """Its step is recorded."""
    created = await clients[0].responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(created.id)


@pytest.mark.parametrize("name", ["resp_1", "..", "%2e%2e", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV.!!", "x" * 2000])
async def test_unknown_response_ids_and_routes_are_404_in_openais_error_shape(clients, http, urls, name):
    for method, path in (("GET", f"/v1/responses/{name}x"), ("POST", f"/v1/responses/{name}x/cancel")):
        async with http.request(method, f"{urls[0]}{path}") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("query", "status"), [("?limit=0", 400), ("?limit=x", 400), ("?order=up", 400), ("?after=no", 404)]
)
async def test_an_invalid_page_of_input_items_is_rejected_and_names_the_parameter(clients, http, urls, query, status):
    created = await clients[0].responses.create(model="m", input=INPUT)
    async with http.get(f"{urls[0]}/v1/responses/{created.id}/input_items{query}") as response:
        assert status == response.status
        assert (await response.json())["error"]["param"] in query
