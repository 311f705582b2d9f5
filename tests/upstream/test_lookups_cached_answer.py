"""An engine's answer to a question beside calls, fetched once."""

import asyncio

from proxy.upstream.lookups import CachedAnswer


class Engine:
    """Answers as a test says, and counts how often it is asked."""

    def __init__(self, answer):
        self.answer, self.requests = answer, 0

    async def __call__(self):
        self.requests += 1
        await asyncio.sleep(0)
        return self.answer


async def test_it_is_fetched_once_however_many_want_it():
    """Also False is an answer; forgotten, it is fetched again."""
    cached, engine = CachedAnswer(), Engine(answer=False)

    assert [False] * 9 == await asyncio.gather(*(cached.get(f"m{n}", engine) for n in range(9)))
    assert 1 == engine.requests
    cached.forget()
    await cached.get("m", engine)
    assert 2 == engine.requests


async def test_a_question_without_an_answer_is_asked_again_after_a_minute():
    """For each model by itself: one that the engine does not serve must not keep the others from it."""
    now = [0.0]
    cached, engine = CachedAnswer(lambda: now[0]), Engine(answer=None)
    for model in ("m", "m", "other", "m"):
        assert await cached.get(model, engine) is None
    assert 2 == engine.requests

    now[0] = 60.0
    await cached.get("m", engine)
    assert 3 == engine.requests


async def test_the_models_that_are_remembered_are_bounded():
    """A client may name any."""
    cached, engine = CachedAnswer(), Engine(answer=None)
    for number in range(3000):
        await cached.get(str(number), engine)

    assert 3000 == engine.requests
    assert len(cached._unanswered) <= 1024
