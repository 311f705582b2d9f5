"""A tape engine: it forwards requests to an engine and records the exchanges, or replays recorded ones."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from tests.support.listening import listening

SAMPLING = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
# Of the connection, of the versions of libraries, or of the moment.
_UNKEPT = {"host", "user-agent", "date", "server", "connection", "transfer-encoding", "content-length"}

Responder = Callable[[str, str, dict[str, str], str], Awaitable[dict[str, Any]]]


class TapeEngine:
    """A server that responds from a tape. With `source`, requests that are not on the tape go there and are recorded.

    `received` has the sampling requests in order, and `lookups` the other POST requests. Sampling requests wait for
    `gate`. `cut_after` and `hold_after` are numbers of events: the next stream then disconnects, or stalls until the
    client disconnects.
    """

    def __init__(self, tape: list[dict[str, Any]], source: Responder | None = None) -> None:
        self.url = ""
        self.tape = tape
        self.received: list[dict[str, Any]] = []
        self.lookups: set[str] = set()
        self.bodies: list[str] = []  # of responses: other bodies of errors are the proxy's own
        self.gate, self.reached = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.cut_after: int | None = None
        self.hold_after: int | None = None
        self._source = source
        self._played: Counter[int] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read()).decode()
        method, path = request.method, request.path
        if path == "/health":
            return web.Response()  # requested at intervals, so not on the tape
        if method == "POST" and path in SAMPLING:
            headers = sorted([name.lower(), value] for name, value in request.headers.items())
            kept = [pair for pair in headers if pair[0] not in _UNKEPT]
            self.received.append({"path": path, "headers": kept, "body": body})
            self.reached.set()
            await self.gate.wait()
        elif method == "POST":
            self.lookups.add(f"{path} {body}")
        exchange = await self._exchange(method, path, dict(request.headers), body)
        if exchange is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.bodies.append(exchange["answer"])
        return await self._play(request, exchange)

    async def _exchange(self, method: str, path: str, headers: dict[str, str], body: str) -> dict[str, Any] | None:
        """Return the exchange of this request: the first that is unplayed, or else the first.

        A sampling request that is not on the tape gets the next response in order, so that a difference does not cause others.
        """
        found = [
            index
            for index, exchange in enumerate(self.tape)
            if (exchange["method"], exchange["path"], exchange["body"]) == (method, path, body)
        ]
        if method == "GET" and found:
            return self.tape[found[-1]]
        fresh = [index for index in found if not self._played[index]]
        if self._source is not None and not fresh:
            response = await self._source(method, path, headers, body)
            self.tape.append({"method": method, "path": path, "body": body, **response})
            fresh = [len(self.tape) - 1]
        if not fresh and path in SAMPLING:
            fresh = [p for p, exchange in enumerate(self.tape) if exchange["path"] == path and not self._played[p]][:1]
        index = (fresh or found or [None])[0]
        if index is None:
            return None
        self._played[index] += 1
        return self.tape[index]

    async def _play(self, request: web.Request, exchange: dict[str, Any]) -> web.StreamResponse:
        cut, hold = self.cut_after, self.hold_after
        if not exchange["type"].startswith("text/event-stream") or (cut is None and hold is None):
            headers = {"Content-Type": exchange["type"], **exchange["headers"]}
            return web.Response(status=exchange["status"], body=exchange["answer"].encode(), headers=headers)
        self.cut_after = self.hold_after = None
        response = web.StreamResponse(headers={"Content-Type": exchange["type"]})
        await response.prepare(request)
        events = exchange["answer"].split("\n\n")[: cut or hold]
        await response.write("".join(f"{event}\n\n" for event in events).encode())
        if hold is not None:
            await asyncio.Event().wait()
        request.transport.close()
        return response


@asynccontextmanager
async def tape_engine(tape: list[dict[str, Any]], source: Responder | None = None) -> AsyncIterator[TapeEngine]:
    """A tape engine, listening."""
    engine = TapeEngine(tape, source)
    async with listening(engine.handle) as engine.url:
        yield engine


def forward_to(http: aiohttp.ClientSession, url: str) -> Responder:
    """Return a source that forwards to the engine at a URL."""

    async def forward(method: str, path: str, headers: dict[str, str], body: str) -> dict[str, Any]:
        sent = {name: value for name, value in headers.items() if name.lower() not in _UNKEPT}
        async with http.request(method, url + path, data=body.encode() or None, headers=sent) as response:
            kept = {name: value for name, value in response.headers.items() if name.lower().startswith("x-")}
            text = (await response.read()).decode()
            content_type = response.headers.get("Content-Type", "text/plain")
            return {"status": response.status, "type": content_type, "headers": kept, "answer": text}

    return forward
