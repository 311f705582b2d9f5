"""An engine on a real socket that sends any bytes: odd headers, any framing, connections that stay open or break."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import orjson

from proxy.protocols.engines import PROBE_PATHS


@dataclass
class Sent:
    """A response: status line and headers as bytes, its reads, and then `end`, `hang` (stay open) or `die`."""

    reads: list[bytes]
    content_type: str = "application/json"
    status: bytes = b"200 OK"
    headers: tuple[bytes, ...] = ()
    then: str = "end"
    length: int | None = None  # the value of Content-Length


FACTS = {
    "vllm": {"/version": {"version": "0.32.0"}},
    "sglang": {
        "/server_info": {"version": "0.5.23", "tool_call_parser": "qwen25"},
        "/model_info": {"weight_version": "v1", "tool_call_parser": "qwen25", "reasoning_parser": None},
    },
    "llamacpp": {"/props": {"build_info": "b1"}},
}


@dataclass
class RawEngine:
    """Answer with the result of `respond(path, body)`; version, health and models have fixed responses."""

    kind: str
    url: str = ""
    respond: Callable[[str, dict], Awaitable[Sent]] | None = None
    left: set[asyncio.Task] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.left.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._respond(reader, writer)
        finally:
            self.left.discard(task)
            with suppress(ConnectionError):
                writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        sent = self._fixed_response(first.split()[1]) or await self.respond(
            first.split()[1], orjson.loads(text or b"{}")
        )
        server = b"Server: llama.cpp\r\n" if self.kind == "llamacpp" else b""
        length = b"Content-Length: %d\r\n" % sent.length if sent.length is not None else b""
        more = b"".join(line + b"\r\n" for line in sent.headers)
        kind = b"Content-Type: " + sent.content_type.encode() + b"\r\n"
        writer.write(
            b"HTTP/1.1 " + sent.status + b"\r\n" + server + kind + length + more + b"Connection: close\r\n\r\n"
        )
        for read in sent.reads:
            writer.write(read)
            await writer.drain()
            await asyncio.sleep(0)
        if sent.then == "hang":
            await reader.read()  # until the other side disconnects
        elif sent.then == "die":
            writer.transport.abort()

    def _fixed_response(self, path: str) -> Sent | None:
        payload = FACTS[self.kind].get(path) or ({"status": "ok"} if path == "/health" else None)
        if payload is None and path == "/v1/models":
            payload = {"object": "list", "data": [{"id": "tiny", "object": "model", "root": "tiny"}]}
        if payload is not None:
            return Sent([orjson.dumps(payload)])
        if path in PROBE_PATHS or self.respond is None:
            return Sent([b"{}"], status=b"404 Not Found")
        return None


@asynccontextmanager
async def raw_engine(kind: str) -> AsyncIterator[RawEngine]:
    """Start such an engine."""
    engine = RawEngine(kind)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        for task in list(engine.left):
            task.cancel()
        await asyncio.gather(*engine.left, return_exceptions=True)
