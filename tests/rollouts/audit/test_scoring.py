"""How engines are asked to score ids."""

import aiohttp
import orjson
import pytest
from aiohttp import web
from recorded import load
from scoring import WINDOW, score, scoring_as_sglang, scoring_as_vllm

from proxy.cli.audit import sender
from proxy.rollouts.audit.scoring import NotScored, Scorer, TooLong, find_scorer

IDS = list(range(100, 140))


@pytest.fixture
async def send(engine):
    async with aiohttp.ClientSession() as session:
        yield sender(session, engine.url + "/v1")


async def test_vllm_is_recognised_and_scores(engine, send):
    """By its version; its first model and its window are used."""
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)

    assert ("vllm", "tiny", WINDOW) == (scorer.kind, scorer.model, scorer.window)
    assert score(IDS) == await scorer.score(IDS)
    asked = engine.requests[-1]
    assert (IDS, 0, 1) == (asked["prompt"], asked["prompt_logprobs"], asked["max_tokens"])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_is_recognised_and_scores(engine, send, path):
    """By its server info, which lies under another path in older ones; it may not say its window."""
    engine.respond = scoring_as_sglang
    engine.fixed_responses = {path: {"version": "0.5.23"}}
    scorer = await find_scorer(send, None, None)

    assert ("sglang", None) == (scorer.kind, scorer.window)
    assert score(IDS) == await scorer.score(IDS)


async def test_an_answer_of_a_real_vllm_is_read():
    """The first id has no score; each other one's is under the id itself, whatever else is told."""
    told = load("cmpl_promptlp").response
    choice = orjson.loads(told)["choices"][0]

    async def send(method, path, body):
        return 200, told

    scores = await Scorer(send, "vllm").score(choice["prompt_token_ids"])
    assert [None, -11.624502182006836, -9.571423530578613] == scores[:3]
    assert 7 == len(scores)


async def test_the_window_is_kept(engine, send):
    """A sequence that fills it loses its last score, since a prompt must leave room for a token; a longer one is told."""
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)
    full = [100 + n for n in range(WINDOW)]

    assert [*score(full)[:-1], None] == await scorer.score(full)
    with pytest.raises(TooLong, match="exceed the engine's context window"):
        await scorer.score([*full, 5])
    with pytest.raises(TooLong, match="maximum context length"):
        await Scorer(send, "vllm", "tiny").score([*full, 5])


@pytest.mark.parametrize(
    "told",
    [
        b"no JSON",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"prompt_logprobs": null}]}',
        b'{"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -1}}]}]}',
        b'{"choices": [{"prompt_logprobs": [null]}]}',
    ],
)
async def test_an_answer_without_the_scores_is_told(told):
    """It is no finding about the sequence."""

    async def send(method, path, body):
        return 200, told

    with pytest.raises(NotScored, match="no scores of the token ids"):
        await Scorer(send, "vllm").score([5, 6])


async def test_scores_of_other_ids_are_refused():
    """SGLang says which ids it scored."""

    async def send(method, path, body):
        return 200, b'{"meta_info": {"input_token_logprobs": [[null, 5, null], [-1, 7, null]]}}'

    with pytest.raises(NotScored, match="other token ids"):
        await Scorer(send, "sglang").score([5, 6])


async def test_what_cannot_score_is_told(engine, send):
    """A refusal with its status, an unknown engine, an unknown model, a kind that has no scoring, nobody there."""
    with pytest.raises(NotScored, match="returned status 500"):
        await Scorer(send, "vllm").score([5, 6])
    engine.respond = scoring_as_vllm
    with pytest.raises(NotScored, match="it serves tiny"):
        await find_scorer(send, None, "other")
    with pytest.raises(NotScored, match="llamacpp"):
        await find_scorer(send, "llamacpp", None)
    engine.fixed_responses = {}
    with pytest.raises(NotScored, match="not detected as vLLM or SGLang"):
        await find_scorer(send, None, None)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(OSError, match="request to the engine at"):
            await find_scorer(sender(session, "http://127.0.0.1:9"), None, None)


async def test_the_engine_gets_its_key(engine):
    """As a bearer."""
    from proxy.cli.audit import ServerAddress

    async def respond(request, body):
        return web.json_response({"data": []})

    engine.respond = respond
    async with ServerAddress(engine.url, "secret").session() as session:
        await find_scorer(sender(session, engine.url), "vllm", None)

    assert "Bearer secret" == engine.headers[-1]["authorization"]
