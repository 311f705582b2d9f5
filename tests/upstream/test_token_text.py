"""The cached text of single tokens."""

import asyncio

import pytest

from proxy.upstream.token_text import TokenTexts, readable

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
    texts, engine = TokenTexts(), Engine()

    assert {7: "<7>", 8: "<8>"} == await texts.get(VOCABULARY, [7, 8, 7], engine.detokenize)
    assert {8: "<8>", 9: "<9>"} == await texts.get(VOCABULARY, [9, 8], engine.detokenize)
    assert [7, 8, 9] == engine.requested


async def test_vocabularies_are_cached_separately():
    texts, engine = TokenTexts(), Engine()
    await texts.get(VOCABULARY, [7], engine.detokenize)
    await texts.get(("other", "model"), [7], engine.detokenize)

    assert [7, 7] == engine.requested


async def test_an_engine_without_a_detokenizer_gets_few_requests():
    """The text received so far is returned."""
    texts, engine = TokenTexts(), Engine(ends=3)
    found = await texts.get(VOCABULARY, range(1000), engine.detokenize)

    assert {0: "<0>", 1: "<1>", 2: "<2>"} == found
    assert len(engine.requested) <= 3 + 8
    assert 3 == len(texts)


async def test_after_the_timeout_the_text_received_so_far_is_returned(monkeypatch):
    monkeypatch.setattr("proxy.upstream.token_text._TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def detokenize(token: int) -> str:
        if token:
            await never.wait()
        return "a"

    assert {0: "a"} == await TokenTexts().get(VOCABULARY, [0, 1, 2], detokenize)


async def test_the_cache_is_limited_to_max_texts():
    """The oldest entries are evicted; all requested text is returned."""
    texts, engine = TokenTexts(max_texts=10), Engine()

    assert 30 == len(await texts.get(VOCABULARY, range(30), engine.detokenize))
    assert 10 == len(texts)
    await texts.get(VOCABULARY, range(20, 30), engine.detokenize)
    assert 30 == len(engine.requested)


async def test_negative_ids_are_not_requested():
    """Some engines pad with -1."""
    engine = Engine()

    assert {} == await TokenTexts().get(VOCABULARY, [-1], engine.detokenize)
    assert [] == engine.requested


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "a"), (" ", " "), ("", None), ("\ufffd", None), ("a\ufffd", None)]
)
def test_text_with_a_replacement_character_is_none(text, expected):
    """A decoder writes U+FFFD for part of a character."""
    assert expected == readable(text)
