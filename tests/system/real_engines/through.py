"""A proxy with a real engine, as an agent and as a trainer use it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai

from proxy.config.settings import load
from proxy.server.listener import running


class Through:
    """A running proxy: clients by rollout, and the control API as JSON."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    def agent(self, rollout: str) -> openai.AsyncOpenAI:
        """Return OpenAI's client with this rollout's base URL."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/rollouts/{rollout}/v1", api_key="none", max_retries=0)

    async def get(self, path: str) -> Any:
        """Return JSON of the control API."""
        async with self.http.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def kind(self) -> str:
        """Return the kind of the engine: `auto` until it is detected."""
        return str((await self.get("/engines"))["engines"][0]["kind"])

    async def steps(self, rollout: str) -> list[dict[str, Any]]:
        """Return the recorded steps."""
        return (await self.get(f"/rollouts/{rollout}/steps?limit=1000"))["steps"]

    async def rows(self, rollout: str) -> list[dict[str, Any]]:
        """Return the exported sequences."""
        return (await self.get(f"/rollouts/{rollout}/export?format=sequences"))["rows"]


@asynccontextmanager
async def through_proxy(
    engine_url: str, folder: Path, *, tokenizer: Path | None = None, logprobs_mode: str | None = None, **overrides: Any
) -> AsyncIterator[Through]:
    """Start a proxy that detects this engine, with its own store and a test's settings."""
    endpoint = {
        "url": engine_url,
        "name": "engine",
        "tokenizer": tokenizer and str(tokenizer),
        "logprobs_mode": logprobs_mode,
    }
    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [endpoint]},
        store={"url": f"embedded:{folder / 'store'}"},
        **overrides,
    )
    async with running(settings) as served, aiohttp.ClientSession() as http:
        yield Through(served.url, http)
