"""Synthetic streams: the engine is called unstreamed, and the client gets the stream that it would have sent."""

import asyncio

import aiohttp
import orjson
import pytest

from .calls import CASES, flagged, post, sampled
from .environment import SGLANG, VLLM
from .test_leaving import LONG, until
from .through import through_proxy

REPLAY = {"streaming": "replay"}
# The engine's message differs between its two framings (tests/protocols/test_accumulators.py): ids are the same.
OTHER_MESSAGE = {"reasoning", "required tool"}
PLAIN = [
    name
    for name in CASES
    if "asked" not in name and name not in ("two prompts", "echo", "no tokens", "reasoning hidden")
]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("case", PLAIN)
async def test_a_synthetic_stream_has_the_contents_of_the_engines_own(vllm, http, tmp_path, case):
    """Texts, calls, reasoning, finish reasons and the keys of every event; and the step has the ids of the whole
    response.
    """
    path, body = CASES[case]
    body = body | {"stream_options": {"include_usage": True}}
    async with through_proxy(vllm.url, tmp_path, record=REPLAY) as proxy:
        live = await post(http, vllm.url + path, body, stream=True)
        replayed = await post(http, f"{proxy.url}/rollouts/r1{path}", body, stream=True)
        _, direct_answers = await post(http, vllm.url + path, flagged("vllm", path, CASES[case][1]), stream=False)
        (step,) = await proxy.steps("r1")

    if case not in OTHER_MESSAGE:
        assert contents_from(live[1]) == contents_from(replayed[1])
        assert counted(live[1]) == counted(replayed[1])
    assert keys(replayed[1]) <= keys(live[1]) | ALWAYS
    assert sampled(direct_answers, stream=False)[0]["ids"] == step["choices"][0]["ids"]
    assert (step["fidelity"]["exact"], step["extra"]["streaming"]) == (True, "replay")


def counted(chunks) -> dict:
    """Return usage without the number of reasoning tokens: vLLM 0.32's streams count one more."""
    return {key: value for key, value in chunks[-1]["usage"].items() if key != "completion_tokens_details"}


# Text in an event, and the finish reason in another: as vLLM sends them unless all of it is one token. Reasoning that the
# unstreamed response alone has is a delta of its own, as vLLM's.
TEXT = ("delta", "finish_reason", "index", "logprobs", "token_ids")
ALWAYS = {(), ("reasoning",), TEXT, tuple(sorted((*TEXT, "stop_reason")))}


def keys(chunks) -> set[tuple[str, ...]]:
    """Return the keys of choices and of their deltas."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {tuple(sorted(part)) for choice in choices for part in (choice, choice.get("delta") or ())}


def contents_from(chunks) -> dict:
    """Return texts, calls by name and arguments, and the finish reason, by choice."""
    found: dict = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            kept = found.setdefault(choice["index"], {"calls": {}, "finish": None, "text": {}})
            kept["finish"] = choice["finish_reason"] or kept["finish"]
            delta = choice.get("delta") or {"text": choice.get("text")}
            for key in ("content", "reasoning", "reasoning_content", "text"):
                kept["text"][key] = kept["text"].get(key, "") + (delta.get(key) or "")
            for call in delta.get("tool_calls") or []:
                name, arguments = kept["calls"].get(call["index"], ("", ""))
                function = call["function"]
                kept["calls"][call["index"]] = (
                    name or function.get("name"),
                    arguments + (function.get("arguments") or ""),
                )
    return found


async def test_a_client_disconnect_from_a_synthetic_stream_stops_the_engine(vllm, tmp_path):
    """The client gets comments meanwhile; when it disconnects, the engine's request is aborted."""
    async with (
        through_proxy(vllm.url, tmp_path, record=REPLAY | {"keep_alive_interval_s": 0.1}) as proxy,
        aiohttp.ClientSession() as http,
    ):
        await until(lambda running: running == 0, vllm.running)
        response = await http.post(f"{proxy.url}/rollouts/r1/v1/chat/completions", json=LONG | {"stream": True})
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 30)
        await until(lambda running: running == 1, vllm.running)
        response.close()
        await until(lambda running: running == 0, vllm.running)

    assert first == b": keep-alive\n\n"


async def test_the_engine_type_is_detected(engine, http, tmp_path):
    """By its responses: kind and version, and that its streams lose nothing."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        (shown,) = (await proxy.get("/engines"))["engines"]

    assert (engine.kind, {"vllm": VLLM, "sglang": SGLANG}[engine.kind]) == (shown["kind"], shown["version"])
    assert shown["streams"] == {"chat": "live", "completions": "live"}
    assert orjson.dumps(shown["loses"])
