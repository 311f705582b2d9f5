"""How either client sends: what it asks again, what it raises, how it reads; and what only awaiting has."""

import asyncio
import inspect
import subprocess
import sys

import pytest
from aiohttp import web
from fakes import proxying

from tokentape import AsyncClient, Client, ClientError

ROLLOUT = {"rollout_id": "r1"}


@pytest.fixture
def pauses(monkeypatch):
    """Pauses are noted, and not made."""
    noted = []

    async def noting(seconds):
        noted.append(seconds)

    monkeypatch.setattr("tokentape.async_client.sleep", noting)
    monkeypatch.setattr("tokentape.sync_client.sleep", noted.append)
    return noted


def answers(engine, *told):
    """The server gives these answers, one a request; the last one for ever."""
    left = list(told)

    async def answering(request, body):
        status, headers, answer = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response(answer, status=status, headers=headers)

    engine.answering = answering


NO = {"error": {"message": "not now", "type": "overloaded", "code": "busy", "param": None}}


@pytest.mark.parametrize("status", [429, 503])
async def test_an_ask_is_made_again_after_retry_after(client_at, engine, pauses, status):
    """429 and 503: waited as long as the answer says, then asked again with the same body."""
    answers(engine, (status, {"Retry-After": "3"}, NO), (status, {}, NO), (200, {}, ROLLOUT))
    client = client_at(engine.url)
    answer = await client.open_rollout("r1", model="policy")
    await client.close()

    assert ROLLOUT == answer
    assert [3.0, 0.5] == pauses
    assert [{"rollout_id": "r1", "model": "policy"}] * 3 == engine.asked


async def test_the_last_refusal_is_raised(client_at, engine, pauses):
    """After so many attempts."""
    answers(engine, (503, {"Retry-After": "1"}, NO))
    client = client_at(engine.url, attempts=3)
    with pytest.raises(ClientError, match="503 busy: not now"):
        await client.rollout("r1")
    await client.close()

    assert [1.0, 1.0] == pauses
    assert 3 == len(engine.asked)


async def test_an_export_is_asked_again_before_its_first_row(client_at, engine, pauses):
    """As any other ask."""
    answers(engine, (503, {}, NO), (200, {}, {"row": 1}))
    client = client_at(engine.url)
    rows = await client.export()
    await client.close()

    assert [{"row": 1}] == rows
    assert [0.25] == pauses


async def test_what_was_refused_for_good_is_asked_once(client_at, engine, pauses):
    """And says what the proxy said."""
    answers(engine, (409, {}, NO))
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.open_rollout("r1")
    await client.close()

    assert (409, "overloaded", "busy", "not now") == (
        caught.value.status, caught.value.type, caught.value.code, caught.value.message,
    )  # fmt: skip
    assert ([], 1) == (pauses, len(engine.asked))


async def test_a_proxy_that_is_not_there_is_tried_again(client_at, unused_tcp_port, pauses):
    """It may be starting; in the end the error says which address it was."""
    client = client_at(f"http://127.0.0.1:{unused_tcp_port}/", attempts=3)
    with pytest.raises(ClientError, match=f"GET http://127.0.0.1:{unused_tcp_port}/rollouts/r1") as caught:
        await client.rollout("r1")
    await client.close()

    assert (None, "connection_error", "unreachable") == (caught.value.status, caught.value.type, caught.value.code)
    assert [0.25, 0.5] == pauses


async def test_an_ask_whose_answer_broke_off_is_not_made_again(client_at, engine, pauses):
    """It may have been carried out."""

    async def answering(request, body):
        request.transport.close()
        return web.Response()

    engine.answering = answering
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.rollout("r1")
    await client.close()

    assert "connection_lost" == caught.value.code
    assert ([], 1) == (pauses, len(engine.asked))


async def test_an_export_that_broke_off_is_no_whole_one(client_at, engine):
    """The rows so far, and then an error."""
    engine.streams([b'{"row": 1}\n'], then="die")
    client = client_at(engine.url)
    with pytest.raises(ClientError, match="connection lost"):
        await client.export()
    await client.close()


async def test_the_control_key_is_sent(client_at, simulated, store):
    """And without it the proxy refuses."""
    async with proxying(simulated, store, control={"api_keys": ["secret-key"]}) as served:
        knows, does_not = client_at(served.url, api_key="secret-key"), client_at(served.url)
        opened = await knows.open_rollout("r1")
        with pytest.raises(ClientError, match="401"):
            await does_not.rollout("r1")
        await knows.close()
        await does_not.close()

    assert "r1" == opened["rollout_id"]


async def test_rows_are_read_as_they_come(engine):
    """The first row is there before the last is sent; leaving early closes the connection."""
    engine.streams([b'{"row": 1}\n{"row"', b": 2}\n"], then="hang")
    async with AsyncClient(engine.url) as client:
        rows = client.export()
        assert [{"row": 1}, {"row": 2}] == [await anext(rows), await anext(rows)]
        await rows.aclose()
        await engine.aborted.wait()


async def test_asks_may_be_made_side_by_side(url):
    """One client, many openings."""
    async with AsyncClient(url) as client:
        opened = await asyncio.gather(*(client.open_rollout(f"r{number}") for number in range(20)))

    assert 20 == len({each["api_key"] for each in opened})


def test_both_clients_have_the_same_methods_and_arguments():
    """But for what lives while something else is awaited: batches, whose lease is kept alive, and ManagedServer."""

    def methods(of):
        return {
            name: str(inspect.signature(method).replace(return_annotation=inspect.Signature.empty))
            for name, method in inspect.getmembers(of, inspect.isfunction)
            if name[0] != "_" or name == "__init__"
        }

    assert {"batches", "managed_server"} == methods(AsyncClient).keys() - methods(Client).keys()
    assert methods(Client).items() <= methods(AsyncClient).items()


def test_importing_the_client_imports_nothing_of_the_server():
    """No aiohttp, redis or pydantic; httpx2 is enough."""
    program = (
        "import sys, tokentape, tokentape.async_client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " & {'aiohttp', 'openai', 'orjson', 'pydantic', 'redis', 'storage', 'typer', 'uvloop', 'zstandard'}))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "[]\n" == told.stdout


def test_a_name_that_is_not_there_is_said_so():
    """What is loaded when it is first named hides no misspelling."""
    import tokentape

    with pytest.raises(AttributeError, match="ManagedServers"):
        _ = tokentape.ManagedServers
