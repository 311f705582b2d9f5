"""Configured tokenizers, with a real one: loaded once, in a thread, and never taken for an engine."""

import asyncio
import sys

import orjson
import pytest
from aiohttp import web
from fakes import proxying
from tiny_tokenizer import make_tokenizer

from proxy.config.sections import EndpointSettings
from proxy.errors import UnprocessableRequest
from proxy.upstream.tokenizers import Tokenizers, load

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Say hi"}]}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello there"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def endpoint(name: str, tokenizer=None) -> EndpointSettings:
    return EndpointSettings(url="http://e", name=name, tokenizer=None if tokenizer is None else str(tokenizer))


def test_text_and_ids(folder):
    """Special tokens are read and spelt as such, and none is added."""
    tokenizer = load(str(folder))

    assert [1, 3, 6, 7, 2] == tokenizer.encode("<s>user Say hi</s>")
    assert "<s>" in tokenizer.decode([1, 3])
    assert [1, 3, 6, 7, 2, 1, 4] == tokenizer.render(ASKED["messages"], None, reply=True)
    assert [1, 3, 6, 7, 2] == tokenizer.render(ASKED["messages"], [], reply=False)


def test_pieces(folder):
    """The vocabulary's own strings, None for an id that it has not."""
    assert ["<s>", "hello", None] == load(str(folder)).pieces([1, 8, 99])


@pytest.mark.parametrize("ids", [[2**40], [-1]])
def test_ids_that_it_does_not_have_are_not_decoded(folder, ids):
    """The error says so, whatever the library raises."""
    with pytest.raises(UnprocessableRequest, match="cannot decode the token ids"):
        load(str(folder)).decode(ids)


def test_what_a_template_refuses_is_a_value_error(folder):
    """Whatever its author raises."""
    with pytest.raises(ValueError, match="no such role"):
        load(str(folder)).render([{"role": "nobody", "content": ""}], None, reply=True)


async def test_an_endpoint_has_the_tokenizer_that_is_configured_for_it(folder):
    """Loaded once, however many ask; another endpoint has none."""
    tokenizers = Tokenizers([endpoint("a", folder), endpoint("b")])

    one, other = await asyncio.gather(tokenizers.get("a"), tokenizers.get("a"))
    assert one is other is not None
    assert await tokenizers.get("b") is None
    assert (True, False) == (bool(tokenizers), bool(Tokenizers([endpoint("b")])))


async def test_other_endpoints_have_other_tokenizers(folder):
    """Those that are put at run time; what was loaded stays loaded."""
    tokenizers = Tokenizers([endpoint("a", folder)])
    before = await tokenizers.get("a")
    tokenizers.replace([endpoint("b", folder)])

    assert await tokenizers.get("a") is None
    assert before is await tokenizers.get("b")


async def test_one_that_cannot_be_loaded_is_told(tmp_path):
    """With what it was; the next one who asks tries again."""
    tokenizers = Tokenizers([endpoint("a", tmp_path / "nothing")])

    for _ in range(2):
        with pytest.raises(UnprocessableRequest, match="nothing' cannot be loaded"):
            await tokenizers.get("a")


async def test_without_transformers_it_is_told_how_to_get_it(monkeypatch, folder):
    """It is an optional extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(UnprocessableRequest, match=r"tokentape\[tokenizer\]"):
        load(str(folder))


async def test_a_text_only_engine_is_exported_only_where_retokenized_rows_are_asked_for(store, engine, http, folder):
    """Recorded as text and flagged; a row of it says that nobody sampled its ids."""

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response(ANSWER)

    engine.respond = respond
    engines = {"endpoints": [{"url": engine.url, "name": "text", "kind": "plain", "tokenizer": str(folder)}]}
    async with proxying(None, store, engines=engines) as served:
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=ASKED) as answer:
            assert ANSWER == await answer.json()
        rows = {}
        for include in ("exact", "flagged", "retokenized"):
            async with http.get(f"{served.url}/rollouts/r1/export?include={include}") as exported:
                rows[include] = orjson.loads(await exported.read())["rows"]

    (row,) = rows.pop("retokenized")
    assert {"exact": [], "flagged": []} == rows
    assert ([1, 3, 6, 7, 2, 1, 4, 8, 9, 2], [0] * 7 + [1] * 3) == (row["token_ids"], row["mask"])
    assert ([None] * 10, True) == (row["logprobs"], "retokenized" in row["problems"])
