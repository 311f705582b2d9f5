"""What updates of the weights cost: calls to real engines while a trainer updates them, by what happens to running calls.

`python -m benchmarks.updates URL [URL]`: of vLLM with VLLM_SERVER_DEV_MODE=1, or of SGLang; the second one is for `rolling`.

For 90 s, each of 64 agents streams one reply after the other, of 50 to 400 tokens, and makes the call again if its reply
is cut. An update pauses the engine for two seconds and clears its prefix cache; the next one begins five seconds later. Then
the replies that were begun are completed, which counts. Printed for each mode: the updates, the tokens that the engines
sampled, those that are in no whole reply, the replies, those that were cut, tokens of whole replies per second, and the longest
time that an agent waited for the next event.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from proxy.config.settings import load
from proxy.server.listener import running
from tokentape import AsyncClient

AGENTS = 64
TOKENS = (50, 400)
SECONDS = 90.0
BETWEEN_S = 5.0
UPDATE_S = 2.0
MODES: dict[str, dict[str, Any]] = {
    "drain": {"in_flight": "drain", "drain_s": 600},
    "abort": {"in_flight": "abort", "drain_s": 0.1},
    "resume": {"in_flight": "resume"},
    "rolling": {"in_flight": "resume", "rolling": True},
}
SAMPLED: dict[str, tuple[str, dict[str, str]]] = {
    "vllm": ("vllm:generation_tokens_total", {}),
    "sglang": ("sglang:generation_tokens_total", {}),
}
# Before and after the weights change.
UPDATE = {
    "vllm": ("/pause?mode=abort", "/reset_prefix_cache", "/resume"),
    "sglang": ("/pause_generation", "/flush_cache", "/continue_generation"),
}


@dataclass(slots=True)
class Seen:
    """What the agents received, and how long each update took."""

    longest_s: float = 0
    tokens: int = 0
    replies: int = 0
    cut: int = 0
    updates: list[float] = field(default_factory=list)


async def sampled(http: aiohttp.ClientSession, urls: Sequence[str], kind: str) -> float:
    """Return how many tokens the engines have sampled."""
    total = 0.0
    for url in urls:
        async with http.get(f"{url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        name, labels = SAMPLED[kind]
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        total += sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
    return total


async def update(http: aiohttp.ClientSession, urls: Sequence[str], kind: str, *endpoint: Any) -> None:
    """Pause the engines as trainers do, for the time of an update; in a rolling one, this endpoint only."""
    pause, clear, resume = UPDATE[kind]
    for path in (pause, clear, resume):
        for url in [one["url"] for one in endpoint] or urls:
            async with http.post(url + path, json={"mode": "abort"} if path == pause else {}) as response:
                response.raise_for_status()
        if path == pause:
            await asyncio.sleep(UPDATE_S)


async def agent(http: aiohttp.ClientSession, base_url: str, number: int, seen: Seen) -> None:
    """Stream one reply after the other; a reply that was cut is streamed again."""
    lengths, ends = random.Random(number), perf_counter() + SECONDS
    # No part of a character, and no special token: a cut inside a character is another topic.
    bias = {str(token): -100 for token in (*range(94, 256), *range(4087, 4096))}
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": f"Tell story {number}."}], "stream": True,
        "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}, "logit_bias": bias,
    }  # fmt: skip
    while perf_counter() < ends:
        length = lengths.randint(*TOKENS)
        while await ending(http, base_url, body | {"max_tokens": length}, seen) != "length":
            seen.cut += 1
        seen.tokens += length
        seen.replies += 1


async def ending(http: aiohttp.ClientSession, base_url: str, body: dict[str, Any], seen: Seen) -> str:
    """Stream a reply; return whether it ends with its `length`, or is `cut`."""
    last, is_whole = perf_counter(), False
    try:
        async with http.post(f"{base_url}/chat/completions", json=body) as response:
            async for line in response.content:
                seen.longest_s, last = max(seen.longest_s, perf_counter() - last), perf_counter()
                is_whole = is_whole or b'"finish_reason":"length"' in line
    except aiohttp.ClientError:
        return "cut"
    return "length" if is_whole else "cut"


async def trainer(client: AsyncClient, make: Any, options: dict[str, Any], seen: Seen) -> None:
    """Update again and again."""
    ends, version = perf_counter() + SECONDS, 0
    while perf_counter() + BETWEEN_S < ends:
        await asyncio.sleep(BETWEEN_S)
        began, version = perf_counter(), version + 1
        await client.update_policy(version, make, **options)
        seen.updates.append(perf_counter() - began)


async def measured(mode: str, urls: Sequence[str]) -> None:
    """Measure one mode, and print its row."""
    endpoints = [{"url": url, "name": f"engine{number}"} for number, url in enumerate(urls)]
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            listen="127.0.0.1:0",
            engines={"endpoints": endpoints},
            store={"url": f"embedded:{folder}/store"},
            agents={"max_resumes": 0 if mode == "abort" else 100},
        )
        unlimited = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=900)
        )
        async with running(settings) as served, unlimited as http, AsyncClient(served.url) as client:
            async with http.get(f"{served.url}/engines") as response:
                kind = (await response.json())["engines"][0]["kind"]
            before, began = await sampled(http, urls, kind), perf_counter()
            bases = [f"{served.url}/rollouts/r{number}/v1" for number in range(AGENTS)]
            await asyncio.gather(
                trainer(client, partial(update, http, urls, kind), MODES[mode], seen),
                *(agent(http, base, number, seen) for number, base in enumerate(bases)),
            )
            took_s = perf_counter() - began
            count = await sampled(http, urls, kind) - before
    sys.stdout.write(
        f"| {mode} | {len(urls)} | {len(seen.updates)} | {count:,.0f} | {count - seen.tokens:,.0f} | {seen.replies} |"
        f" {seen.cut} | {took_s:.0f} s | {seen.tokens / took_s:,.0f} | {seen.longest_s:.1f} s |\n"
    )
    sys.stdout.flush()


async def main(urls: Sequence[str]) -> None:
    """Measure all modes; `rolling` with two engines."""
    sys.stdout.write("| mode | engines | updates | sampled | lost | replies | cut | time | tokens/s | longest wait |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|---|---|\n")
    for mode in ("drain", "abort", "resume"):
        await measured(mode, urls[:1])
    if len(urls) > 1:
        for mode in ("resume", "rolling"):
            await measured(mode, urls)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
