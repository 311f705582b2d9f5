"""What a continued turn costs, by the length of its history, with an engine that responds immediately."""

import asyncio
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import orjson

from benchmarks.curves import PROMPTS, Curve
from benchmarks.servers import Server, started
from benchmarks.turns import REPLY, STOP, messages
from benchmarks.upstream import EVENTS, sampled_ids

_CACHE_BYTES = re.compile(rb"^tokentape_rollout_cache_bytes ([0-9.e+]+)$", re.MULTILINE)
_TEXT = re.compile(rb'"(?:content|reasoning|reasoning_content)":\s?"[^"]')
_JSON = {"Content-Type": "application/json"}
_GROWS = EVENTS + 42  # tokens of the first reply and of the second message
_WARM_UP = 2  # rounds that are not counted: new connections, and the engine's text of the stop token


@dataclass(frozen=True)
class Streamed:
    """A streamed reply: the seconds until its first text, its content, and the prompt tokens of its usage."""

    first_s: float
    content: str
    prompt_tokens: int


async def stream(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Streamed:
    """Send a chat call, and read its stream. Raises RuntimeError for another status than 200."""
    data = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    read, first_s = b"", 0.0
    sent = time.perf_counter()
    async with http.post(f"{url}/chat/completions", data=data, headers=_JSON) as response:
        async for part in response.content.iter_any():
            read += part
            if not first_s and _TEXT.search(read):
                first_s = time.perf_counter() - sent
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {read[:300].decode()}")
    chunks = [orjson.loads(line[6:]) for line in read.split(b"\n") if line.startswith(b"data: {")]
    content = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return Streamed(first_s or time.perf_counter() - sent, content, usage["prompt_tokens"])


@dataclass(frozen=True)
class _Servers:
    """The engine, and TokenTape with continuation off, in `append`, and in `append` with an empty cache."""

    engine: Server
    off: Server
    append: Server
    stored: Server


def continuation(_places: object) -> Curve:
    """Measure the second turn of a streamed chat by the tokens of its history."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine = stack.enter_context(started("upstream"))
        proxies = [
            stack.enter_context(started("tokentape", engine.url, f"embedded:{folder}/{number}", mode, cache))
            for number, (mode, cache) in enumerate((("off", "0"), ("append", str(2**28)), ("append", "0")))
        ]
        servers = _Servers(engine, *proxies)
        points = [(tokens, asyncio.run(_measured(servers, tokens))) for tokens in PROMPTS]
    how = (
        "Medians of paired rounds, in random order, of a streamed conversation of two turns; one client. Added: time to the "
        "first token of the second turn in `append`, minus that in `off`. In `off` the engine renders and tokenizes, which "
        "this one does in no time. From the store: the same without a cache. Engine alone: the requests to `/tokenize` and "
        "`/detokenize`, sent directly. Leaf: `tokentape_rollout_cache_bytes` per conversation of two turns."
    )
    names = list(points[0][1])
    panels = {"added time to first token, ms": [name for name in names if "added" in name]}
    panels["kB per cached leaf"] = [name for name in names if "leaf" in name]
    return Curve("continuation", "Cost of a continued turn", "tokens of history", how, points, panels)


async def _measured(servers: _Servers, tokens: int) -> dict[str, float]:
    """Return the columns for a history of so many tokens."""
    rounds, chance = max(20, min(60, 1_280_000 // tokens)) + _WARM_UP, random.Random(tokens)
    seconds: dict[str, list[float]] = {}
    requests: dict[str, list[Mapping[str, int]]] = {"exact": [], "drift": []}
    cases = {
        f"{place} {mode}": (server, mode)
        for mode in ("exact", "drift")
        for place, server in (("off", servers.off), ("append", servers.append), ("stored", servers.stored))
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
        before = await _cache_bytes(http, servers.append)
        for number in range(rounds):
            for name, (server, mode) in chance.sample(list(cases.items()), len(cases)):
                taken, counted = await _second_turn(http, servers.engine, server, f"{mode}-{tokens}", number)
                seconds.setdefault(name, []).append(taken)
                if name.startswith("append"):
                    requests[mode].append(counted)
            for mode in ("exact", "drift"):
                seconds.setdefault(f"alone {mode}", []).append(await _alone(http, servers.engine, mode, tokens))
        leaf = (await _cache_bytes(http, servers.append) - before) / (2 * rounds)
    taken_ms = {name: [1000 * value for value in values[_WARM_UP:]] for name, values in seconds.items()}
    return {
        "off (ms)": median(taken_ms["off exact"]),
        "added (ms)": _added(taken_ms, "append exact"),
        "added, drift (ms)": _added(taken_ms, "append drift"),
        "added, from the store (ms)": _added(taken_ms, "stored exact"),
        "engine alone (ms)": median(taken_ms["alone exact"]),
        "engine alone, drift (ms)": median(taken_ms["alone drift"]),
        "/tokenize": _requests(requests["exact"], "/tokenize"),
        "/detokenize": _requests(requests["exact"], "/detokenize"),
        "/tokenize, drift": _requests(requests["drift"], "/tokenize"),
        "/detokenize, drift": _requests(requests["drift"], "/detokenize"),
        "kB per cached leaf": leaf / 1000,
    }


def _added(taken_ms: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the median difference to `off` in the same round."""
    pairs = zip(taken_ms[name], taken_ms[f"off {name.split()[1]}"], strict=True)
    return median(ours - off for ours, off in pairs)


def _requests(counted: Sequence[Mapping[str, int]], path: str) -> int:
    return int(median(counts.get(path, 0) for counts in counted[_WARM_UP:]))


async def _second_turn(
    http: aiohttp.ClientSession, engine: Server, server: Server, model: str, number: int
) -> tuple[float, Mapping[str, int]]:
    """Return the seconds to the first token of the second turn, and the requests to the engine for it by path."""
    url = f"{server.url}/rollouts/{model}-{number}/v1"
    mode, _, tokens = model.partition("-")
    sent, asked = messages(int(tokens) - EVENTS, _GROWS, 2), f"mode-{mode}-{int(tokens) - EVENTS}-{_GROWS}"
    first = await stream(http, url, {"model": asked, "messages": sent[:1]})
    if first.content != REPLY:
        raise RuntimeError(f"the engine's reply arrived as {first.content[:100]!r}")
    before = await _counts(http, engine)
    second = await stream(http, url, {"model": asked, "messages": sent})
    after = await _counts(http, engine)
    return second.first_s, {path: count - before.get(path, 0) for path, count in after.items()}


async def _alone(http: aiohttp.ClientSession, engine: Server, mode: str, tokens: int) -> float:
    """Return the seconds of the requests for a continuation, sent to the engine directly."""
    ids = sampled_ids(STOP)
    first = tokens - EVENTS
    rendered = orjson.dumps({"model": f"mode-{mode}-{first}-{_GROWS}", "messages": messages(first, _GROWS, 2)})
    requests = [("/tokenize", rendered)]
    if mode == "drift":
        requests += [
            ("/detokenize", orjson.dumps({"tokens": ids})),
            ("/detokenize", orjson.dumps({"tokens": [0, *ids]})),
        ]
    sent = time.perf_counter()
    for path, data in requests:
        async with http.post(engine.url + path, data=data, headers=_JSON) as response:
            await response.read()
    return time.perf_counter() - sent


async def _counts(http: aiohttp.ClientSession, engine: Server) -> dict[str, int]:
    async with http.get(f"{engine.url}/counts") as response:
        return await response.json()


async def _cache_bytes(http: aiohttp.ClientSession, server: Server) -> float:
    async with http.get(f"{server.url}/metrics") as response:
        found = _CACHE_BYTES.search(await response.read())
    if found is None:
        raise RuntimeError("tokentape_rollout_cache_bytes is not in /metrics")
    return float(found[1])
