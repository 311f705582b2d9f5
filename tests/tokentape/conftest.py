"""Both clients with one interface, before a real proxy and the simulator."""

import asyncio
import inspect
from types import SimpleNamespace

import openai
import pytest
from tests.support.fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient, Client


@pytest.fixture
def shape():
    """The engine type that the simulator imitates; a test can parametrize it."""
    return "vllm"


@pytest.fixture
async def simulated(shape):
    """The URL of a running simulator."""
    async with simulating("127.0.0.1:0", Options(shape=shape)) as url:
        yield url


@pytest.fixture
async def url(simulated, store):
    """The URL of a running proxy before the simulator."""
    async with proxying(simulated, store) as served:
        yield served.url


@pytest.fixture(params=["async", "blocking"])
def client_at(request):
    """A function that makes either client for a URL; every method is a coroutine, every iterator a list."""
    make = AsyncClient if request.param == "async" else Client
    return lambda url, **options: EitherClient(make(url, **options))


@pytest.fixture
async def client(client_at, url):
    """Either client of the proxy."""
    either = client_at(url)
    yield either
    await either.close()


@pytest.fixture
def delays(monkeypatch):
    """The delays between attempts, which take no time."""
    recorded = []

    async def record(self, seconds):
        recorded.append(seconds)

    monkeypatch.setattr("tokentape.clients.AsyncTransport.sleep", record)
    monkeypatch.setattr("tokentape.clients.BlockingTransport.sleep", record)
    return recorded


class EitherClient:
    """A client of either kind with coroutines for methods."""

    def __init__(self, client) -> None:
        self._client = client

    def __getattr__(self, name: str):
        method = getattr(self._client, name)

        async def call(*args, **options):
            if isinstance(self._client, AsyncClient):
                result = method(*args, **options)
                return await result if inspect.isawaitable(result) else [item async for item in result]
            return await asyncio.to_thread(lambda: _list_if_iterator(method(*args, **options)))

        return call


def _list_if_iterator(result):
    return list(result) if inspect.isgenerator(result) else result


async def send_turns(opened, *texts, **fields):
    """Send each text as a turn of one conversation with the official client; return the step ids."""
    messages, steps = [], []
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0) as agent:
        for text in texts:
            messages.append({"role": "user", "content": text})
            raw = await agent.chat.completions.with_raw_response.create(
                model="policy", messages=messages, seed=len(messages), max_tokens=8, **fields
            )
            messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
            steps.append(raw.headers["X-Step-Id"])
    return steps


@pytest.fixture
def agent():
    """`send_turns` as a fixture: test modules cannot import from this file."""
    return SimpleNamespace(send_turns=send_turns)
