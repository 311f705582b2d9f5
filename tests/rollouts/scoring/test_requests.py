"""Scoring requests to engines."""

from contextlib import suppress
from math import exp, log

import aiohttp
import orjson
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.scoring import WINDOW, likely, score, scoring_as_sglang, scoring_as_vllm

from proxy.cli.audit import sender
from proxy.rollouts.scoring.requests import Kept, NotScored, OtherVocabulary, Scorer, TooLong, find_scorer
from proxy.rollouts.scoring.requests import sender as server_sender
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream

IDS = list(range(100, 140))


@pytest.fixture
async def send(engine):
    async with aiohttp.ClientSession() as session:
        yield sender(session, engine.url + "/v1")


async def test_vllm_is_detected_and_scores(engine, send):
    """Its first model and its context window are used."""
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)

    assert (scorer.kind, scorer.model, scorer.window) == ("vllm", "tiny", WINDOW)
    assert score(IDS) == await scorer.score(IDS)
    body = engine.requests[-1]
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == (IDS, 0, 1)
    # A vLLM with --return-sampling-mask refuses a temperature of 0, and calls without a top_k.
    assert (body["temperature"], body["top_k"]) == (1, 1)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_is_detected_and_scores(engine, send, path):
    """Older versions have another path of the server info; the context window may be unknown."""
    engine.respond = scoring_as_sglang
    engine.fixed_responses = {path: {"version": "0.5.23"}}
    scorer = await find_scorer(send, None, None)

    assert (scorer.kind, scorer.window) == ("sglang", None)
    assert score(IDS) == await scorer.score(IDS)


async def test_a_recorded_response_of_vllm_is_parsed():
    """The first id has no score."""
    text = load("cmpl_promptlp").response
    choice = orjson.loads(text)["choices"][0]

    async def send(method, path, body):
        return 200, text

    scores = await Scorer(send, "vllm").score(choice["prompt_token_ids"])
    assert scores[:3] == [None, -11.624502182006836, -9.571423530578613]
    assert len(scores) == 7


async def test_a_sequence_longer_than_the_context_window_is_too_long(engine, send):
    """A sequence of its length has no last score, since vLLM samples at least one token."""
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)
    full = [100 + n for n in range(WINDOW)]

    assert [*score(full)[:-1], None] == await scorer.score(full)
    with pytest.raises(TooLong, match="exceed the engine's context window"):
        await scorer.score([*full, 5])
    with pytest.raises(TooLong, match="maximum context length"):
        await Scorer(send, "vllm", "tiny").score([*full, 5])


@pytest.mark.parametrize(
    "text",
    [
        b"no JSON",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"prompt_logprobs": null}]}',
        b'{"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -1}}]}]}',
        b'{"choices": [{"prompt_logprobs": [null]}]}',
    ],
)
async def test_a_response_without_scores_raises_not_scored(text):
    async def send(method, path, body):
        return 200, text

    with pytest.raises(NotScored, match="no scores of the token ids"):
        await Scorer(send, "vllm").score([5, 6])


async def test_scores_of_other_ids_raise_not_scored():
    """SGLang returns the ids that it scored."""

    async def send(method, path, body):
        return 200, b'{"meta_info": {"input_token_logprobs": [[null, 5, null], [-1, 7, null]]}}'

    with pytest.raises(NotScored, match="other token ids"):
        await Scorer(send, "sglang").score([5, 6])


@pytest.mark.parametrize(("ids", "is_scored"), [([5, 7, 6], True), ([7, 7, 7], True), ([5, 6, 7], False)])
async def test_sglang_reports_the_last_id_of_the_vocabulary_as_0(ids, is_scored):
    """Only the greatest id of a sequence can be that one."""
    pairs = [[None, ids[0] if ids[0] != 7 else 0, None], [-1, 0, None], [-2, ids[2] if ids[2] != 7 else 0, None]]

    async def send(method, path, body):
        return 200, orjson.dumps({"meta_info": {"input_token_logprobs": pairs}})

    scorer = Scorer(send, "sglang")
    if is_scored:
        assert await scorer.score(ids) == [None, -1, -2]
    else:
        with pytest.raises(NotScored, match="other token ids"):
            await scorer.score(ids)


async def test_an_engine_that_cannot_score_raises_an_error_with_the_reason(engine, send):
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


async def test_the_api_key_is_sent_as_a_bearer_token(engine):
    from proxy.cli.audit import new_session

    async def respond(request, body):
        return web.json_response({"data": []})

    engine.respond = respond
    async with new_session("secret") as session:
        await find_scorer(sender(session, engine.url), "vllm", None)

    assert engine.headers[-1]["authorization"] == "Bearer secret"


def answering(body: bytes, seen: list | None = None):
    async def send(method, path, request):
        if seen is not None:
            seen.append(request)
        return 200, body

    return send


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_most_likely_tokens_are_sorted_and_complete(kind):
    """vLLM returns the token itself too if it is not among them. Too few of them are no scores."""
    vllm = b'{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -9}, "1": {"logprob": -2}, "2": {"logprob": -1}}]}]}'
    sglang = (
        b'{"meta_info": {"weight_version": "v3", "input_token_logprobs": [[null, 5, null], [-9, 6, null]], '
        b'"input_top_logprobs": [null, [[-1, 2, null], [-2, 1, null]]]}}'
    )
    seen: list = []
    scorer = Scorer(answering(vllm if kind == "vllm" else sglang, seen), kind)
    found = await scorer.score_at([5, 6], [1], 2)

    assert (found.logprobs, found.top_ids, found.top_logprobs) == ([-9.0], [2, 1], [-1.0, -2.0])
    assert (None if kind == "vllm" else "v3") == found.weight_version
    assert seen[0]["prompt_logprobs" if kind == "vllm" else "top_logprobs_num"] == 2
    with pytest.raises(NotScored, match="likely tokens at a position, 4 were requested"):
        await scorer.score_at([5, 6], [1], 4)


async def test_other_positions_are_not_parsed():
    """A response has an object for each token of a long prompt, and one row trains few of them."""
    body = b'{"choices": [{"prompt_logprobs": [null, {"x": 1}, {"7": {"logprob": -1.5}}]}]}'

    assert (await Scorer(answering(body), "vllm").score_at([5, 6, 7], [2])).logprobs == [-1.5]
    with pytest.raises(NotScored, match="no scores"):
        await Scorer(answering(body), "vllm").score_at([5, 6, 7], [1, 2])


async def test_a_response_that_is_too_large_is_not_read(engine):
    """Its size grows with the number of likely tokens."""
    engine.respond = scoring_as_vllm
    upstream = Upstream(settings_for(engine.url).engines, make_metrics(CollectorRegistry()))
    try:
        scorer = Scorer(server_sender(upstream, upstream.endpoints[0], max_bytes=100), "vllm")
        with pytest.raises(TooLong, match="more than 100 bytes"):
            await scorer.score(IDS)
    finally:
        await upstream.close()


async def test_scores_over_masks_are_normalized_over_their_tokens(engine, send):
    """Scores at other positions, and of the most likely tokens, are over all tokens."""
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)
    top = likely(IDS, 7)
    ids = [*IDS[:20], next(iter(top[20])), *IDS[21:]]
    kept = [*likely(ids, 3)[20]]
    found = await scorer.score_at(ids, [19, 20], top_k=2, masks={20: Kept(kept, 0.5)})

    plain = score(ids)
    over = plain[20] * 2 - log(sum(exp(2 * value) for value in likely(ids, 3)[20].values()))
    assert [plain[19], pytest.approx(over)] == found.logprobs
    assert ([*likely(ids, 2)[19], *likely(ids, 2)[20]], 0) == (found.top_ids, found.uncertain)


async def test_a_mask_with_tokens_that_the_engine_does_not_return_is_uncertain(engine, send):
    engine.respond = scoring_as_vllm
    scorer = await find_scorer(send, None, None)
    found = await scorer.score_at(IDS, [20], masks={20: Kept([*likely(IDS, 600)[20]][-3:])})

    assert found.uncertain == 1
    assert found.logprobs[0] <= 0


async def test_sglang_gets_a_bias_of_the_least_and_the_greatest_id_and_rejects_an_unknown_one(engine, send):
    """Without the bias it would exit. The bias of 0 changes no score."""
    engine.respond = scoring_as_sglang
    ids = [7, 3, 250, 9]
    await Scorer(send, "sglang").score(ids)
    assert engine.requests[-1]["sampling_params"]["logit_bias"] == {"3": 0, "250": 0}

    async def respond(request, body):
        message = "logit_bias must has keys in [0, 199], got 250."
        return web.json_response({"error": {"message": message}}, status=400)

    engine.respond = respond
    with pytest.raises(OtherVocabulary, match="it has 200 tokens, and an id is beyond these"):
        await Scorer(send, "sglang").score(ids)


async def test_no_more_likely_tokens_are_requested_for_a_mask_than_the_engine_has(engine, send):
    """SGLang would exit. Ids and masks show how many it has at least."""
    engine.respond = scoring_as_sglang
    masks = {2: Kept(list(range(40)))}
    with suppress(NotScored):
        await Scorer(send, "sglang").score_at([7, 3, 50, 9], [2], masks=masks)

    assert engine.requests[-1]["top_logprobs_num"] == 51
