"""Drift, explained and counted, over real sockets: texts from a tokenizer or the engine, totals at the finish."""

import asyncio

import pytest
from aiohttp import web
from fakes import proxying
from tiny_tokenizer import make_tokenizer

ASK, MORE = {"role": "user", "content": "Say hi"}, {"role": "user", "content": "more"}
REPLY = {"role": "assistant", "content": "hello there"}
TURNS = (([1, 3, 6, 7, 2, 1, 4], [8, 9, 2]), ([1, 3, 6, 7, 2, 1, 4, 8, 2, 1, 3], [7, 2]))


def answer_of(prompt: list[int], ids: list[int], reply: dict) -> dict:
    entries = [{"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []} for _ in ids]
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": prompt,
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": reply, "logprobs": {"content": entries}, "token_ids": ids}
        ],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)},
    }


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Texts may take as long as a busy machine needs."""
    monkeypatch.setattr("proxy.drifting._TEXTS_WITHIN_S", 600.0)


@pytest.fixture
def drifting(engine):
    """An engine whose second prompt lacks a token that it sampled; `engine.texts` are what /detokenize tells."""
    turns = iter(TURNS)
    engine.texts = iter(())

    async def answering(request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/detokenize":
            text = next(engine.texts, None)
            return web.json_response(
                {"prompt": text} if text is not None else {}, status=200 if text is not None else 500
            )
        return web.json_response(answer_of(*next(turns), REPLY))

    engine.answering = answering
    return engine


async def two_turns(http, url: str) -> None:
    for messages in ([ASK], [ASK, REPLY, MORE]):
        async with http.post(
            f"{url}/rollouts/r1/v1/chat/completions", json={"model": "m", "messages": messages}
        ) as answer:
            assert 200 == answer.status


async def tree(http, url: str) -> dict:
    async with http.get(f"{url}/rollouts/r1/tree") as answer:
        return await answer.json()


async def test_a_boundary_is_told_with_the_texts_of_the_engine(store, drifting, http):
    """Where they part, with the ids and their texts, and why."""
    drifting.texts = iter(["hello there</s>", "hello</s>"])
    async with proxying(drifting.url, store) as served:
        await two_turns(http, served.url)
        (drift,) = (await tree(http, served.url))["drift"]

    assert (8, "hello there</s>", "hello</s>", "ok", "other") == tuple(
        drift[name] for name in ("index", "expected_text", "found_text", "texts", "kind")
    )
    assert ([3, 6, 7, 2, 1, 4, 8, 9, 2], [3, 6, 7, 2, 1, 4, 8, 2, 1, 3]) == (
        drift["expected_ids"][-9:],
        drift["found_ids"][-10:],
    )


async def test_without_texts_the_ids_are_told(store, drifting, http):
    """An engine that cannot tell them costs the report nothing else."""
    async with proxying(drifting.url, store) as served:
        await two_turns(http, served.url)
        (drift,) = (await tree(http, served.url))["drift"]

    assert (None, None, "unavailable", "other") == tuple(
        drift[name] for name in ("expected_text", "found_text", "texts", "kind")
    )


async def test_texts_that_take_too_long_are_named(store, drifting, http, monkeypatch, caplog):
    """A tree without texts says that it is for the time, and does not guess a kind; neither does the count at the finish."""
    monkeypatch.setattr("proxy.drifting._TEXTS_WITHIN_S", 0.01)
    sampled, over = drifting.answering, asyncio.Event()

    async def slow(request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/detokenize":
            await over.wait()
        return await sampled(request, body)

    drifting.answering = slow
    async with proxying(drifting.url, store) as served:
        await two_turns(http, served.url)
        (drift,) = (await tree(http, served.url))["drift"]
        async with http.get(f"{served.url}/rollouts/r1/tree?texts=false") as shown:
            (unasked,) = (await shown.json())["drift"]
        counted = await finished_drift(http, served.url)
        over.set()

    assert ("timeout", None, None, "unexplained") == tuple(
        drift[name] for name in ("texts", "expected_text", "found_text", "kind")
    )
    assert ("not_requested", "other") == (unasked["texts"], unasked["kind"])
    assert {"unexplained": 1} == counted
    assert "1 of 1 places of drift are counted as unexplained" in caplog.text


async def test_only_so_many_texts_are_looked_up(store, drifting, http, monkeypatch):
    """Those beyond the first ones say so, and are not given a kind that texts might contradict."""
    monkeypatch.setattr("proxy.drifting._MOST_LOOKED_UP", 0)
    async with proxying(drifting.url, store) as served:
        await two_turns(http, served.url)
        (drift,) = (await tree(http, served.url))["drift"]

    assert ("over_limit", "unexplained") == (drift["texts"], drift["kind"])


async def test_a_configured_tokenizer_tells_the_texts(store, drifting, http, tmp_path):
    """The engine is not asked then."""
    endpoint = {"url": drifting.url, "name": "fake", "tokenizer": str(make_tokenizer(tmp_path))}
    async with proxying(None, store, engines={"endpoints": [endpoint]}) as served:
        await two_turns(http, served.url)
        (drift,) = (await tree(http, served.url))["drift"]

    assert drift["expected_text"].endswith("hello there </s>")
    assert 2 == len(drifting.asked)


async def test_drift_is_counted_when_the_rollout_is_finished(store, drifting, http):
    """By kind: on the rollout, and once in the metrics. Before that nobody has counted."""
    async with proxying(drifting.url, store) as served:
        await two_turns(http, served.url)
        async with http.get(f"{served.url}/rollouts/r1") as shown:
            assert (await shown.json())["drift"] is None
        counted = await finished_drift(http, served.url)
        async with http.get(f"{served.url}/metrics") as shown:
            metrics = await shown.text()

    assert {"other": 1} == counted
    assert 'tokentape_drift_total{kind="other"} 1.0' in metrics


async def finished_drift(http, url: str) -> dict:
    """The drift of the rollout, which is finished twice and counted once."""
    for _ in range(2):
        async with http.post(f"{url}/rollouts/r1/finish", json={"status": "completed"}) as finished:
            assert 200 == finished.status
    while (counted := await drift_of(http, url)) is None:
        await asyncio.sleep(0.005)
    return counted


async def drift_of(http, url: str):
    async with http.get(f"{url}/rollouts/r1") as shown:
        return (await shown.json())["drift"]
