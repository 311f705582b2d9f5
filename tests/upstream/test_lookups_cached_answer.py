"""An engine's response to an auxiliary request, cached."""

import asyncio

from proxy.upstream.lookups import CachedAnswer


class Engine:
    """Returns one value, and counts the requests."""

    def __init__(self, response):
        self.response, self.requests = response, 0

    async def __call__(self):
        self.requests += 1
        await asyncio.sleep(0)
        return self.response


async def test_concurrent_gets_share_one_request():
    """False is cached too; after forget() it is requested again. Each model has a value of its own."""
    cached, engine = CachedAnswer(), Engine(response=False)

    assert [False] * 9 == await asyncio.gather(*(cached.get("m", engine) for _ in range(9)))
    assert 1 == engine.requests
    engine.response = True
    assert await cached.get("other", engine)
    assert not await cached.get("m", engine)
    cached.forget()
    assert await cached.get("m", engine)
    assert 3 == engine.requests


async def test_a_value_is_requested_again_after_ten_minutes():
    now = [0.0]
    cached, engine = CachedAnswer(lambda: now[0]), Engine(response=True)
    await cached.get("m", engine)
    now[0] = 599.0
    await cached.get("m", engine)
    assert 1 == engine.requests

    now[0] = 600.0
    await cached.get("m", engine)
    assert 2 == engine.requests


async def test_none_is_requested_again_after_a_minute():
    """Per model: an unknown model does not block requests for others."""
    now = [0.0]
    cached, engine = CachedAnswer(lambda: now[0]), Engine(response=None)
    for model in ("m", "m", "other", "m"):
        assert await cached.get(model, engine) is None
    assert 2 == engine.requests

    now[0] = 60.0
    await cached.get("m", engine)
    assert 3 == engine.requests


async def test_the_number_of_cached_models_is_limited():
    """Clients may send any model name."""
    cached, engine = CachedAnswer(), Engine(response=None)
    for number in range(3000):
        await cached.get(str(number), engine)

    assert 3000 == engine.requests
    assert len(cached._unanswered) <= 1024
