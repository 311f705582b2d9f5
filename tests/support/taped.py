"""Files of recorded rollouts, and a proxy that answers from one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.support.fakes import proxying, settings_for

from proxy.server.listener import running, simulating
from proxy.server.playback import with_tapes
from proxy.simulator.options import Options
from proxy.simulator.script import read_script

SYSTEM = {"role": "system", "content": "You tell the weather."}


class Agent:
    """An agent of three turns: it asks, runs the tool that the model calls, and thanks."""

    def __init__(self, http: aiohttp.ClientSession, base: str, **headers: str) -> None:
        self.http, self.base, self.headers = http, base, headers
        self.replies: list[dict] = []

    async def call(self, path: str, body: dict, **headers: str) -> tuple[int, dict]:
        """Send a call; return the status and the JSON."""
        async with self.http.post(f"{self.base}{path}", json=body, headers={**self.headers, **headers}) as response:
            return response.status, await response.json()

    async def run(self, city: str = "Oslo", model: str = "policy", today: str = "") -> list[int]:
        """Run to the end, or to the first error; return the statuses."""
        messages = [SYSTEM, {"role": "user", "content": f"What is the weather in {city}?{today}"}]
        statuses = []
        for turn in range(3):
            status, reply = await self.call(
                "/chat/completions", {"model": model, "messages": messages, "max_tokens": 40}
            )
            statuses.append(status)
            self.replies.append(reply)
            if status != 200:
                break
            message = reply["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
                for call in message.get("tool_calls") or ()
            ]
            messages = [*messages, message, *(results or [{"role": "user", "content": f"Thanks, {turn}"}])]
        return statuses


def script_of(folder: Path) -> Path:
    """Write a script for the simulator, in which the model calls a tool."""
    path = folder / "script.yaml"
    path.write_text(
        "- say: I look that up.\n  call: [{name: weather, arguments: {city: Oslo}}]\n"
        "- say: It rains.\n- say: You are welcome.\n- say: Bye.\n"
    )
    return path


@asynccontextmanager
async def recorder(store, folder: Path) -> AsyncIterator[str]:
    """Run a proxy in front of a scripted simulator; yield its URL."""
    options = Options(seed=1, script=read_script(script_of(folder)))
    async with simulating("127.0.0.1:0", options) as engine, proxying(engine, store) as served:
        yield served.url


async def record(store, folder: Path, *names: str) -> Path:
    """Record the agent in a rollout of each name; return the file of their steps."""
    path = folder / "tape.jsonl"
    async with recorder(store, folder) as url, aiohttp.ClientSession() as http:
        for name in names:
            agent = Agent(http, f"{url}/rollouts/{name}/v1")
            assert await agent.run("Oslo" if name == names[0] else name) == [200] * 3
        for name in names:
            async with http.get(f"{url}/rollouts/{name}/steps", headers={"Accept": "application/x-ndjson"}) as response:
                with path.open("ab") as file:
                    file.write(await response.read())
    return path


@asynccontextmanager
async def playing(path: Path, terms: dict | None = None, **sections) -> AsyncIterator[str]:
    """Run a proxy with the file in place of an engine; yield its URL. `terms`: what is ignored."""
    settings = settings_for(None, tape={"file": str(path), **(terms or {})}, **sections)
    async with with_tapes(settings, str(path)) as (complete, store), running(complete, store) as served:
        yield served.url
