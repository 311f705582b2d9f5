"""A session with a proxy: what agents and trainers request of it, in one line each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from tests.support.fakes import FakeEngine, proxying, settings_for
from tests.support.stored import stored_steps

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from proxy.trajectory.step import Step

CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def chat_path(rollout: str) -> str:
    return f"/rollouts/{rollout}/v1/chat/completions"


@pytest.fixture
def sections():
    """Settings of the proxy beyond the defaults; a test module may override this."""
    return {}


@pytest.fixture
def engine_options():
    """Options of the simulated engine; a test module may override this."""
    return Options()


@pytest.fixture
async def proxy(store, sections, engine_options):
    """A session with a proxy in front of the simulator."""
    async with (
        simulating("127.0.0.1:0", engine_options) as engine,
        aiohttp.ClientSession() as http,
        running(settings_for(engine, **sections), store) as served,
    ):
        yield Session(http, served.url)


class Session:
    """A client of both APIs. `get`, `post`, `put`, `patch`, `delete` return `status`, `json`, `text`, `kind` and `headers`."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def call(self, method: str, path: str, *, headers=None, **named) -> SimpleNamespace:
        async with self.http.request(method, self.url + path, headers=headers, **named) as response:
            text = await response.read()
            payload = await response.json() if text and response.content_type == "application/json" else None
            kind = response.content_type
            return SimpleNamespace(status=response.status, json=payload, text=text, kind=kind, headers=response.headers)

    async def get(self, path: str, **named):
        return await self.call("GET", path, **named)

    async def post(self, path: str, body=None, **named):
        return await self.call("POST", path, json=body, **named)

    async def patch(self, path: str, body=None):
        return await self.call("PATCH", path, json=body)

    async def delete(self, path: str):
        return await self.call("DELETE", path)

    async def chat(self, rollout: str, *messages, **fields):
        """Make one recorded call; return the reply's message and its step ID."""
        body = {
            "model": "policy",
            "messages": list(messages) or [{"role": "user", "content": "hi"}],
            "seed": 1,
            **fields,
        }
        response = await self.post(f"/rollouts/{rollout}/v1/chat/completions", body)
        assert response.status == 200, response.text
        return SimpleNamespace(message=response.json["choices"][0]["message"], step_id=response.headers["X-Step-Id"])

    async def put(self, path: str, body=None):
        return await self.call("PUT", path, json=body)

    async def open(self, rollout: str, **terms) -> None:
        """Open a rollout."""
        opened = await self.post("/rollouts", {"rollout_id": rollout, **terms})
        assert opened.status == 201, opened.text

    async def open_group(self, name: str, size: int = 1, **terms) -> list[str]:
        """Open a group; return the IDs of its rollouts."""
        opened = await self.post("/groups", {"group_id": name, "size": size, **terms})
        assert opened.status == 201, opened.text
        return [rollout["rollout_id"] for rollout in opened.json["rollouts"]]

    async def group(self, name: str, *rewards: float | None, finish: bool = True, **terms) -> list[str]:
        """Record a group with a finished rollout of one call for each reward; return the rollouts' IDs."""
        members = await self.open_group(name, len(rewards), rollout=terms)
        for member, reward in zip(members, rewards, strict=True):
            await self.chat(member)
            if finish:
                await self.finish(member, reward=reward)
        return members

    async def finish(self, rollout: str, **fields):
        fields = {name: value for name, value in fields.items() if value is not None}
        return await self.post(f"/rollouts/{rollout}/finish", {"status": "completed", **fields})

    async def claim(self, **fields):
        response = await self.post("/batches/claim", {"consumer": "trainer", **fields})
        assert response.status == 200, response.text
        return response.json

    async def ack(self, batch, **body):
        """Acknowledge a claimed batch."""
        return await self.post(f"/batches/{batch['batch_id']}/ack", body or None)

    async def release(self, batch):
        """Release a claimed batch."""
        return await self.post(f"/batches/{batch['batch_id']}/release")

    async def steps(self, rollout: str) -> list[dict]:
        """Return the first page of the steps of a rollout, as JSON."""
        return (await self.get(f"/rollouts/{rollout}/steps")).json["steps"]

    async def status(self, group: str) -> str:
        return (await self.get(f"/groups/{group}")).json["status"]

    async def turns(self, rollout: str, count: int) -> list[str]:
        """Make a conversation of this many turns; return the IDs of its steps."""
        messages, steps = [], []
        for turn in range(count):
            messages.append({"role": "user", "content": f"turn {turn}"})
            reply = await self.chat(rollout, *messages)
            messages.append({"role": "assistant", "content": reply.message["content"]})
            steps.append(reply.step_id)
        return steps


@asynccontextmanager
async def session_with(engine: FakeEngine | str | None, store, /, **sections) -> AsyncIterator[Session]:
    """Yield a session with a proxy in front of this engine, or of the endpoints that the sections name."""
    url = engine.url if isinstance(engine, FakeEngine) else engine
    async with aiohttp.ClientSession() as http, proxying(url, store, **sections) as served:
        yield Session(http, served.url)


async def one_call(
    engine: FakeEngine | str | None, store, /, body: object = BODY, path: str = CHAT, *, headers=None, **sections
) -> tuple[SimpleNamespace, Step]:
    """Make a call of rollout `r1` with a proxy of its own; return the response and the rollout's only step."""
    async with session_with(engine, store, **sections) as session:
        response = await session.post(path, body, headers=headers)
    (step,) = await stored_steps(store, "r1")
    return response, step


def names_in(claimed, kind: str = "groups") -> list[str]:
    """Return the IDs of the groups that a claim or a listing has: of `groups`, `dropped` or `refused`."""
    return [group["group_id"] for group in claimed[kind]]
