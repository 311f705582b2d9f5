"""Measures continued turns with a real vLLM: time to first token, and hits of its prefix cache, in `append` and in `off`.

`python -m benchmarks.prefix_cache --engine http://127.0.0.1:8000 --model NAME` prints a table. No other client may use the
engine meanwhile, since its counters are those of all calls.
"""

import argparse
import asyncio
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import orjson

from benchmarks import results
from benchmarks.continuation import stream
from benchmarks.servers import Server, started

MODES = ("off", "append")
_WORDS = (
    "river",
    "stone",
    "cloud",
    "letter",
    "seven",
    "garden",
    "window",
    "paper",
    "silver",
    "bread",
    "winter",
    "music",
)


@dataclass(frozen=True)
class Conversation:
    """One conversation: seconds to the first token and prompt tokens by turn, hits in tokens, and exported sequences.

    `requests`: the number of requests to `/tokenize` and `/detokenize`.
    `refused`: the reasons of turns that were not continued. `rendering_s`: seconds of a request to `/tokenize` with the
    messages of the last turn, sent directly.
    """

    first_s: Sequence[float]
    prompt_tokens: Sequence[int]
    hits: float
    requests: Sequence[float]
    sequences: int
    refused: Sequence[str]
    rendering_s: float


def main() -> None:
    """Measure, print a table, and write it with --write."""
    options = _options()
    with (
        tempfile.TemporaryDirectory() as folder,
        started("tokentape", options.engine, f"embedded:{folder}/off", "off") as off,
        started("tokentape", options.engine, f"embedded:{folder}/append", "append") as append,
    ):
        rounds, block = asyncio.run(_measure(options, {"off": off, "append": append}))
    text, how = table(rounds), described(options, rounds, block)
    print(how, text, sep="\n")
    if options.write:
        arguments = " ".join("URL" if word == options.engine else shlex.quote(word) for word in sys.argv[1:])
        command = f"python -m benchmarks.prefix_cache {arguments}"
        results.write(f"continuation-{options.write}", "Continued turns with a real vLLM", command, how, text)


def described(options: argparse.Namespace, rounds: Sequence[Mapping[str, Conversation]], block: str) -> str:
    """Return how the conversations were measured, and what was not continued."""
    refused = Counter(reason for pair in rounds for reason in pair["append"].refused)
    reasons = ", ".join(f"{count} ({name})" for name, count in refused.items())
    return (
        f"{len(rounds)} paired rounds of a streamed conversation of {options.turns} turns, with about {options.tokens:,} "
        f"tokens in the first prompt and at most {options.sampled} sampled tokens per turn; one client, and a new "
        f"`cache_salt` for each conversation. Hits: `vllm:prefix_cache_hits_total`, in blocks of {block} tokens. Later "
        f"turns not continued in `append`: {reasons or 'none'}.\n"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_cache", description=__doc__)
    parser.add_argument("--engine", required=True, help="URL of a vLLM that no other client uses")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=1_000, help="tokens of the first prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--sampled", type=int, default=200, help="max_tokens of each call")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--extra", default="{}", help="JSON with more fields of each call, such as temperature")
    parser.add_argument("--template", type=Path, help="a chat template (vLLM requires --trust-request-chat-template)")
    parser.add_argument(
        "--write", metavar="NAME", help="write the result to benchmarks/results and to its place in docs"
    )
    return parser.parse_args()


def table(rounds: Sequence[Mapping[str, Conversation]]) -> str:
    """Return the table of paired conversations by mode."""
    later = {mode: [1000 * s for pair in rounds for s in pair[mode].first_s[1:]] for mode in MODES}
    added = [ours - off for off, ours in zip(later["off"], later["append"], strict=True)]

    def row(what: str, value: Any) -> list[str]:
        return [what, *(value([pair[mode] for pair in rounds], mode) for mode in MODES)]

    rows = [
        row("first turn, time to first token (ms)", lambda all_, _: f"{1000 * median(c.first_s[0] for c in all_):.1f}"),
        row("later turns, time to first token (ms)", lambda _, mode: f"{median(later[mode]):.1f}"),
        ["added to later turns, median of pairs (ms)", "", f"{median(added):+.1f}"],
        row(
            "`/tokenize` of the last turn alone (ms)",
            lambda all_, _: f"{1000 * median(c.rendering_s for c in all_):.1f}",
        ),
        row("requests to `/tokenize`, per later turn", lambda all_, _: _per_turn(all_, 0)),
        row("requests to `/detokenize`, per later turn", lambda all_, _: _per_turn(all_, 1)),
        row("prompt tokens of later turns", lambda all_, _: f"{mean(_later_tokens(c) for c in all_):,.0f}"),
        row("of these, hits of the prefix cache", lambda all_, _: f"{mean(c.hits for c in all_):,.0f}"),
        row("share", lambda all_, _: f"{sum(c.hits for c in all_) / sum(map(_later_tokens, all_)):.0%}"),
        row("exported sequences per conversation", lambda all_, _: f"{mean(c.sequences for c in all_):.1f}"),
    ]
    return results.table(["per conversation", *(f"`{mode}`" for mode in MODES)], rows)


def _per_turn(all_: Sequence[Conversation], which: int) -> str:
    return f"{sum(c.requests[which] for c in all_) / sum(len(c.first_s) - 1 for c in all_):.1f}"


def _later_tokens(conversation: Conversation) -> int:
    return sum(conversation.prompt_tokens[1:])


async def _measure(
    options: argparse.Namespace, servers: Mapping[str, Server]
) -> tuple[list[dict[str, Conversation]], str]:
    """Return the conversations of each round by mode, without a first one that is not counted, and the block size."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
        words = await _word_count(http, options)
        rounds = []
        for number in range(options.rounds + 1):
            modes = MODES if number % 2 else MODES[::-1]
            rounds.append({mode: await _converse(http, options, servers[mode], words, number) for mode in modes})
        return rounds[1:], await _block_size(http, options.engine)


async def _word_count(http: aiohttp.ClientSession, options: argparse.Namespace) -> int:
    """Return how many words have about `options.tokens` tokens."""
    sample = _text(random.Random(0), 500)
    async with http.post(f"{options.engine}/tokenize", json={"model": options.model, "prompt": sample}) as response:
        response.raise_for_status()
        return max(1, options.tokens * 500 // (await response.json())["count"])


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(words))


async def _converse(
    http: aiohttp.ClientSession, options: argparse.Namespace, server: Server, words: int, number: int
) -> Conversation:
    """Run a conversation. Raises RuntimeError if the engine served other calls meanwhile."""
    chance, rollout = random.Random(number), f"r{number}"
    body = {"model": options.model, "seed": number, "max_tokens": options.sampled, **orjson.loads(options.extra)}
    if options.template is not None:
        body["chat_template"] = options.template.read_text()
    body["cache_salt"] = f"{time.time_ns()}"
    messages = [{"role": "user", "content": _text(chance, words)}]
    before = await _counters(http, options.engine)
    replies = []
    for turn in range(options.turns):
        if turn:
            messages.append({"role": "assistant", "content": replies[-1].content})
            messages.append({"role": "user", "content": _text(chance, 8)})
        replies.append(await stream(http, f"{server.url}/rollouts/{rollout}/v1", {**body, "messages": messages}))
    after = await _counters(http, options.engine)
    prompt_tokens = [reply.prompt_tokens for reply in replies]
    if after["queries"] - before["queries"] != sum(prompt_tokens):
        raise RuntimeError(f"the engine counted other calls than those of {rollout}: no other client may use it")
    async with http.get(f"{server.url}/rollouts/{rollout}/export?format=sequences") as response:
        rows = (await response.json())["rows"]
    async with http.get(f"{server.url}/rollouts/{rollout}/tree") as response:
        marks = [node.get("continuation") or {} for node in (await response.json())["nodes"]]
    refused = [mark["reason"] for mark in marks if "kept" not in mark and "reason" in mark]
    rendering_s = await _rendering_s(http, options, {**body, "messages": messages})
    return Conversation(
        [reply.first_s for reply in replies],
        prompt_tokens,
        after["hits"] - before["hits"],
        [after[name] - before[name] for name in ("tokenize", "detokenize")],
        len(rows),
        refused,
        rendering_s,
    )


async def _rendering_s(http: aiohttp.ClientSession, options: argparse.Namespace, body: Mapping[str, Any]) -> float:
    fields = {
        name: body[name] for name in ("model", "messages", "chat_template", "chat_template_kwargs") if name in body
    }
    sent = time.perf_counter()
    async with http.post(f"{options.engine}/tokenize", json=fields) as response:
        response.raise_for_status()
        await response.read()
    return time.perf_counter() - sent


async def _counters(http: aiohttp.ClientSession, engine: str) -> dict[str, float]:
    """Return the prompt tokens, the ones in the prefix cache, and the requests to the tokenizer's endpoints, as counts."""
    async with http.get(f"{engine}/metrics") as response:
        metrics = await response.text()
    cache = {name: _total(metrics, rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$") for name in ("queries", "hits")}
    paths = ("tokenize", "detokenize")
    return cache | {path: _total(metrics, rf'^http_requests_total{{handler="/{path}",.*}} (\S+)$') for path in paths}


def _total(metrics: str, pattern: str) -> float:
    """Return the sum of the numbers that a pattern finds."""
    return sum(map(float, re.findall(pattern, metrics, re.MULTILINE)))


async def _block_size(http: aiohttp.ClientSession, engine: str) -> str:
    async with http.get(f"{engine}/metrics") as response:
        found = re.search(r'cache_config_info{.*block_size="(\d+)"', await response.text())
    return found[1] if found else "an unknown number of"


if __name__ == "__main__":
    main()
