"""A stage of the golden session: a proxy before a tape engine; their requests and responses are recorded.

The clock advances between two requests only, and entropy is deterministic: two runs differ in ports and in the incarnations
of rollouts, and in nothing else.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from typing import Any

import aiohttp
import orjson
from tests.golden.tape import TapeEngine, tape_engine
from tests.support.fakes import proxying

PROXY, ENGINE = "http://proxy", "http://engine"  # replace URLs with a free port
_UNKEPT = {"date", "server", "connection", "transfer-encoding", "content-length", "keep-alive"}
TIMEOUT_S = 50
HELD_BACK = 3  # events that the proxy may have read and not shown


class SteppedClock:
    """A clock that only `tick` advances, and entropy that is a counter within a tick."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._seconds = start
        self._counts: dict[int, int] = {}

    def tick(self, seconds: float = 1.25) -> None:
        self._seconds += seconds
        self._counts = {}

    def now(self) -> float:
        return self._seconds

    def now_ms(self) -> int:
        return int(self._seconds * 1000)

    def monotonic(self) -> float:
        return self._seconds

    def entropy(self, count: int) -> bytes:
        number = self._counts[count] = self._counts.get(count, 0) + 1
        seed = f"{self._seconds} {count} {number}".encode()
        return b"".join(blake2b(seed + bytes([block])).digest() for block in range(count // 64 + 1))[:count]


class Stage:
    """A proxy in front of an engine: `call` sends a request and records its response in `calls`."""

    def __init__(
        self,
        name: str,
        http: aiohttp.ClientSession,
        served: Any,
        engine: TapeEngine,
        clock: SteppedClock,
        *,
        hides_keys: bool,
    ) -> None:
        self.name, self.engine = name, engine
        self._hides_keys = hides_keys
        self.clock = clock
        self.calls: list[dict[str, Any]] = []
        self._http, self._served = http, served

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        """Send a request and return its recorded response. `headers`: X_Rollout_Id for X-Rollout-Id."""
        self.clock.tick()
        named = {"Content-Type": "application/json"} if body is not None else {}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = orjson.dumps(body) if body is not None else None
        before = len(self.engine.bodies)
        text, is_cut = b"", False
        async with self._http.request(method, self._served.url + path, data=sent, headers=named) as response:
            status, came = response.status, response.headers
            try:
                async for part in response.content.iter_any():
                    text += part
            except aiohttp.ClientPayloadError:
                is_cut = True
        pairs = ((name.lower(), value) for name, value in came.items())
        kept = sorted([name, self._masked(value)] for name, value in pairs if name not in _UNKEPT)
        found = {"call": f"{method} {path}", "status": status, "headers": kept, **({"cut": True} if is_cut else {})}
        if status >= 400 and text.decode() not in self.engine.bodies[before:]:
            found["body"] = "(an error of the proxy's)"  # its texts are not golden
        else:
            found["body"] = self._shown(text.decode()) if _is_text(came["Content-Type"]) else text
        self.calls.append(found)
        return found

    async def get(self, path: str, **headers: str) -> dict[str, Any]:
        return await self.call("GET", path, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request and return the JSON of the response, or None."""
        found = await self.call("POST", path, {} if body is None else body, **headers)
        return orjson.loads(found["body"]) if found.get("body", "")[:1] in ("{", "[") else None

    async def finish(self, rollout: str, **body: Any) -> None:
        """Finish a rollout, and wait until its drift is counted."""
        await self.post(f"/rollouts/{rollout}/finish", body)
        await self.settle(rollout)

    async def settle(self, rollout: str) -> None:
        """Wait until the drift of a finished rollout is counted, which happens in the background."""
        await self.until(f"/rollouts/{rollout}", lambda found: found["drift"] is not None)

    async def leave(self, path: str, body: Any, *, events: int) -> None:
        """Start a stream that stops after `events` events, read most of them, and disconnect."""
        self.clock.tick()
        self.engine.hold_after = events
        read = b""
        async with asyncio.timeout(TIMEOUT_S):
            sending = self._http.post(self._served.url + path, json=body)
            async with sending as response:
                while read.count(b"\n\n") < events - HELD_BACK:
                    part = await response.content.readany()
                    assert part, read
                    read += part
        shown = self._masked(b"\n\n".join(read.split(b"\n\n")[: events - HELD_BACK]).decode())
        self.calls.append({"call": f"POST {path}", "status": "left", "body": shown})

    async def late(self, path: str, body: Any, meanwhile: Awaitable[Any]) -> None:
        """Send a request, and await `meanwhile` before the engine responds."""
        self.engine.gate.clear()
        self.engine.reached.clear()
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            call = group.create_task(self.post(path, body))
            await self.engine.reached.wait()
            await meanwhile
            self.engine.gate.set()
            await call

    async def until(self, path: str, holds: Callable[[Any], bool]) -> None:
        """Poll until a condition holds: background writes have ended then. The polls are not recorded."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                async with self._http.get(self._served.url + path) as response:
                    if holds(orjson.loads(await response.read())):
                        return
                await asyncio.sleep(0.01)

    def _shown(self, text: str) -> str:
        """Mask a body. Minted keys depend on the incarnation of a rollout, random in a new store."""
        return re.sub(r'(?<="api_key":"tt-)[^"]+', "…", self._masked(text)) if self._hides_keys else self._masked(text)

    def _masked(self, text: str) -> str:
        return mask(text.replace(self._served.url, PROXY).replace(self.engine.url, ENGINE))


def mask(text: str) -> str:
    """Replace sentences for people, which may change: reasons in reports, steps and headers, and errors within a stream."""
    text = re.sub(r'"why":\s*(?:"(?:[^"\\]|\\.)*"|\[(?:"(?:[^"\\]|\\.)*",?)+\])', _without_sentences, text)
    text = re.sub(r'^(data: \{"error":).*$', r"\1…", text, flags=re.MULTILINE)
    return re.sub(r"^(\d+); .*$", r"\1; …", text) if "\n" not in text else text


def _without_sentences(why: re.Match[str]) -> str:
    """Replace the reason, or each of the reasons."""
    name, _, reasons = why[0].partition(":")
    return f"{name}:" + re.sub(r'"(?:[^"\\]|\\.)*"', '"…"', reasons.lstrip())


def _is_text(content_type: str) -> bool:
    return content_type.startswith(("application/json", "text/", "application/x-ndjson"))


@asynccontextmanager
async def staging(
    store: Any, clock: SteppedClock, tape: list, source: Any = None, **settings: Any
) -> AsyncIterator[Stage]:
    """Run a proxy over this store before a tape engine; `name` is the endpoint's."""
    settings = {"groups": {"start_s": 10**6, "idle_s": 10**6}, **settings}  # reading takes longer than the defaults
    name, hides_keys = settings.pop("name"), settings.pop("hides_keys", True)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(tape_engine(tape, source))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        endpoint = {"url": engine.url, "name": name, **settings.pop("endpoint", {})}
        engines = {"endpoints": [endpoint]}
        served = await stack.enter_async_context(proxying(None, store, clock=clock, engines=engines, **settings))
        yield Stage(name, http, served, engine, clock, hides_keys=hides_keys)
