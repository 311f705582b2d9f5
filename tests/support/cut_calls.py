"""Calls to a scripted engine that ends their parts early, and what their clients read."""

from itertools import count

import orjson
from hypothesis import strategies as st
from tests.support.fakes import listening, proxying
from tests.support.scripted_engine import REPLY, ScriptedEngine
from tests.support.stored import stored_steps

MESSAGES = [{"role": "user", "content": "hi"}]
COUNT = len(REPLY)
NUMBERS = count(1)


def resuming(engine_url: str, store, **agents):
    endpoints = [{"url": engine_url, "name": "fake"}]
    engines = {"endpoints": endpoints, "eject_after": 100, "max_attempts": 9}
    return proxying(engine_url, store, agents={"max_resumes": 9, "resume_timeout_s": 20, **agents}, engines=engines)


async def answer_of(http, served, body: dict, rollout: str = "r1") -> tuple[int, bytes]:
    path = "chat/completions" if "messages" in body else "completions"
    async with http.post(f"{served.url}/rollouts/{rollout}/v1/{path}", json=body) as response:
        return response.status, await response.read()


def read(raw: bytes, *, is_stream: bool) -> tuple[str, list[str], dict, int]:
    """Return the text, the finish reasons, the usage, and the number of ids and roles of the response."""
    if not is_stream:
        whole = orjson.loads(raw)
        (choice,) = whole["choices"]
        message = choice.get("message") or {}
        return message.get("content") or choice.get("text", ""), [choice["finish_reason"]], whole["usage"], 1
    text, reasons, usage, heads = "", [], {}, set()
    for line in raw.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        heads.add((event["id"], event["created"]))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            heads.add("role" if "role" in delta else None)
            text += delta.get("content") or choice.get("text") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            assert choice.get("token_ids") is None
    return text, reasons, usage, len(heads - {None, "role"})


REPLIES = {
    "plain": (REPLY, []),
    "characters": ("Résumé: a \N{FOX FACE}, a \N{FAMILY}\N{ZERO WIDTH JOINER}, 中文, ok.", []),
    "stop": ("One, two, three. END of it, and more.", ["END of"]),
    "many stops": ("aabab abba, abab.", ["abb", "ba,"]),
    "no stop": ("To stop, or not to stoop.", ["stops", "stopped"]),
}
ends = st.lists(st.tuples(st.integers(0, COUNT - 1), st.sampled_from(["abort", "lost"])), max_size=4)


async def replied(http, store, body: dict, reply: str, ends=(), *, parses=False):
    """Return the response and the step of a call to an engine that ends its parts so."""
    engine, rollout = ScriptedEngine(reply, parses=parses), f"r{next(NUMBERS)}"
    engine.ends = [*ends]
    async with listening(engine.handle) as url, resuming(url, store) as served:
        status, raw = await answer_of(http, served, body, rollout)
        (step,) = await stored_steps(store, rollout)
    return status, raw, step


def content_of(step) -> str:
    (answer,) = step.response["choices"]
    return answer["message"]["content"] if "message" in answer else answer["text"]
