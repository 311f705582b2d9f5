"""Fakes at the edges: an engine on a real socket with scripted responses, and a store that fails on request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
from aiohttp import web
from tests.support.listening import listening
from tests.support.recorded import Cassette

from proxy.clock import Clock
from proxy.config.settings import Settings, load
from proxy.protocols.engines import PROBE_PATHS
from proxy.server.listener import RunningServer, running
from storage.errors import StoreUnreachable

Responder = Callable[[web.Request, dict], Awaitable[web.StreamResponse]]


class FakeEngine:
    """A server that answers as a test configures it, and notes the requests."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = asyncio.Event()
        self.reached = asyncio.Event()
        self.respond: Responder = nothing
        self.probes, self.unknown_status = 0, 404
        self.fixed_responses = {"/version": {"version": "0.32.0"}, "/health": {"status": "ok"}}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        probed = (*PROBE_PATHS[:-1], "/v1/chat/completions/render", "/openapi.json")
        if request.path in self.fixed_responses or request.path in probed:
            self.probes += request.path in PROBE_PATHS
            known = self.fixed_responses.get(request.path)
            return web.json_response(known or {"detail": "Not Found"}, status=200 if known else self.unknown_status)
        text = await request.read()
        body = orjson.loads(text) if text[:1] == b"{" else {"raw": text}
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.path != "/v1/models":  # the proxy requests it if a response names another model
            self.requests.append(body)
            self.reached.set()
        try:
            return await self.respond(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted.set()
            raise

    def plays(self, cassette: Cassette, **headers: str) -> None:
        """Answer with a recorded body."""

        async def respond(request: web.Request, body: dict) -> web.StreamResponse:
            all_headers = {"Content-Type": cassette.content_type, **headers}
            return web.Response(status=cassette.status, body=cassette.response, headers=all_headers)

        self.respond = respond

    def answers(self, payload: object, status: int = 200) -> None:
        """Answer with this JSON, or with these bytes in its place."""
        body = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        self.plays(Cassette("", "", {}, body, status, "application/json"))

    def streams(self, reads: list[bytes], *, then: str, after: asyncio.Event | None = None) -> None:
        """Stream these reads, then `end`, `die` (break the connection) or `hang` until the client disconnects."""

        async def respond(request: web.Request, body: dict) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for read in reads:
                await response.write(read)
            if after is not None:
                await after.wait()
            if then == "hang":
                await asyncio.Event().wait()
            if then == "die":
                request.transport.close()
            else:
                await response.write_eof()
            return response

        self.respond = respond

    def hangs(self, *, lists_models: bool = True) -> None:
        """Answer no call. The proxy requests the list of models for `/engines`: it is empty, or not answered either."""

        async def respond(request: web.Request, body: dict) -> web.StreamResponse:
            if lists_models and request.path == "/v1/models":
                return web.json_response({"data": []})
            await asyncio.Event().wait()
            raise AssertionError

        self.respond = respond


async def nothing(request: web.Request, body: dict) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the test configures no response"}}, status=500)


@asynccontextmanager
async def fake_engine() -> AsyncIterator[FakeEngine]:
    """Start a fake engine."""
    engine = FakeEngine()
    async with listening(engine.handle) as engine.url:
        yield engine


def settings_for(engine_url: str | None, **sections) -> Settings:
    """Return settings with this engine and a free port. Calls that an engine ends early end, unless `agents` says otherwise."""
    endpoints = [{"url": engine_url, "name": "fake"}] if engine_url else []
    engines = {"endpoints": endpoints, **sections.pop("engines", {})}
    agents = {"max_resumes": 0, **sections.pop("agents", {})}
    return load(**{"listen": "127.0.0.1:0", "engines": engines, "agents": agents, **sections})


@asynccontextmanager
async def proxying(
    engine_url: str | None, store, /, *, clock: Clock | None = None, **sections
) -> AsyncIterator[RunningServer]:
    """Start a proxy in front of this engine."""
    async with running(settings_for(engine_url, **sections), store, clock) as served:
        yield served


class FailingStore:
    """A real store that fails named operations, or lets them wait for an event first."""

    def __init__(self, store) -> None:
        self._store = store
        self.failing: set[str] = set()
        self.waiting: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}

    def pauses(self, verb: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Let an operation wait: return the events that it is reached, and that it may proceed."""
        self.reached[verb], self.waiting[verb] = asyncio.Event(), asyncio.Event()
        return self.reached[verb], self.waiting[verb]

    def __getattr__(self, verb: str):
        real = getattr(self._store, verb)
        if verb not in self.failing and verb not in self.waiting:
            return real

        async def instead(*args, **named):
            self.reached.setdefault(verb, asyncio.Event()).set()
            if verb in self.waiting:
                await self.waiting[verb].wait()
            if verb in self.failing:
                raise StoreUnreachable("the test took the store away", self._store.server_of("any"))
            return await real(*args, **named)

        return instead
