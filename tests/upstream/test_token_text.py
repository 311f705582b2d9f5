"""The texts of single tokens, remembered."""

import asyncio

import pytest

from proxy.upstream.token_text import TokenTexts, readable

VOCABULARY = ("engine", "model")


class Engine:
    """What is asked for texts: remembers for which ids, and tells none from `ends` on."""

    def __init__(self, ends: int | None = None) -> None:
        self.requests: list[int] = []
        self.ends = ends

    async def ask(self, one: int) -> str | None:
        self.requests.append(one)
        return None if self.ends is not None and len(self.requests) > self.ends else f"<{one}>"


async def test_each_id_is_asked_for_once():
    """However often it stands in a text, and whoever looks."""
    texts, engine = TokenTexts(), Engine()

    assert {7: "<7>", 8: "<8>"} == await texts.get(VOCABULARY, [7, 8, 7], engine.ask)
    assert {8: "<8>", 9: "<9>"} == await texts.get(VOCABULARY, [9, 8], engine.ask)
    assert [7, 8, 9] == engine.requests


async def test_vocabularies_are_told_apart():
    """The same id is another word elsewhere."""
    texts, engine = TokenTexts(), Engine()
    await texts.get(VOCABULARY, [7], engine.ask)
    await texts.get(("other", "model"), [7], engine.ask)

    assert [7, 7] == engine.requests


async def test_whoever_tells_none_is_left_alone():
    """An engine without a detokenizer is not asked a thousand times for nothing; what it told is kept."""
    texts, engine = TokenTexts(), Engine(ends=3)
    told = await texts.get(VOCABULARY, range(1000), engine.ask)

    assert {0: "<0>", 1: "<1>", 2: "<2>"} == told
    assert len(engine.requests) <= 3 + 8
    assert 3 == len(texts)


async def test_a_silent_engine_costs_no_more_than_the_time_allowed(monkeypatch):
    """What it told before is kept."""
    monkeypatch.setattr("proxy.upstream.token_text._TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def ask(one: int) -> str:
        if one:
            await never.wait()
        return "a"

    assert {0: "a"} == await TokenTexts().get(VOCABULARY, [0, 1, 2], ask)


async def test_the_memory_is_bounded():
    """The oldest go; what was asked for is told all the same."""
    texts, engine = TokenTexts(max_texts=10), Engine()

    assert 30 == len(await texts.get(VOCABULARY, range(30), engine.ask))
    assert 10 == len(texts)
    await texts.get(VOCABULARY, range(20, 30), engine.ask)
    assert 30 == len(engine.requests)


async def test_no_id_below_zero_is_asked_for():
    """Some engines fill up with -1."""
    engine = Engine()

    assert {} == await TokenTexts().get(VOCABULARY, [-1], engine.ask)
    assert [] == engine.requests


@pytest.mark.parametrize(("text", "told"), [("a", "a"), (" ", " "), ("", None), ("\ufffd", None), ("a\ufffd", None)])
def test_part_of_a_character_is_no_text(text, told):
    """A decoder writes U+FFFD for it, which would be a lie."""
    assert told == readable(text)
