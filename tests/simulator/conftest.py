"""A simulated engine on a real socket, and a client of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from aiohttp.test_utils import TestClient
from tests.support.recorded import find

from proxy.simulator.options import Options
from proxy.simulator.server import make_engine

HELLO = [{"role": "user", "content": "Say hello to the world."}]


@dataclass(frozen=True)
class Cassette:
    """A request and its response, recorded from vLLM 0.32."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    raw_body: bytes
    status: int
    raw: bytes

    @property
    def payload(self) -> dict[str, Any]:
        return orjson.loads(self.raw)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return chunks_from(self.raw)


def chunks_from(raw: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream, with or without `event` fields."""
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [orjson.loads(event.partition(b"data: ")[2]) for event in events[:-2]]


def skeleton_from(value: Any, key: str = "") -> Any:
    """Return the shape of JSON: keys in order and types of values, without keys that are tokens or ids."""
    if key == "bytes":
        return "bytes"
    if isinstance(value, dict):
        if value and (key == "top_logprobs" or all(name.isdigit() for name in value)) and "token" not in value:
            return ("by token", frozenset(skeleton_from(item) for item in value.values()))
        # SGLang's times depend on its flags (--enable-metrics).
        kept = [
            (name, item) for name, item in value.items() if not name.endswith(("_time", "_ts", "_wait", "_throughput"))
        ]
        return tuple((name, skeleton_from(item, name)) for name, item in kept if name != "first_token_latency")
    if isinstance(value, list):
        return ("list", frozenset(skeleton_from(item, key) for item in value))
    kinds = {str: "text", bool: "yes or no", type(None): "null"}
    return kinds.get(type(value), "number")


@pytest.fixture
def cassette() -> Callable[[str], Cassette]:
    """Return a function that reads a recorded request and response."""

    def read(name: str) -> Cassette:
        path = find(name, ".request.json")
        case = path.name.removesuffix(".request.json")
        request = orjson.loads(path.read_bytes())
        meta = path.with_name(f"{case}.meta.json")
        responses = [p for p in path.parent.glob(f"{case}.response.*") if p.suffix in {".json", ".sse", ".txt"}]
        raw_body = request["raw_body"].encode() if "raw_body" in request else orjson.dumps(request.get("body"))
        return Cassette(
            request["method"],
            request["path"],
            request.get("headers", {}),
            request.get("body"),
            raw_body,
            orjson.loads(meta.read_bytes())["status"] if meta.exists() else 200,
            responses[0].read_bytes(),
        )

    return read


@pytest.fixture(name="chunks_from")
def chunks_from_fixture() -> Callable[[bytes], list[dict[str, Any]]]:
    """Return the chunks of a stream."""
    return chunks_from


@pytest.fixture
def skeleton() -> Callable[[Any], Any]:
    """Return a function that gives the shape of JSON."""
    return skeleton_from


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    """A list of one tool."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }
    function = {"name": "get_weather", "description": "The weather to come.", "parameters": parameters}
    return [{"type": "function", "function": function}]


class Caller:
    """A client that sends requests and returns parsed responses."""

    def __init__(self, client: TestClient) -> None:
        self.client = client

    async def __call__(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.client.post(path, json=body) as response:
            raw = await response.read()
            assert response.status == 200, raw
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


@pytest.fixture
def start(aiohttp_client) -> Callable[[Options], Awaitable[Caller]]:
    """Return a function that starts an engine with options."""

    async def started(options: Options) -> Caller:
        return Caller(await aiohttp_client(make_engine(options)))

    return started


@pytest.fixture
async def engine(start) -> Caller:
    """An engine with default options."""
    return await start(Options())
