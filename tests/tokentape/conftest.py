"""The two clients before a real proxy and the simulator, and both made to look alike."""

import asyncio
import inspect
from types import SimpleNamespace

import openai
import pytest
from fakes import proxying

from proxy.server import simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient, Client


@pytest.fixture
def shape():
    """Whose shapes the simulator speaks; a test may parametrize it."""
    return "vllm"


@pytest.fixture
async def simulated(shape):
    """The simulator, listening: its URL."""
    async with simulating("127.0.0.1:0", Options(shape=shape)) as url:
        yield url


@pytest.fixture
async def url(simulated, store):
    """A proxy before it, listening."""
    async with proxying(simulated, store) as served:
        yield served.url


@pytest.fixture(params=["awaiting", "blocking"])
def client_at(request):
    """Makes a client of the one kind, then of the other, whose methods are all awaited and whose iterators are lists."""
    make = AsyncClient if request.param == "awaiting" else Client
    return lambda url, **said: Alike(make(url, **said))


@pytest.fixture
async def client(client_at, url):
    """Either client before the proxy."""
    alike = client_at(url)
    yield alike
    await alike.close()


class Alike:
    """A client of either kind, awaited."""

    def __init__(self, client) -> None:
        self._client = client

    def __getattr__(self, name: str):
        method = getattr(self._client, name)

        async def called(*args, **named):
            if isinstance(self._client, AsyncClient):
                answer = method(*args, **named)
                return await answer if inspect.isawaitable(answer) else [each async for each in answer]
            return await asyncio.to_thread(lambda: _whole(method(*args, **named)))

        return called


def _whole(answer):
    return list(answer) if inspect.isgenerator(answer) else answer


async def talk(opened, *texts, **fields):
    """An agent with the official client, that says each text in turn: the ids of its steps."""
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
    """`talk`, as a fixture: test modules import nothing of this file."""
    return SimpleNamespace(talk=talk)
