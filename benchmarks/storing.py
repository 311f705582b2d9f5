"""What recorded conversations take in the store: real calls over sockets, through the real recorder, into an embedded store.

The engine answers every call at once in vLLM's shape, with ids by chance: nothing is alike but what a conversation repeats, so
that nothing is saved by luck. Texts are words by chance, some four characters a token.
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

SHAPES = {1: 1_200, 5: 4_000, 10: 8_000, 50: 32_000, 100: 32_000}  # turns, and the tokens that a conversation grows to
TOKENS_IN_ALL = 256_000
VOCABULARY = 150_000


class Conversations:
    """An engine that goes on from what it was sent: the ids of a prompt are those it gave before, and new ones."""

    def __init__(self, each: int) -> None:
        self.each = each  # tokens of a question, and of an answer
        self.ids: dict[str, list[int]] = {}
        self.chance = random.Random(1)

    def words(self, tokens: int) -> str:
        """A text of about so many tokens."""
        return " ".join(f"w{self.chance.randrange(500)}" for _ in range(tokens))

    async def answer(self, request: web.Request) -> web.Response:
        """One call, as vLLM 0.32 answers it."""
        body = await request.json()
        prompt = self.ids.setdefault(body["user"], [])
        prompt += [self.chance.randrange(VOCABULARY) for _ in range(self.each)]
        sampled = [self.chance.randrange(VOCABULARY) for _ in range(self.each)]
        text = self.words(self.each)
        content = [
            {"token": f"token_id:{one}", "logprob": -self.chance.expovariate(1.0), "bytes": None, "top_logprobs": []}
            for one in sampled
        ]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
        told = {
            "id": "c", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [*prompt],
            "choices": [{**choice, "token_ids": sampled, "stop_reason": None}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": self.each, "total_tokens": len(prompt) + self.each},
        }  # fmt: skip
        prompt += sampled
        return web.json_response(told)


async def _asked(http: aiohttp.ClientSession, url: str, name: str, turns: int, engine: Conversations) -> None:
    """One conversation of one rollout."""
    messages: list[dict[str, Any]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": engine.words(engine.each)})
        body = {"model": "m", "user": name, "messages": messages}
        async with http.post(f"{url}/rollouts/{name}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            messages.append((await answer.json())["choices"][0]["message"])


async def _measured(turns: int, tokens: int) -> Mapping[str, float]:
    """What conversations of this shape take, all told."""
    rollouts = max(4, TOKENS_IN_ALL // tokens)
    engine = Conversations(tokens // turns // 2)
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", engine.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "kind": "vllm", "version": "0.32.0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        said = {"listen": "127.0.0.1:0", "engines": {"endpoints": [upstream]}, "store": {"url": f"embedded:{path}"}}
        async with running(load(**said)) as served, aiohttp.ClientSession() as http:
            with redis.Redis(unix_socket_path=str(path / "valkey.sock")) as server:
                before, written = server.info("memory"), _appended(path)
                for number in range(rollouts):
                    await _asked(http, served.url, f"r{number}", turns, engine)
                after, grown = server.info("memory"), _appended(path) - written
            async with http.get(f"{served.url}/rollouts/r0") as answer:
                counts = (await answer.json())["counts"]
    await runner.cleanup()
    if counts["exact"] != turns:
        raise RuntimeError(f"steps that are not exact were measured: {counts}")
    unique, steps = rollouts * turns * engine.each * 2, rollouts * turns
    memory = after["used_memory_dataset"] - before["used_memory_dataset"]
    return {
        "tokens of a conversation": tokens,
        "kB a step": memory / steps / 1000,
        "kB a rollout": memory / rollouts / 1000,
        "bytes a unique token": memory / unique,
        "bytes a unique token, on disk": grown / unique,
    }


def _appended(path: Path) -> int:
    """The length of the append-only files."""
    return sum(file.stat().st_size for file in (path / "appendonlydir").iterdir())


def memory(_places: object) -> Curve:
    """What is stored, by how many turns a conversation has."""
    points = [(turns, asyncio.run(_measured(turns, tokens))) for turns, tokens in SHAPES.items()]
    return Curve(
        name="memory",
        title="Memory of the store",
        x="turns",
        how=(
            "Conversations of so many equal turns, half of each sampled, one call a turn through the recorder into an embedded "
            "store; `used_memory_dataset` of Valkey before and after, and its append-only file. A unique token is one that the "
            "engine saw or sampled for the first time in its rollout."
        ),
        points=points,
        panels={"bytes a unique token": ["bytes a unique token", "bytes a unique token, on disk"]},
    )
