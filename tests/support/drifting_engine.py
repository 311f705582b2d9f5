"""A fake engine with other ids than it sampled in its second prompt, and with a detokenizer that a test controls."""

import asyncio
from collections.abc import Callable

from aiohttp import web
from tests.support.fakes import FakeEngine

ASK, MORE = {"role": "user", "content": "Say hi"}, {"role": "user", "content": "more"}
REPLY = {"role": "assistant", "content": "hello there"}
SAMPLED = [8, 9, 2]
TURNS = (([1, 3, 6, 7, 2, 1, 4], SAMPLED), ([1, 3, 6, 7, 2, 1, 4, 8, 2, 1, 3], [7, 2]))
TEXTS = dict(enumerate(("", "<s>", "</s>", "user", "assistant", "", "Say", "hi", "hello", " there")))

Detokenizer = Callable[[list[int]], str | None]


def words(ids: list[int]) -> str:
    """Return different texts: a word is missing."""
    return "".join(TEXTS[token] for token in ids)


def same(ids: list[int]) -> str:
    """Return the same texts, so that only the tokens differ."""
    return "hello there"


def unavailable(ids: list[int]) -> None:
    """Fail: the detokenizer is not available."""


class DriftingEngine:
    """Answer chats with `TURNS`, and `/detokenize` with the result of `detokenize`, once `gate` is open."""

    def __init__(self, engine: FakeEngine) -> None:
        self.url = engine.url
        self.detokenize: Detokenizer = words
        self.gate = asyncio.Event()
        self.gate.set()
        self.detokenized: list[list[int]] = []
        engine.respond = self._respond

    async def _respond(self, request: web.Request, body: dict) -> web.StreamResponse:
        if request.path != "/detokenize":
            return web.json_response(_completion(*TURNS[len(body["messages"]) > 1]))
        self.detokenized.append(body["tokens"])
        await self.gate.wait()
        text = self.detokenize(body["tokens"])
        return web.json_response({} if text is None else {"prompt": text}, status=500 if text is None else 200)


def _completion(prompt: list[int], ids: list[int]) -> dict:
    entries = [{"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []} for _ in ids]
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": prompt,
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": REPLY, "logprobs": {"content": entries}, "token_ids": ids}
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)},
    }


class Drifting:
    """A proxy in front of such an engine, and the rollout `r1`."""

    def __init__(self, http, url: str) -> None:
        self._http = http
        self._url = url

    async def chat(self, *messages: dict) -> None:
        """Make a call."""
        await self.post("/v1/chat/completions", {"model": "m", "messages": messages})

    async def two_turns(self) -> None:
        """Make a call, and one that continues it and drifts."""
        await self.chat(ASK)
        await self.chat(ASK, REPLY, MORE)

    async def finish(self) -> None:
        """Finish the rollout."""
        await self.post("/finish", {"status": "completed"})

    async def post(self, path: str, body: dict) -> None:
        async with self._http.post(f"{self._url}/rollouts/r1{path}", json=body) as response:
            assert response.status == 200, await response.text()

    async def get(self, path: str = "") -> dict:
        """Return the rollout, or a resource below it."""
        async with self._http.get(f"{self._url}/rollouts/r1{path}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def boundary(self, query: str = "") -> dict:
        """Return the only drift of its tree."""
        (drift,) = (await self.get(f"/tree{query}"))["drift"]
        return drift

    async def counted(self, **kinds: int) -> None:
        """Request the rollout until its drift count has this value."""
        while (await self.get())["drift"] != kinds:
            await asyncio.sleep(0.005)

    async def metric(self, kind: str) -> float:
        """Return the drift counter of this kind."""
        async with self._http.get(f"{self._url}/metrics") as response:
            lines = (await response.text()).splitlines()
        name = f'tokentape_drift_boundaries_total{{kind="{kind}"}} '
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)


async def wait_for_texts(store, count: int) -> None:
    """Wait until the texts of this many windows are stored."""
    while count > sum(name.startswith("drift:") for name in await store.marks("r1")):
        await asyncio.sleep(0.005)
