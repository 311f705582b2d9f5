"""The cached list of an engine's models."""

import asyncio

from proxy.upstream.lookups import ModelList


class Engine:
    """Lists these models, and counts the requests."""

    def __init__(self, *names):
        self.names = frozenset(names)
        self.requests = 0

    async def fetch(self):
        self.requests += 1
        await asyncio.sleep(0)
        return self.names


async def test_a_listed_model_is_requested_once():
    engine, models = Engine("a"), ModelList()
    for _ in range(3):
        assert {"a"} == await models.updated_for("a", engine.fetch)

    assert 1 == engine.requests


async def test_an_update_replaces_listed_models():
    """An adapter may have been unloaded."""
    engine, models = Engine("a", "b"), ModelList()
    await models.updated_for("a", engine.fetch)
    engine.names = frozenset("a")
    await models.update(engine.fetch)

    assert {"a"} == models.names


async def test_concurrent_lookups_of_an_unlisted_model_share_one_request():
    engine, models = Engine("a"), ModelList()
    await asyncio.gather(*(models.updated_for("b", engine.fetch) for _ in range(50)))

    assert 1 == engine.requests


async def test_an_unlisted_model_is_requested_again_after_a_minute():
    """An adapter may have been loaded since."""
    now = 0.0
    engine, models = Engine("a"), ModelList(now=lambda: now)
    await models.updated_for("b", engine.fetch)
    engine.names = frozenset({"a", "b"})
    now = 59.0
    assert {"a"} == await models.updated_for("b", engine.fetch)
    now = 60.0
    assert {"a", "b"} == await models.updated_for("b", engine.fetch)


async def test_another_unlisted_model_is_requested_at_once():
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    await models.updated_for("c", engine.fetch)

    assert 2 == engine.requests


async def test_a_cancelled_lookup_is_repeated_by_the_next_call():
    models = ModelList()

    async def hang():
        await asyncio.Event().wait()

    lookup = asyncio.ensure_future(models.updated_for("b", hang))
    await asyncio.sleep(0)
    lookup.cancel()
    await asyncio.wait([lookup])

    assert {"b"} == await models.updated_for("b", Engine("b").fetch)


async def test_after_forget_the_models_are_requested_again():
    """The engine may have been restarted."""
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    models.forget()
    await models.updated_for("b", engine.fetch)

    assert 2 == engine.requests
