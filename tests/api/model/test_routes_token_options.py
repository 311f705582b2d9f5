"""Options of clients for ids and token strings in their responses: by header or per rollout."""

import orjson
import pytest
from tests.support.recorded import load
from tests.support.session import CHAT, session_with
from tests.support.simulated_tokenizer import make_simulated_tokenizer
from tests.support.stored import stored_steps

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 24}
IDS, PIECES = {"X-Reply-Ids": "choices"}, {"X-Reply-Tokens": "pieces"}
WHOLE = load("chat_ids_lp")
RECORDED = orjson.loads(WHOLE.response)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_simulated_tokenizer(tmp_path_factory.mktemp("tokenizer")))


async def call(engine, store, *, headers=None, opening=None, path=CHAT, endpoint=None, **fields):
    """Make one call; return its status and JSON."""
    endpoints = [{"url": engine.url, "name": "fake", **(endpoint or {})}]
    async with session_with(None, store, engines={"endpoints": endpoints}) as session:
        if opening is not None:
            await session.open("r1", **opening)
        response = await session.post(path, BODY | fields, headers=headers)
        return response.status, response.text if response.json is None else response.json


@pytest.mark.parametrize(
    "options", [{"headers": IDS}, {"opening": {"reply": {"ids": "choices"}}}], ids=["by header", "by the rollout"]
)
async def test_the_option_ids_adds_token_ids_to_each_choice(store, engine, options):
    """Other fields are those that the client requested."""
    engine.plays(WHOLE)
    status, shown = await call(engine, store, **options)
    (choice,) = shown["choices"]
    (recorded,) = RECORDED["choices"]

    assert status == 200
    assert RECORDED["prompt_token_ids"] == choice["prompt_token_ids"]
    assert recorded["token_ids"] == choice["response_token_ids"]
    assert (shown["prompt_token_ids"], choice["token_ids"]) == (None, None)


async def test_the_engine_does_not_get_the_headers_of_token_options(store, engine):
    """The step has the response that the client got."""
    engine.plays(WHOLE)
    _, shown = await call(engine, store, headers=IDS)
    (step,) = await stored_steps(store, "r1")

    assert {name for name in engine.headers[0] if name.startswith("x-reply")} == set()
    assert shown == step.response
    assert step.problems == ()


async def test_a_stream_with_token_ids_is_built_from_an_unstreamed_response(store, engine):
    """The ids are in the last chunk of each choice."""
    engine.plays(WHOLE)
    _, events = await call(engine, store, headers=IDS, stream=True)
    chunks = [orjson.loads(event[6:]) for event in events.split(b"\n\n") if event.startswith(b"data: {")]
    last = chunks[-1]["choices"][0]

    assert "stream" not in engine.requests[0]
    assert RECORDED["choices"][0]["finish_reason"] == last["finish_reason"]
    assert RECORDED["choices"][0]["token_ids"] == last["response_token_ids"]


async def test_a_stream_with_token_ids_and_prompt_logprobs_is_422(store, engine):
    """vLLM streams no prompt logprobs, so the shape of such a stream is unknown."""
    status, payload = await call(engine, store, headers=IDS, stream=True, prompt_logprobs=1)

    assert (status, payload["error"]["param"]) == (422, "stream")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": PIECES}, "set engines.endpoints[].tokenizer"),
        ({"headers": {"X-Reply-Tokens": "words"}}, "Invalid X-Reply-Tokens 'words'; the only valid value is 'pieces'."),
        ({"headers": {"X-Reply-Ids": "top"}}, "Invalid X-Reply-Ids 'top'; the only valid value is 'choices'."),
        ({"headers": PIECES, "path": "/rollouts/r1/v1/completions", "prompt": "hi"}, "not for completions"),
        ({"headers": IDS, "endpoint": {"kind": "plain"}}, "fake is plain"),
        ({"headers": PIECES, "endpoint": {"kind": "llamacpp"}}, "fake is llamacpp"),
        ({"headers": PIECES, "endpoint": {"kind": "sglang"}, "top_logprobs": 2}, "alternatives as text only"),
        ({"opening": {"reply": {"tokens": "pieces"}}}, "install transformers"),
    ],
)
async def test_an_unsupported_token_option_is_422_before_anything_is_sent(store, engine, options, message):
    """The message explains how to enable it; nothing is recorded."""
    status, payload = await call(engine, store, **options)

    assert status == 422
    assert message in payload["error"]["message"]
    assert engine.requests == []
    assert await stored_steps(store, "r1") == []


async def test_with_ids_beyond_the_configured_vocabulary_logprobs_are_null(store, engine, folder):
    """The tokenizer belongs to another model."""
    engine.plays(load("chat_ids_lp_asids"))
    ids = orjson.loads(load("chat_ids_lp_asids").response)["choices"][0]["token_ids"]
    _, shown = await call(engine, store, headers=PIECES, endpoint={"tokenizer": folder}, top_logprobs=1)

    assert engine.requests[0]["return_tokens_as_token_ids"] is True
    assert max(ids) > 2047
    assert shown["choices"][0]["logprobs"] is None


async def test_calls_without_token_options_are_unchanged(store, engine, folder):
    engine.plays(WHOLE)
    _, shown = await call(engine, store, endpoint={"tokenizer": folder})

    assert {"prompt_token_ids", "response_token_ids"}.isdisjoint(shown["choices"][0])
    assert RECORDED["choices"][0]["logprobs"] == shown["choices"][0]["logprobs"]


async def test_an_unknown_token_option_of_a_rollout_is_422(store, engine):
    async with session_with(engine, store) as session:
        for reply in ({"tokens": "words"}, {"token": "pieces"}):
            response = await session.post("/rollouts", {"reply": reply})
            assert (response.status, response.json["error"]["param"]) == (422, "reply")
