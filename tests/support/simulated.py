"""A client of a simulated engine, and the shapes of recorded responses and of the simulator's to the same requests."""

from typing import Any

import orjson
from aiohttp.test_utils import TestClient
from tests.support.recorded import comparable, load

from proxy.protocols.dialects import DIALECTS

HELLO = [{"role": "user", "content": "Say hello to the world."}]


class Caller:
    """A client that sends requests and returns parsed responses."""

    def __init__(self, client: TestClient) -> None:
        self.client = client

    async def answer(self, path: str, body: Any = None, **named: Any) -> tuple[int, bytes]:
        """Return the status and the body of the response to a POST."""
        async with self.client.post(path, **({"json": body} if "data" not in named else {}), **named) as response:
            return response.status, await response.read()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.client.get(path) as response:
            return response.status, await response.read()

    async def __call__(self, path: str, **body: Any) -> Any:
        status, raw = await self.answer(path, body)
        assert status == 200, raw
        return orjson.loads(raw)

    async def chat(self, messages: list[dict[str, Any]] | None = None, **body: Any) -> dict[str, Any]:
        return await self("/v1/chat/completions", messages=messages or HELLO, **body)

    async def chat_stream(self, messages: list[dict[str, Any]] | None = None, **body: Any) -> list[dict[str, Any]]:
        return await self.stream("/v1/chat/completions", messages=messages or HELLO, **body)

    async def completion(self, prompt: Any, **body: Any) -> dict[str, Any]:
        return await self("/v1/completions", prompt=prompt, **body)

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        async with self.client.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.read()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return chunks_from(await response.read())

    async def both(self, path: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the response, and what its stream accumulates to, without what differs between any two runs."""
        accumulator = DIALECTS[path].accumulator()
        whole = await self(path, **body)
        for chunk in await self.stream(path, **body):
            accumulator.feed(chunk)
        return comparable(whole), comparable(accumulator.finish())


def chunks_from(raw: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a stream, with or without `event` fields."""
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [orjson.loads(event.partition(b"data: ")[2]) for event in events[:-2]]


def skeleton(value: Any, key: str = "") -> Any:
    """Return the shape of JSON: keys in order and types of values, without keys that are tokens or ids."""
    if key == "bytes":
        return "bytes"
    if isinstance(value, dict):
        if value and (key == "top_logprobs" or all(name.isdigit() for name in value)) and "token" not in value:
            return ("by token", frozenset(skeleton(item) for item in value.values()))
        # SGLang's times depend on its flags (--enable-metrics).
        times = ("_time", "_ts", "_wait", "_throughput", "first_token_latency")
        return tuple((name, skeleton(item, name)) for name, item in value.items() if not name.endswith(times))
    if isinstance(value, list):
        return ("list", frozenset(skeleton(item, key) for item in value))
    kinds = {str: "text", bool: "yes or no", type(None): "null"}
    return kinds.get(type(value), "number")


async def exchanged(engine: Caller, name: str, kind: str = "vllm", **more: Any) -> tuple[Any, Any]:
    """Return a recorded response and the simulator's to the request with `more`: each its JSON, or its chunks."""
    recorded = load(name, kind)
    status, raw = await engine.answer(recorded.path, {**recorded.body, **more}, headers=recorded.headers)
    assert status == recorded.status, raw
    if recorded.is_stream:
        assert raw.count(b"event: ") == recorded.response.count(b"event: ")
        return chunks_from(recorded.response.strip() + b"\n\n"), chunks_from(raw)
    return orjson.loads(recorded.response), orjson.loads(raw)
