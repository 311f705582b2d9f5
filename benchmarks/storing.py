"""Memory of the store for recorded conversations: calls over sockets, through the recorder, into an embedded store.

The engine responds immediately in vLLM's format with random ids and words of about four characters per token, so only what a
conversation repeats can be stored once.
"""

import asyncio
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import redis
from aiohttp import web

from benchmarks.curves import Curve
from proxy.config.settings import load
from proxy.server.listener import running

SHAPES = {1: 1_200, 5: 4_000, 10: 8_000, 50: 32_000, 100: 32_000}  # turns: tokens of the conversation
TOTAL_TOKENS = 256_000
VOCABULARY = 150_000


class Conversations:
    """An engine that returns the ids of the previous turns and new random ids as prompt ids."""

    def __init__(self, message_tokens: int) -> None:
        self.message_tokens = message_tokens  # tokens of each message
        self.ids: dict[str, list[int]] = {}
        self.chance = random.Random(1)

    def words(self, tokens: int) -> str:
        """Return a text of about this many tokens."""
        return " ".join(f"w{self.chance.randrange(500)}" for _ in range(tokens))

    async def answer(self, request: web.Request) -> web.Response:
        """Respond to one call with vLLM 0.32's fields."""
        body = await request.json()
        prompt = self.ids.setdefault(body["user"], [])
        prompt += [self.chance.randrange(VOCABULARY) for _ in range(self.message_tokens)]
        sampled = [self.chance.randrange(VOCABULARY) for _ in range(self.message_tokens)]
        text = self.words(self.message_tokens)
        content = [
            {"token": f"token_id:{token}", "logprob": -self.chance.expovariate(1.0), "bytes": None, "top_logprobs": []}
            for token in sampled
        ]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
        response = {
            "id": "c", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [*prompt],
            "choices": [{**choice, "token_ids": sampled, "stop_reason": None}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
        }  # fmt: skip
        prompt += sampled
        return web.json_response(response)


async def _converse(http: aiohttp.ClientSession, url: str, name: str, turns: int, engine: Conversations) -> None:
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": engine.words(engine.message_tokens)})
        body = {"model": "m", "user": name, "messages": messages}
        async with http.post(f"{url}/rollouts/{name}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            messages.append((await answer.json())["choices"][0]["message"])


async def _measured(turns: int, tokens: int) -> Mapping[str, float]:
    rollouts = max(4, TOTAL_TOKENS // tokens)
    engine = Conversations(tokens // turns // 2)
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", engine.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "kind": "vllm", "version": "0.32.0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        settings = {"listen": "127.0.0.1:0", "engines": {"endpoints": [upstream]}, "store": {"url": f"embedded:{path}"}}
        async with running(load(**settings)) as served, aiohttp.ClientSession() as http:
            with redis.Redis(unix_socket_path=str(path / "valkey.sock")) as server:
                before, written = server.info("memory"), _appended(path)
                for number in range(rollouts):
                    await _converse(http, served.url, f"r{number}", turns, engine)
                after, grown = server.info("memory"), _appended(path) - written
            async with http.get(f"{served.url}/rollouts/r0") as answer:
                counts = (await answer.json())["counts"]
    await runner.cleanup()
    if counts["exact"] != turns:
        raise RuntimeError(f"some measured steps are not exact: {counts}")
    unique, steps = rollouts * turns * engine.message_tokens * 2, rollouts * turns
    memory = after["used_memory_dataset"] - before["used_memory_dataset"]
    return {
        "tokens of a conversation": tokens,
        "kB per step": memory / steps / 1000,
        "kB per rollout": memory / rollouts / 1000,
        "bytes per unique token": memory / unique,
        "bytes per unique token, on disk": grown / unique,
    }


def _appended(path: Path) -> int:
    """Return the size of the append-only files."""
    return sum(file.stat().st_size for file in (path / "appendonlydir").iterdir())


def memory(_places: object) -> Curve:
    """Measure the memory of the store by turns of a conversation."""
    points = [(turns, asyncio.run(_measured(turns, tokens))) for turns, tokens in SHAPES.items()]
    return Curve(
        name="memory",
        title="Memory of the store",
        x="turns",
        how=(
            "Conversations of equal turns, half of each sampled, with one recorded call per turn and an embedded store. Memory "
            "is the increase of Valkey's `used_memory_dataset`; on disk, of its append-only files. A unique token is one that "
            "occurs in its rollout for the first time."
        ),
        points=points,
        panels={"bytes per unique token": ["bytes per unique token", "bytes per unique token, on disk"]},
    )
