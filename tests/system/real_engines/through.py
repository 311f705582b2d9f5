"""The proxy before the real engine, as an agent and as a trainer see it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai

from proxy.config import load
from proxy.server import running


class Through:
    """One running proxy: agents by rollout, and the control API as JSON."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    def agent(self, rollout: str) -> openai.AsyncOpenAI:
        """The official client, unchanged but for its base URL."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/rollouts/{rollout}/v1", api_key="none", max_retries=0)

    async def get(self, path: str) -> Any:
        """What the control API says."""
        async with self.http.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def steps(self, rollout: str) -> list[dict[str, Any]]:
        """The recorded steps."""
        return (await self.get(f"/rollouts/{rollout}/steps?limit=1000"))["steps"]

    async def rows(self, rollout: str) -> list[dict[str, Any]]:
        """The exported sequences."""
        return (await self.get(f"/rollouts/{rollout}/export?format=sequences"))["rows"]


@asynccontextmanager
async def through_proxy(
    engine_url: str, folder: Path, *, tokenizer: Path | None = None, **said: Any
) -> AsyncIterator[Through]:
    """The proxy before this engine, which it has to recognise, with a store of its own and what a test sets besides."""
    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [{"url": engine_url, "name": "engine", "tokenizer": tokenizer and str(tokenizer)}]},
        store={"url": f"embedded:{folder / 'store'}"},
        **said,
    )
    async with running(settings) as served, aiohttp.ClientSession() as http:
        yield Through(served.url, http)
