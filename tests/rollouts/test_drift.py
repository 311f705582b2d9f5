"""Drift reports over real sockets: texts from a tokenizer or the engine, kinds, and totals at the finish."""

import asyncio

import pytest
from tests.support.drifting_engine import ASK, MORE, REPLY, Drifting, same, unavailable, wait_for_texts
from tests.support.fakes import proxying
from tests.support.tiny_tokenizer import make_tokenizer


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """The lookup of texts has no short timeout."""
    monkeypatch.setattr("proxy.rollouts.drift._TEXTS_TIMEOUT_S", 600.0)


@pytest.fixture
def no_early_lookups(monkeypatch):
    """Texts are not looked up while steps are stored."""
    monkeypatch.setattr("proxy.rollouts.drift._MAX_WAITING", 0)


async def test_a_boundary_has_the_ids_texts_and_kind(rollout):
    """The engine decodes the texts."""
    await rollout.two_turns()
    drift = await rollout.boundary()

    assert (
        drift["index"], drift["expected_text"][-15:], drift["found_text"][-16:], drift["texts"], drift["kind"]
    ) == (8, "hello there</s>", "hello</s><s>user", "ok", "other")  # fmt: skip
    assert (
        drift["expected_ids"][-9:],
        drift["found_ids"][-10:],
    ) == ([3, 6, 7, 2, 1, 4, 8, 9, 2], [3, 6, 7, 2, 1, 4, 8, 2, 1, 3])


async def test_without_texts_a_boundary_has_ids_and_is_unexplained(rollout, drifting):
    drifting.detokenize = unavailable
    await rollout.two_turns()
    drift = await rollout.boundary()

    assert tuple(drift[name] for name in ("expected_text", "found_text", "texts", "kind")) == (
        None,
        None,
        "unavailable",
        "unexplained",
    )


@pytest.mark.usefixtures("no_early_lookups")
async def test_a_timeout_of_texts_is_reported_and_the_boundary_is_unexplained(rollout, drifting, monkeypatch, caplog):
    """This holds for the tree and for the count at the finish."""
    monkeypatch.setattr("proxy.rollouts.drift._TEXTS_TIMEOUT_S", 0.01)
    drifting.gate.clear()
    await rollout.two_turns()
    drift, without_texts = await rollout.boundary(), await rollout.boundary("?texts=false")
    await rollout.finish()
    await rollout.counted(unexplained=1)
    drifting.gate.set()

    assert tuple(drift[name] for name in ("texts", "expected_text", "found_text", "kind")) == (
        "timeout",
        None,
        None,
        "unexplained",
    )
    assert (without_texts["texts"], without_texts["kind"]) == ("not_requested", "unexplained")
    assert "Kinds of 1 of 1 drift boundaries not known yet: 1 timed out after" in caplog.text


@pytest.mark.usefixtures("no_early_lookups")
async def test_texts_above_the_limit_of_lookups_are_reported_as_over_limit(rollout, monkeypatch):
    """Their boundaries are unexplained."""
    monkeypatch.setattr("proxy.rollouts.drift._MAX_LOOKUPS", 0)
    await rollout.two_turns()
    drift = await rollout.boundary()

    assert (drift["texts"], drift["kind"]) == ("over_limit", "unexplained")


@pytest.mark.usefixtures("no_early_lookups")
async def test_later_reads_look_up_the_remaining_texts(rollout, drifting, monkeypatch):
    """They are chosen at random, so that failing texts do not block others."""
    monkeypatch.setattr("proxy.rollouts.drift._MAX_LOOKUPS", 1)
    reads = []
    monkeypatch.setattr("proxy.rollouts.drift.shuffle", lambda keys: keys.reverse() if reads else None)
    drifting.detokenize = lambda ids: None if ids[-1] == 3 or len(ids) < 12 else "hello there"
    await rollout.two_turns()
    await rollout.chat(ASK, REPLY, MORE, REPLY, MORE)
    for _ in range(2):
        reads.append([drift["texts"] for drift in (await rollout.get("/tree"))["drift"]])  # noqa: PERF401 - `shuffle` reads the list

    assert reads[0] != reads[1]
    assert [texts.count("over_limit") for texts in reads] == [1, 1]


@pytest.mark.usefixtures("no_early_lookups")
async def test_texts_shared_by_two_boundaries_are_looked_up_if_one_needs_them(rollout, drifting):
    """The messages determine the kind of the other."""
    drifting.detokenize = same
    await rollout.two_turns()
    await rollout.chat(ASK, {**REPLY, "content": "hello there!"}, MORE)
    await rollout.finish()
    await rollout.counted(retokenized=1, edited=1)

    assert await rollout.metric("retokenized") == 1


async def test_a_configured_tokenizer_decodes_the_texts(store, drifting, http, tmp_path):
    """The engine gets no request."""
    endpoint = {"url": drifting.url, "name": "fake", "tokenizer": str(make_tokenizer(tmp_path))}
    async with proxying(None, store, engines={"endpoints": [endpoint]}) as served:
        rollout = Drifting(http, served.url)
        await rollout.two_turns()
        drift = await rollout.boundary()

    assert drift["expected_text"].endswith("hello there </s>")
    assert drifting.detokenized == []


async def test_drift_is_counted_when_the_rollout_is_finished(rollout):
    """It is counted by kind, once in the rollout and in the metrics; before the finish it is null."""
    await rollout.two_turns()
    before = (await rollout.get())["drift"]
    await rollout.finish()
    await rollout.finish()
    await rollout.counted(other=1)

    assert before is None
    assert await rollout.metric("other") == 1


async def test_stored_texts_are_not_looked_up_again(rollout, store, drifting):
    """The stored texts determine the kind."""
    drifting.detokenize = same
    await rollout.two_turns()
    await wait_for_texts(store, 1)
    lookups = len(drifting.detokenized)
    drifting.detokenize = unavailable
    shown = [await rollout.boundary(query) for query in ("", "?texts=false")]

    assert [(drift["texts"], drift["kind"], drift["found_text"]) for drift in shown] == [
        ("ok", "retokenized", "hello there")
    ] * 2
    assert lookups == len(drifting.detokenized)


async def test_texts_that_cannot_be_stored_are_in_the_tree(rollout, store):
    """They are looked up again at the next read."""
    store.failing.add("mark")
    await rollout.two_turns()

    assert [(await rollout.boundary())["kind"] for _ in range(2)] == ["other", "other"]


async def test_concurrent_reads_at_several_processes_count_drift_once(store, drifting, http):
    """The totals are compared and set."""
    drifting.detokenize = unavailable
    async with proxying(drifting.url, store) as first, proxying(drifting.url, store) as second:
        rollouts = [Drifting(http, served.url) for served in (first, second)]
        await rollouts[0].two_turns()
        await rollouts[0].finish()
        await rollouts[0].counted(unexplained=1)
        drifting.detokenize = same
        await asyncio.gather(*(rollout.boundary() for rollout in rollouts * 3))
        await rollouts[0].counted(retokenized=1)

        assert sum([await rollout.metric("retokenized") for rollout in rollouts]) == 1


async def test_the_tree_has_the_kind_even_if_the_totals_cannot_be_stored(rollout, store, drifting):
    drifting.detokenize = unavailable
    await rollout.two_turns()
    await rollout.finish()
    await rollout.counted(unexplained=1)
    drifting.detokenize = same
    store.failing.add("update_if")

    assert (await rollout.boundary())["kind"] == "retokenized"
