"""Drift, explained and counted, over real sockets: texts from a tokenizer or the engine, totals at the finish."""

import asyncio

import pytest
from drifting_engine import ASK, MORE, REPLY, Drifting, DriftingEngine, same, unavailable, wait_for_texts
from fakes import proxying
from tiny_tokenizer import make_tokenizer


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Texts may take as long as a busy machine needs."""
    monkeypatch.setattr("proxy.rollouts.drift_report._TEXTS_TIMEOUT_S", 600.0)


@pytest.fixture
def unforeseen(monkeypatch):
    """Nothing is looked up as steps are stored."""
    monkeypatch.setattr("proxy.rollouts.drift_watch._MAX_WAITING", 0)


@pytest.fixture
def drifting(engine):
    """An engine whose second prompt lacks a token that it sampled."""
    return DriftingEngine(engine)


async def test_a_boundary_is_told_with_the_texts_of_the_engine(store, drifting, http):
    """Where they part, with the ids and their texts, and why."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift = await rollout.boundary()

    assert (8, "hello there</s>", "hello</s><s>user", "ok", "other") == (
        drift["index"], drift["expected_text"][-15:], drift["found_text"][-16:], drift["texts"], drift["kind"]
    )  # fmt: skip
    assert ([3, 6, 7, 2, 1, 4, 8, 9, 2], [3, 6, 7, 2, 1, 4, 8, 2, 1, 3]) == (
        drift["expected_ids"][-9:],
        drift["found_ids"][-10:],
    )


async def test_without_texts_the_ids_are_told(store, drifting, http):
    """An engine that cannot tell them costs the report its texts and the kinds that need them, and nothing is guessed."""
    drifting.detokenize = unavailable
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift = await rollout.boundary()

    assert (None, None, "unavailable", "unexplained") == tuple(
        drift[name] for name in ("expected_text", "found_text", "texts", "kind")
    )


@pytest.mark.usefixtures("unforeseen")
async def test_texts_that_take_too_long_are_named(store, drifting, http, monkeypatch, caplog):
    """A tree without texts says that it is for the time, and does not guess a kind; neither does the count at the finish."""
    monkeypatch.setattr("proxy.rollouts.drift_report._TEXTS_TIMEOUT_S", 0.01)
    drifting.gate.clear()
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift, unasked = await rollout.boundary(), await rollout.boundary("?texts=false")
        await rollout.finish()
        await rollout.counted(unexplained=1)
        drifting.gate.set()

    assert ("timeout", None, None, "unexplained") == tuple(
        drift[name] for name in ("texts", "expected_text", "found_text", "kind")
    )
    assert ("not_requested", "unexplained") == (unasked["texts"], unasked["kind"])
    assert "Kinds of 1 of 1 drift boundaries not known yet: 1 timed out after" in caplog.text


@pytest.mark.usefixtures("unforeseen")
async def test_only_so_many_texts_are_looked_up_at_one_look(store, drifting, http, monkeypatch):
    """Those beyond the first ones say so, and are not given a kind that texts might contradict."""
    monkeypatch.setattr("proxy.rollouts.drift_report._MAX_LOOKUPS", 0)
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift = await rollout.boundary()

    assert ("over_limit", "unexplained") == (drift["texts"], drift["kind"])


@pytest.mark.usefixtures("unforeseen")
async def test_windows_that_were_left_out_have_their_turn(store, drifting, http, monkeypatch):
    """Of more than the limit others are looked up at the next look, whatever became of the first."""
    monkeypatch.setattr("proxy.rollouts.drift_report._MAX_LOOKUPS", 1)
    looks = []
    monkeypatch.setattr("proxy.rollouts.drift_report.shuffle", lambda keys: keys.reverse() if looks else None)
    drifting.detokenize = lambda ids: None if ids[-1] == 3 or len(ids) < 12 else "hello there"
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.chat(ASK, REPLY, MORE, REPLY, MORE)
        for _ in range(2):
            looks.append([one["texts"] for one in (await rollout.get("/tree"))["drift"]])  # noqa: PERF401 - read meanwhile

    assert looks[0] != looks[1]
    assert [1, 1] == [texts.count("over_limit") for texts in looks]


@pytest.mark.usefixtures("unforeseen")
async def test_a_window_of_two_boundaries_is_looked_up_for_the_one_that_needs_it(store, drifting, http):
    """Though the messages tell the kind of the other."""
    drifting.detokenize = same
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.chat(ASK, {**REPLY, "content": "hello there!"}, MORE)
        await rollout.finish()
        await rollout.counted(retokenized=1, edited=1)

        assert 1 == await rollout.metric("retokenized")


async def test_a_configured_tokenizer_tells_the_texts(store, drifting, http, tmp_path):
    """The engine is not asked then."""
    endpoint = {"url": drifting.url, "name": "fake", "tokenizer": str(make_tokenizer(tmp_path))}
    async with proxying(None, store, engines={"endpoints": [endpoint]}) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift = await rollout.boundary()

    assert drift["expected_text"].endswith("hello there </s>")
    assert [] == drifting.detokenized


async def test_drift_is_counted_when_the_rollout_is_finished(store, drifting, http):
    """By kind: on the rollout, and once in the metrics, however often it is finished. Before that nobody has counted."""
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        before = (await rollout.get())["drift"]
        await rollout.finish()
        await rollout.finish()
        await rollout.counted(other=1)

        assert before is None
        assert 1 == await rollout.metric("other")


async def test_texts_that_are_kept_are_looked_up_no_more(store, drifting, http):
    """Whoever looks sees the kind that the texts gave as they were found, whatever the engine would tell now."""
    drifting.detokenize = same
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await wait_for_texts(store, 1)
        asked = len(drifting.detokenized)
        drifting.detokenize = unavailable
        shown = [await rollout.boundary(query) for query in ("", "?texts=false")]

        assert [("ok", "retokenized", "hello there")] * 2 == [
            (one["texts"], one["kind"], one["found_text"]) for one in shown
        ]
        assert asked == len(drifting.detokenized)


async def test_a_store_that_fails_costs_the_tree_nothing(store, drifting, http):
    """Texts that are not kept are shown all the same, and asked for again."""
    store.failing.add("mark")
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()

        assert ["other", "other"] == [(await rollout.boundary())["kind"] for _ in range(2)]


async def test_several_that_complete_it_count_it_once(store, drifting, http):
    """Totals are compared and set: of two processes that look at once, one counts."""
    drifting.detokenize = unavailable
    async with proxying(drifting.url, store) as one, proxying(drifting.url, store) as other:
        rollouts = [Drifting(http, served.url) for served in (one, other)]
        await rollouts[0].two_turns()
        await rollouts[0].finish()
        await rollouts[0].counted(unexplained=1)
        drifting.detokenize = same
        await asyncio.gather(*(rollout.boundary() for rollout in rollouts * 3))
        await rollouts[0].counted(retokenized=1)

        assert 1 == sum([await rollout.metric("retokenized") for rollout in rollouts])


async def test_a_store_that_cannot_be_written_costs_the_tree_of_a_finished_rollout_nothing(store, drifting, http):
    """What the look has found out is counted by a later one."""
    drifting.detokenize = unavailable
    async with proxying(drifting.url, store) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        await rollout.finish()
        await rollout.counted(unexplained=1)
        drifting.detokenize = same
        store.failing.add("update_if")

        assert "retokenized" == (await rollout.boundary())["kind"]
