"""Configured tokenizers: loaded once, in a thread, and used only where the engine has no token ids."""

import asyncio
import sys

import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.tiny_tokenizer import make_tokenizer

from proxy.config.engines import EndpointSettings
from proxy.errors import UnprocessableRequest
from proxy.upstream.tokenizers import Tokenizers, TokenTexts, load, readable

BODY = {"model": "m", "messages": [{"role": "user", "content": "Say hi"}]}
RESPONSE = {
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


def test_text_is_encoded_without_added_special_tokens(folder):
    """Special tokens in the text are encoded as such."""
    tokenizer = load(str(folder))

    assert tokenizer.encode("<s>user Say hi</s>") == [1, 3, 6, 7, 2]
    assert "<s>" in tokenizer.decode([1, 3])
    assert tokenizer.render(BODY["messages"], None, reply=True) == [1, 3, 6, 7, 2, 1, 4]
    assert tokenizer.render(BODY["messages"], [], reply=False) == [1, 3, 6, 7, 2]


def test_pieces_are_the_vocabularys_strings(folder):
    """None for an unknown id."""
    assert load(str(folder)).pieces([1, 8, 99]) == ["<s>", "hello", None]


@pytest.mark.parametrize("ids", [[2**40], [-1]])
def test_decoding_an_unknown_id_is_unprocessable(folder, ids):
    with pytest.raises(UnprocessableRequest, match="cannot decode the token ids"):
        load(str(folder)).decode(ids)


def test_an_error_of_the_chat_template_is_a_value_error(folder):
    with pytest.raises(ValueError, match="no such role"):
        load(str(folder)).render([{"role": "nobody", "content": ""}], None, reply=True)


async def test_an_endpoints_tokenizer_is_loaded_once(folder):
    """An endpoint without one has None."""
    tokenizers = Tokenizers([endpoint("a", folder), endpoint("b")])

    first, second = await asyncio.gather(tokenizers.get("a"), tokenizers.get("a"))
    assert first is second is not None
    assert await tokenizers.get("b") is None
    assert (bool(tokenizers), bool(Tokenizers([endpoint("b")]))) == (True, False)


async def test_replacing_the_endpoints_keeps_loaded_tokenizers(folder):
    tokenizers = Tokenizers([endpoint("a", folder)])
    before = await tokenizers.get("a")
    tokenizers.replace([endpoint("b", folder)])

    assert await tokenizers.get("a") is None
    assert before is await tokenizers.get("b")


async def test_a_tokenizer_that_cannot_be_loaded_is_named_in_the_error(tmp_path):
    """The next call tries again."""
    tokenizers = Tokenizers([endpoint("a", tmp_path / "nothing")])

    for _ in range(2):
        with pytest.raises(UnprocessableRequest, match="nothing' cannot be loaded"):
            await tokenizers.get("a")


async def test_without_transformers_the_error_names_the_command_that_installs_it(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(UnprocessableRequest, match="requires transformers: pip install 'transformers"):
        load(str(folder))


async def test_calls_of_a_text_only_engine_are_exported_only_as_retokenized_rows(store, engine, http, folder):
    """They are recorded as text and flagged; the row is flagged as retokenized."""

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response(RESPONSE)

    engine.respond = respond
    engines = {"endpoints": [{"url": engine.url, "name": "text", "kind": "plain", "tokenizer": str(folder)}]}
    async with proxying(None, store, engines=engines) as served:
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
            assert await response.json() == RESPONSE
        rows = {}
        for include in ("exact", "flagged", "retokenized"):
            async with http.get(f"{served.url}/rollouts/r1/export?include={include}") as exported:
                rows[include] = orjson.loads(await exported.read())["rows"]

    (row,) = rows.pop("retokenized")
    assert rows == {"exact": [], "flagged": []}
    assert (row["token_ids"], row["mask"]) == ([1, 3, 6, 7, 2, 1, 4, 8, 9, 2], [0] * 7 + [1] * 3)
    assert (row["logprobs"], "retokenized" in row["problems"]) == ([None] * 10, True)


VOCABULARY = ("engine", "model")


class Engine:
    """A detokenizer that records the requested ids, and returns None after `ends` requests."""

    def __init__(self, ends: int | None = None) -> None:
        self.requested: list[int] = []
        self.ends = ends

    async def detokenize(self, token: int) -> str | None:
        self.requested.append(token)
        return None if self.ends is not None and len(self.requested) > self.ends else f"<{token}>"


async def test_each_id_is_requested_once():
    texts, engine = TokenTexts(2**20), Engine()

    assert await texts.get(VOCABULARY, [7, 8, 7], engine.detokenize) == {7: "<7>", 8: "<8>"}
    assert await texts.get(VOCABULARY, [9, 8], engine.detokenize) == {8: "<8>", 9: "<9>"}
    assert engine.requested == [7, 8, 9]


async def test_vocabularies_are_cached_separately():
    texts, engine = TokenTexts(2**20), Engine()
    await texts.get(VOCABULARY, [7], engine.detokenize)
    await texts.get(("other", "model"), [7], engine.detokenize)

    assert engine.requested == [7, 7]


async def test_an_engine_without_a_detokenizer_gets_few_requests():
    """The text received so far is returned."""
    texts, engine = TokenTexts(2**20), Engine(ends=3)
    found = await texts.get(VOCABULARY, range(1000), engine.detokenize)

    assert found == {0: "<0>", 1: "<1>", 2: "<2>"}
    assert len(engine.requested) <= 3 + 8
    assert 3 * 200 <= texts.size < 3 * 210


async def test_after_the_timeout_the_text_received_so_far_is_returned(monkeypatch):
    monkeypatch.setattr("proxy.upstream.tokenizers._TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def detokenize(token: int) -> str:
        if token:
            await never.wait()
        return "a"

    assert await TokenTexts(2**20).get(VOCABULARY, [0, 1, 2], detokenize) == {0: "a"}


async def test_the_cache_is_limited_to_its_bytes():
    """The oldest entries are evicted; all requested text is returned."""
    texts, engine = TokenTexts(2100), Engine()

    assert len(await texts.get(VOCABULARY, range(30), engine.detokenize)) == 30
    assert 2000 < texts.size <= 2100
    await texts.get(VOCABULARY, range(20, 30), engine.detokenize)
    assert len(engine.requested) == 30


async def test_negative_ids_are_not_requested():
    """Some engines pad with -1."""
    engine = Engine()

    assert await TokenTexts(2**20).get(VOCABULARY, [-1], engine.detokenize) == {}
    assert engine.requested == []


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "a"), (" ", " "), ("", None), ("\ufffd", None), ("a\ufffd", None)]
)
def test_text_with_a_replacement_character_is_none(text, expected):
    """A decoder writes U+FFFD for part of a character."""
    assert readable(text) == expected
