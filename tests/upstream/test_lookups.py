"""The models that one engine lists."""

import asyncio

from proxy.upstream.lookups import ModelList


class Engine:
    """Lists these models, and counts how often it is asked."""

    def __init__(self, *names):
        self.names = frozenset(names)
        self.requests = 0

    async def fetch(self):
        self.requests += 1
        await asyncio.sleep(0)
        return self.names


async def test_a_listed_name_is_looked_up_once():
    """What is listed once is known."""
    engine, models = Engine("a"), ModelList()
    for _ in range(3):
        assert {"a"} == await models.updated_for("a", engine.fetch)

    assert 1 == engine.requests


async def test_calls_at_once_look_an_unlisted_name_up_together():
    """One request, however many answers name it."""
    engine, models = Engine("a"), ModelList()
    await asyncio.gather(*(models.updated_for("b", engine.fetch) for _ in range(50)))

    assert 1 == engine.requests


async def test_an_unlisted_name_is_looked_up_again_after_a_minute():
    """An adapter may have been loaded since."""
    now = 0.0
    engine, models = Engine("a"), ModelList(now=lambda: now)
    await models.updated_for("b", engine.fetch)
    engine.names = frozenset({"a", "b"})
    now = 59.0
    assert {"a"} == await models.updated_for("b", engine.fetch)
    now = 60.0
    assert {"a", "b"} == await models.updated_for("b", engine.fetch)


async def test_another_unlisted_name_is_looked_up_at_once():
    """It may be that of an adapter that was loaded a moment ago."""
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    await models.updated_for("c", engine.fetch)

    assert 2 == engine.requests


async def test_a_call_that_is_cancelled_while_it_looks_up_leaves_the_name_to_the_next():
    """Nothing was learnt."""
    models = ModelList()

    async def hang():
        await asyncio.Event().wait()

    asking = asyncio.ensure_future(models.updated_for("b", hang))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])

    assert {"b"} == await models.updated_for("b", Engine("b").fetch)


async def test_an_engine_that_was_started_anew_is_asked_again():
    """It may serve other models."""
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    models.forget()
    await models.updated_for("b", engine.fetch)

    assert 2 == engine.requests
