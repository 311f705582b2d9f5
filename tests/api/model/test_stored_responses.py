"""Answers of Responses, served from recorded steps."""

import openai
import pytest
from fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options

ASKED = [{"role": "user", "content": f"turn {number}"} for number in range(5)]


@pytest.fixture
async def urls(store):
    """Two proxies that share a store, before one engine."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        proxying(engine, store) as one,
        proxying(engine, store) as other,
    ):
        yield one.url, other.url


@pytest.fixture
def clients(urls, sdk):
    """One client of each proxy; neither names a rollout."""
    return [sdk(openai.AsyncOpenAI, f"{url}/v1") for url in urls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_is_shown_as_it_was_given_at_any_process(clients, stream):
    """The same object, found by its id alone."""
    one, other = clients
    if stream:
        async with one.responses.stream(model="m", input="hi") as events:
            given = await events.get_final_response()
    else:
        given = await one.responses.create(model="m", input="hi")
    shown = await other.responses.retrieve(given.id)

    assert given.output_text == shown.output_text
    assert [item.id for item in given.output] == [item.id for item in shown.output]
    assert (given.id, given.created_at, given.usage, "completed") == (
        shown.id,
        shown.created_at,
        shown.usage,
        shown.status,
    )


async def test_what_was_asked_is_listed_in_pages(clients):
    """The latest first, or in order; `after` goes on, and nothing is told twice."""
    client = clients[0]
    given = await client.responses.create(model="m", input=ASKED)
    latest = [item async for item in client.responses.input_items.list(given.id, limit=2)]
    first = [item async for item in client.responses.input_items.list(given.id, limit=2, order="asc")]

    assert [one["content"] for one in ASKED] == [item.content[0].text for item in first]
    assert [item.id for item in reversed(first)] == [item.id for item in latest]


async def test_a_deleted_answer_is_gone_and_its_step_stays(clients, urls, http):
    """For agents; who trains on it sees the step as before."""
    one, other = clients
    given = await one.responses.create(model="m", input="hi")
    await other.responses.delete(given.id)
    for ask in (one.responses.retrieve, one.responses.delete, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await ask(given.id)
    async with http.get(f"{urls[0]}/rollouts") as response:
        (rollout,) = (await response.json())["rollouts"]

    assert 1 == rollout["counts"]["exact"]


async def test_what_is_not_to_be_stored_is_not_shown(clients):
    """`store: false` is a wish of the agent's; the step is recorded all the same."""
    given = await clients[0].responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(given.id)


@pytest.mark.parametrize("name", ["resp_1", "..", "%2e%2e", "resp_01ARZ3NDEKTSV4RRFFQ69G5FAV.!!", "x" * 2000])
async def test_other_names_are_404(clients, http, urls, name):
    """In OpenAI's shape; so are routes that are not served."""
    for method, path in (("GET", f"/v1/responses/{name}x"), ("POST", f"/v1/responses/{name}x/cancel")):
        async with http.request(method, f"{urls[0]}{path}") as response:
            assert 404 == response.status
            assert (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("query", "status"), [("?limit=0", 400), ("?limit=x", 400), ("?order=up", 400), ("?after=no", 404)]
)
async def test_a_page_that_cannot_be_is_refused(clients, http, urls, query, status):
    """Naming what is wrong with it."""
    given = await clients[0].responses.create(model="m", input=ASKED)
    async with http.get(f"{urls[0]}/v1/responses/{given.id}/input_items{query}") as response:
        assert status == response.status
        assert (await response.json())["error"]["param"] in query
