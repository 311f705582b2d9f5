"""What clients want told of tokens in their replies: by header or by the rollout's opening, or refused with a reason."""

import orjson
import pytest
from fakes import proxying
from recorded import load
from simulated_tokenizer import make_simulated_tokenizer
from stored import stored_steps

CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 24}
IDS, PIECES = {"X-Reply-Ids": "choices"}, {"X-Reply-Tokens": "pieces"}
WHOLE = load("chat_ids_lp")
RECORDED = orjson.loads(WHOLE.response)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_simulated_tokenizer(tmp_path_factory.mktemp("tokenizer")))


async def asked(http, engine, store, *, headers=None, opening=None, path=CHAT, endpoint=None, **fields):
    """The status and the JSON of one call."""
    endpoints = [{"url": engine.url, "name": "fake", **(endpoint or {})}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        if opening is not None:
            async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r1", **opening}) as opened:
                assert 201 == opened.status, await opened.text()
        async with http.post(served.url + path, json=BODY | fields, headers=headers) as response:
            text = await response.read()
            return response.status, orjson.loads(text) if response.content_type == "application/json" else text


@pytest.mark.parametrize(
    "how", [{"headers": IDS}, {"opening": {"reply": {"ids": "choices"}}}], ids=["by header", "by the rollout"]
)
async def test_ids_on_each_choice(store, engine, http, how):
    """Those of the engine; beside them, the client sees what it asked for and no more."""
    engine.plays(WHOLE)
    status, shown = await asked(http, engine, store, **how)
    (choice,) = shown["choices"]
    (recorded,) = RECORDED["choices"]

    assert 200 == status
    assert (RECORDED["prompt_token_ids"], recorded["token_ids"]) == (
        choice["prompt_token_ids"],
        choice["response_token_ids"],
    )
    assert (None, None) == (shown["prompt_token_ids"], choice["token_ids"])


async def test_the_engine_learns_nothing_of_it(store, engine, http):
    """The headers are ours; and the step keeps what its client saw."""
    engine.plays(WHOLE)
    _, shown = await asked(http, engine, store, headers=IDS)
    (step,) = await stored_steps(store, "r1")

    assert set() == {name for name in engine.headers[0] if name.startswith("x-reply")}
    assert shown == step.response
    assert () == step.problems


async def test_a_stream_is_told_of_the_whole_reply(store, engine, http):
    """It is asked unstreamed, so that ids stand where a choice ends, whatever the engine streams."""
    engine.plays(WHOLE)
    _, events = await asked(http, engine, store, headers=IDS, stream=True)
    chunks = [orjson.loads(event[6:]) for event in events.split(b"\n\n") if event.startswith(b"data: {")]
    last = chunks[-1]["choices"][0]

    assert "stream" not in engine.requests[0]
    assert RECORDED["choices"][0]["finish_reason"] == last["finish_reason"]
    assert RECORDED["choices"][0]["token_ids"] == last["response_token_ids"]


async def test_a_stream_that_cannot_be_made_so_is_refused(store, engine, http):
    """vLLM streams no prompt logprobs, so nobody can say what the stream would be."""
    status, told = await asked(http, engine, store, headers=IDS, stream=True, prompt_logprobs=1)

    assert (422, "stream") == (status, told["error"]["param"])
    assert [] == engine.requests


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"headers": PIECES}, "set engines.endpoints[].tokenizer"),
        ({"headers": {"X-Reply-Tokens": "words"}}, "Invalid X-Reply-Tokens 'words'; the only valid value is 'pieces'."),
        ({"headers": {"X-Reply-Ids": "top"}}, "Invalid X-Reply-Ids 'top'; the only valid value is 'choices'."),
        ({"headers": PIECES, "path": "/rollouts/r1/v1/completions", "prompt": "hi"}, "not for completions"),
        ({"headers": IDS, "endpoint": {"kind": "plain"}}, "fake is plain"),
        ({"headers": PIECES, "endpoint": {"kind": "llamacpp"}}, "fake is llamacpp"),
        ({"headers": PIECES, "endpoint": {"kind": "sglang"}, "top_logprobs": 2}, "alternatives as text only"),
        ({"opening": {"reply": {"tokens": "pieces"}}}, "install tokentape[tokenizer]"),
    ],
)
async def test_what_cannot_be_told_is_refused_before_it_is_sent(store, engine, http, how, why):
    """With what to do about it; nothing is recorded."""
    status, told = await asked(http, engine, store, **how)

    assert 422 == status
    assert why in told["error"]["message"]
    assert [] == engine.requests
    assert [] == await stored_steps(store, "r1")


async def test_ids_beyond_the_configured_vocabulary(store, engine, http, folder):
    """A tokenizer of another model has no pieces of them: null, where text would be taken for pieces."""
    engine.plays(load("chat_ids_lp_asids"))
    ids = orjson.loads(load("chat_ids_lp_asids").response)["choices"][0]["token_ids"]
    _, shown = await asked(http, engine, store, headers=PIECES, endpoint={"tokenizer": folder}, top_logprobs=1)

    assert engine.requests[0]["return_tokens_as_token_ids"] is True
    assert max(ids) > 2047
    assert shown["choices"][0]["logprobs"] is None


async def test_others_are_not_touched(store, engine, http, folder):
    """A call that wants none of it is sent and answered as ever, tokenizer or not."""
    engine.plays(WHOLE)
    _, shown = await asked(http, engine, store, endpoint={"tokenizer": folder})

    assert {"prompt_token_ids", "response_token_ids"}.isdisjoint(shown["choices"][0])
    assert RECORDED["choices"][0]["logprobs"] == shown["choices"][0]["logprobs"]


async def test_an_unknown_form_is_refused_when_a_rollout_is_opened(store, engine, http):
    """A misspelt one as well."""
    async with proxying(engine.url, store) as served:
        for reply in ({"tokens": "words"}, {"token": "pieces"}):
            async with http.post(f"{served.url}/rollouts", json={"reply": reply}) as response:
                assert (422, "reply") == (response.status, (await response.json())["error"]["param"])
