"""What updates of the weights cost: calls to real engines while a trainer updates them, by what happens to running calls.

`python -m benchmarks.updates URL [URL]`: of vLLM with VLLM_SERVER_DEV_MODE=1, or of SGLang; the second one is for `rolling`.

Each agent streams one reply, and calls again until it is whole. An update pauses the engine for half a second, and begins
five seconds after the one before. Printed for each mode: the updates, the tokens that the engines sampled, those that are not
in a whole reply, the time until all replies are whole, and the longest time that an agent waited for the next event.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import aiohttp
import openai
from prometheus_client.parser import text_string_to_metric_families

from proxy.config.settings import load
from proxy.server.listener import running
from tokentape import AsyncClient

AGENTS = 64
TOKENS = 800
BETWEEN_S = 5.0
UPDATE_S = 0.5
MODES: dict[str, dict[str, Any]] = {
    "wait": {"in_flight": "drain", "drain_s": 600},
    "abort": {"in_flight": "abort", "drain_s": 0.1},
    "resume": {"in_flight": "resume"},
    "rolling": {"in_flight": "resume", "rolling": True},
}
SAMPLED: dict[str, tuple[str, dict[str, str]]] = {
    "vllm": ("vllm:generation_tokens_total", {}),
    "sglang": ("sglang:realtime_tokens_total", {"mode": "decode"}),
}
PAUSES = {"vllm": ("/pause?mode=abort", "/resume"), "sglang": ("/pause_generation", "/continue_generation")}


@dataclass(slots=True)
class Waits:
    """The longest time between two events of any reply, and the replies that were cut."""

    longest_s: float = 0
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
    paused = [one["url"] for one in endpoint] or urls
    pause, resume = PAUSES[kind]
    for url in paused:
        await http.post(url + pause, json={"mode": "abort"})
    await asyncio.sleep(UPDATE_S)
    for url in paused:
        await http.post(url + resume, json={})


async def agent(base_url: str, number: int, waits: Waits) -> None:
    """Stream a reply, and call again until it is whole."""
    messages: Any = [{"role": "user", "content": f"Tell story {number}."}]
    extra = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
    extra["logit_bias"] = {
        str(token): -100 for token in (*range(94, 256), *range(4087, 4096))
    }  # no part of a character
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=900) as client:
        while True:
            reason, last = None, perf_counter()
            try:
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=TOKENS, stream=True, extra_body=extra
                )
                async for chunk in stream:
                    waits.longest_s, last = max(waits.longest_s, perf_counter() - last), perf_counter()
                    reason = chunk.choices[0].finish_reason if chunk.choices else reason
            except openai.APIError:
                reason = None
            if reason == "length":
                return
            waits.cut += 1


async def trainer(client: AsyncClient, make: Any, options: dict[str, Any], waits: Waits) -> None:
    """Update again and again."""
    for version in range(1, 10_000):
        await asyncio.sleep(BETWEEN_S)
        began = perf_counter()
        await client.update_policy(version, make, **options)
        waits.updates.append(perf_counter() - began)


async def measured(mode: str, urls: Sequence[str]) -> None:
    """Measure one mode, and print its row."""
    endpoints = [{"url": url, "name": f"engine{number}"} for number, url in enumerate(urls)]
    waits = Waits()
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            listen="127.0.0.1:0",
            engines={"endpoints": endpoints},
            store={"url": f"embedded:{folder}/store"},
            agents={"max_resumes": 0 if mode == "abort" else 100},
        )
        async with running(settings) as served, aiohttp.ClientSession() as http, AsyncClient(served.url) as client:
            async with http.get(f"{served.url}/engines") as response:
                kind = (await response.json())["engines"][0]["kind"]
            before, began = await sampled(http, urls, kind), perf_counter()
            training = asyncio.create_task(trainer(client, partial(update, http, urls, kind), MODES[mode], waits))
            bases = [f"{served.url}/rollouts/r{number}/v1" for number in range(AGENTS)]
            await asyncio.gather(*(agent(base, number, waits) for number, base in enumerate(bases)))
            took_s = perf_counter() - began
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            count = await sampled(http, urls, kind) - before
    lost = count - AGENTS * TOKENS
    sys.stdout.write(
        f"| {mode} | {len(urls)} | {len(waits.updates)} | {count:,.0f} | {lost:,.0f} | {waits.cut} | {took_s:.0f} s |"
        f" {waits.longest_s:.1f} s |\n"
    )
    sys.stdout.flush()


async def main(urls: Sequence[str]) -> None:
    """Measure all modes; `rolling` with two engines."""
    sys.stdout.write("| mode | engines | updates | sampled | lost | replies cut | all whole after | longest wait |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    for mode in ("wait", "abort", "resume"):
        await measured(mode, urls[:1])
    if len(urls) > 1:
        for mode in ("resume", "rolling"):
            await measured(mode, urls)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
