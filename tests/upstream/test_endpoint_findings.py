"""What calls show about an endpoint: for their rollouts at once, for all rollouts after several, and for a time only."""

import asyncio

import pytest

from proxy.upstream.endpoint import ENOUGH, FORGET_S, MISSES, PAUSE_S, CachedAnswer, Finding, Misses, ModelList, Recent


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def finding(now):
    return Finding(lambda: now[0])


def test_one_rollout_decides_for_itself_only(finding):
    """However many of its calls show it."""
    for _ in range(100):
        assert not finding.show("a", "returned_ids")

    assert (finding.for_rollout("a"), finding.for_rollout("b")) == ("returned_ids", None)


def test_several_rollouts_decide_for_all(finding):
    """With the newest reason; the last of them is reported."""
    assert [finding.show(name, f"reason of {name}") for name in "abcd"] == [False, False, True, False]

    assert (finding.for_rollout("a"), finding.for_rollout("z")) == ("reason of a", "reason of d")


def test_a_call_that_shows_the_opposite_keeps_the_others_from_deciding(finding, now):
    """For as long as findings last; the rollouts that showed it keep their own."""
    finding.oppose()
    for name in "abcde":
        finding.show(name, "x")
    assert (finding.for_rollout("a"), finding.for_rollout("z")) == ("x", None)

    now[0] += FORGET_S
    for name in "abc":
        finding.show(name, "x")
    assert finding.for_rollout("z") == "x"


def test_everything_is_forgotten_with_time(finding, now):
    for name in "abc":
        finding.show(name, "x")
        now[0] += FORGET_S / ENOUGH
    assert (finding.for_rollout("a"), finding.for_rollout("z")) == (None, None)
    assert finding.for_rollout("c") == "x"
    assert repr(finding) == "<Finding of 2 rollouts>"


def test_forget_forgets_at_once(finding):
    for name in "abc":
        finding.show(name, "x")
    finding.forget()

    assert (finding.for_rollout("a"), finding.for_rollout("z")) == (None, None)


def test_the_number_of_values_is_limited():
    """The oldest ones are forgotten."""
    values = Recent(10, lambda: 0.0)
    for key in range(1000):
        values.put(key, key)

    assert (len(values), values.get(989), values.get(990), values.last()) == (10, None, 990, 999)


def test_an_endpoint_that_misses_several_in_a_row_is_paused(now):
    """For a time; the first miss after it begins the next pause, and an answer ends the row."""
    misses = Misses(lambda: now[0])
    assert [misses.add() for _ in range(MISSES + 1)] == [False] * (MISSES - 1) + [True, False]
    assert misses.is_paused

    now[0] += PAUSE_S
    assert not misses.is_paused
    assert misses.add()

    misses.forget()
    assert (misses.is_paused, misses.add(), misses.is_paused) == (False, False, False)
    assert repr(misses) == "<Misses: 1 in a row>"


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
        assert await models.updated_for("a", engine.fetch) == {"a"}

    assert engine.requests == 1


async def test_an_update_replaces_listed_models():
    """An adapter may have been unloaded."""
    engine, models = Engine("a", "b"), ModelList()
    await models.updated_for("a", engine.fetch)
    engine.names = frozenset("a")
    await models.update(engine.fetch)

    assert models.names == {"a"}


async def test_concurrent_lookups_of_an_unlisted_model_share_one_request():
    engine, models = Engine("a"), ModelList()
    await asyncio.gather(*(models.updated_for("b", engine.fetch) for _ in range(50)))

    assert engine.requests == 1


async def test_an_unlisted_model_is_requested_again_after_a_minute():
    """An adapter may have been loaded since."""
    now = 0.0
    engine, models = Engine("a"), ModelList(now=lambda: now)
    await models.updated_for("b", engine.fetch)
    engine.names = frozenset({"a", "b"})
    now = 59.0
    assert await models.updated_for("b", engine.fetch) == {"a"}
    now = 60.0
    assert await models.updated_for("b", engine.fetch) == {"a", "b"}


async def test_another_unlisted_model_is_requested_at_once():
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    await models.updated_for("c", engine.fetch)

    assert engine.requests == 2


async def test_a_cancelled_lookup_is_repeated_by_the_next_call():
    models = ModelList()

    async def hang():
        await asyncio.Event().wait()

    lookup = asyncio.ensure_future(models.updated_for("b", hang))
    await asyncio.sleep(0)
    lookup.cancel()
    await asyncio.wait([lookup])

    assert await models.updated_for("b", Engine("b").fetch) == {"b"}


async def test_after_forget_the_models_are_requested_again():
    """The engine may have been restarted."""
    engine, models = Engine("a"), ModelList()
    await models.updated_for("b", engine.fetch)
    models.forget()
    await models.updated_for("b", engine.fetch)

    assert engine.requests == 2


class CountingEngine:
    """Returns one value, and counts the requests."""

    def __init__(self, response):
        self.response, self.requests = response, 0

    async def __call__(self):
        self.requests += 1
        await asyncio.sleep(0)
        return self.response


async def test_concurrent_gets_share_one_request():
    """False is cached too; after forget() it is requested again. Each model has a value of its own."""
    cached, engine = CachedAnswer(), CountingEngine(response=False)

    assert await asyncio.gather(*(cached.get("m", engine) for _ in range(9))) == [False] * 9
    assert engine.requests == 1
    engine.response = True
    assert await cached.get("other", engine)
    assert not await cached.get("m", engine)
    cached.forget()
    assert await cached.get("m", engine)
    assert engine.requests == 3


async def test_a_value_is_requested_again_after_ten_minutes():
    now = [0.0]
    cached, engine = CachedAnswer(lambda: now[0]), CountingEngine(response=True)
    await cached.get("m", engine)
    now[0] = 599.0
    await cached.get("m", engine)
    assert engine.requests == 1

    now[0] = 600.0
    await cached.get("m", engine)
    assert engine.requests == 2


async def test_none_is_requested_again_after_a_minute():
    """Per model: an unknown model does not block requests for others."""
    now = [0.0]
    cached, engine = CachedAnswer(lambda: now[0]), CountingEngine(response=None)
    for model in ("m", "m", "other", "m"):
        assert await cached.get(model, engine) is None
    assert engine.requests == 2

    now[0] = 60.0
    await cached.get("m", engine)
    assert engine.requests == 3


async def test_the_number_of_cached_models_is_limited():
    """Clients may send any model name."""
    cached, engine = CachedAnswer(), CountingEngine(response=None)
    for number in range(3000):
        await cached.get(str(number), engine)

    assert engine.requests == 3000
    assert len(cached._unanswered) <= 1024
