"""Reports of a batch's mismatch: parts, what is refused, and what is read back."""

import asyncio
import copy
from itertools import permutations

import numpy as np
import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session
from tests.support.sweeping import SetClock

from proxy.clock import SystemClock
from proxy.server.listener import running
from proxy.telemetry.metrics import MISMATCHES
from tokentape import AsyncClient
from tokentape.mismatch_sums import report


@pytest.fixture
async def batch(proxy):
    """A batch of four rollouts, whose policy has version 3."""
    await proxy.put("/policy", {"version": 3})
    await proxy.group("g1", 1.0, 0.0)
    await proxy.group("g2", 1.0, 0.0)
    return await proxy.claim(groups=2, format="sequences")


def rows_of(batch):
    return [row for group in batch["groups"] for row in group["data"]]


def body_of(batch, rows, *, rank=0, version="3"):
    """Return the report of some rows of a batch; the trainer's logprobs are those that were recorded, and noise."""
    noise = np.random.default_rng(0)
    recorded = [
        np.array([value for value, bit in zip(row["logprobs"], row["mask"], strict=True) if bit]) for row in rows
    ]
    noisy = [values + noise.normal(0, 0.01, len(values)) for values in recorded]
    return report(batch["batch_id"], rows, noisy, policy_version=version, rank=rank)[1]


async def send(proxy, batch, body):
    return await proxy.post(f"/batches/{batch['batch_id']}/mismatch", body)


async def test_spans_of_claimed_rows_have_their_engine(batch):
    (span,) = rows_of(batch)[0]["spans"]

    assert ("vllm", "raw_logprobs") == (span["engine"], span["logprobs_mode"])
    assert span["endpoint"]


async def test_parts_count_once_and_add_up_in_any_order(proxy, store, batch):
    """Four ranks report concurrently through two processes, some of them twice."""
    parts = [body_of(batch, [row], rank=rank) for rank, row in enumerate(rows_of(batch))]
    async with running(settings_for("http://127.0.0.1:9"), store) as other:
        urls = [proxy.url, other.url, proxy.url, other.url]
        path = f"/batches/{batch['batch_id']}/mismatch"
        sent = [proxy.http.post(url + path, json=part) for url, part in zip(urls, parts, strict=True)]
        responses = await asyncio.gather(*sent)
        counted = [(await response.json())["counted"] for response in responses]
    again = await send(proxy, batch, parts[2])
    shown = await proxy.get(f"/batches/{batch['batch_id']}/mismatch")

    assert [True] * 4 == counted
    assert (200, False) == (again.status, again.json["counted"])
    assert 4 == len(shown.json["parts"])
    tokens = sum(sum(row["mask"]) for row in rows_of(batch))
    assert tokens == shown.json["tokens"] == again.json["tokens"] == shown.json["cells"]["lag"]["0"]["tokens"]
    assert ["too_few"] == [verdict["verdict"] for verdict in shown.json["verdicts"]]
    assert 0 < shown.json["cells"]["all"]["all"]["abs_mean"] < 0.02


async def test_the_sums_do_not_depend_on_the_order_of_parts(proxy):
    await proxy.put("/policy", {"version": 3})
    seen = []
    for name, order in zip("abc", permutations(range(3)), strict=False):
        await proxy.group(name, 1.0, 0.0, 1.0)
        batch = await proxy.claim(format="sequences")
        parts = [body_of(batch, [row], rank=rank) for rank, row in enumerate(rows_of(batch))]
        for number in order:
            await send(proxy, batch, parts[number])
        seen.append((await proxy.get(f"/batches/{batch['batch_id']}/mismatch")).json["sums"])
        await proxy.ack(batch)

    assert seen[0] == seen[1] == seen[2]


async def test_a_part_that_overlaps_another_is_409_and_not_counted(proxy, batch):
    rows = rows_of(batch)
    await send(proxy, batch, body_of(batch, rows[:2]))
    other_rank = await send(proxy, batch, body_of(batch, rows[:2], rank=1))
    wider = await send(proxy, batch, body_of(batch, rows[1:]))
    rest = await send(proxy, batch, body_of(batch, rows[2:]))

    assert [409, 409, 200] == [other_rank.status, wider.status, rest.status]
    assert [{"rank": 0, "rows": 2}, {"rank": 0, "rows": 2}] == rest.json["parts"]


@pytest.mark.parametrize("version", ["4", "x"])
async def test_a_version_that_was_not_announced_is_422(proxy, batch, version):
    refused = await send(proxy, batch, body_of(batch, rows_of(batch), version=version))

    assert (422, "policy_version") == (refused.status, refused.json["error"]["param"])


async def test_a_version_that_tokens_have_is_taken(proxy):
    """Names that are no numbers have no order: an earlier one is known by the tokens that were sampled with it."""
    await proxy.put("/policy", {"version": "blue"})
    await proxy.group("g1", 1.0)
    batch = await proxy.claim(format="sequences")
    await proxy.put("/policy", {"version": "green"})
    taken, refused = [
        await send(proxy, batch, body_of(batch, rows_of(batch), version=version)) for version in ("blue", "red")
    ]

    assert (200, 422) == (taken.status, refused.status)


async def test_an_earlier_version_is_taken_and_all_parts_have_one(proxy, batch):
    rows = rows_of(batch)
    first = await send(proxy, batch, body_of(batch, rows[:1], version="2"))
    second = await send(proxy, batch, body_of(batch, rows[1:], version="3"))

    assert (200, 422) == (first.status, second.status)


async def test_an_unknown_batch_is_422_and_one_without_parts_404(proxy, batch):
    unknown = await send(proxy, {"batch_id": "none"}, body_of(batch, rows_of(batch)))
    unread = await proxy.get(f"/batches/{batch['batch_id']}/mismatch")

    assert (422, 404) == (unknown.status, unread.status)


async def test_rows_that_are_not_of_the_batch_are_422(proxy, batch):
    body = body_of(batch, rows_of(batch))
    refused = await send(proxy, batch, body | {"rows": {"other": [0, 1, 2, 3]}})

    assert (422, "rows") == (refused.status, refused.json["error"]["param"])


async def test_sums_that_contradict_each_other_or_are_incomplete_are_422(proxy, batch):
    body = body_of(batch, rows_of(batch))
    contradicting, incomplete = copy.deepcopy(body), copy.deepcopy(body)
    contradicting["sums"]["cells"]["all"]["all"]["tail"] = 10**6
    del incomplete["sums"]["uncertain"][0]
    refused = [await send(proxy, batch, each) for each in (contradicting, incomplete)]

    assert [(422, "sums")] * 2 == [(response.status, response.json["error"]["param"]) for response in refused]


async def test_a_batch_is_reported_after_its_acknowledgement_but_not_after_a_release(proxy, batch):
    """The groups of a released batch are trained by another consumer."""
    await proxy.ack(batch, delete=True)
    acked = await send(proxy, batch, body_of(batch, rows_of(batch)))
    await proxy.group("g3", 1.0)
    released = await proxy.claim(format="sequences")
    await proxy.release(released)
    refused = await send(proxy, released, body_of(released, rows_of(released)))

    assert (200, 409) == (acked.status, refused.status)


async def test_reports_expire_an_hour_after_the_longest_lease(proxy, store, batch):
    await send(proxy, batch, body_of(batch, rows_of(batch)))

    assert 25 * 3600 == store.mismatches.ttl_s


async def test_a_batch_is_reported_an_hour_after_its_lease(proxy, store, batch):
    """By a proxy whose clock is that much later."""
    now_ms = SystemClock().now_ms()
    async with running(settings_for("http://127.0.0.1:9"), store, SetClock(now_ms + 2 * 3_600_000)) as later:
        late = await Session(proxy.http, later.url).post(
            f"/batches/{batch['batch_id']}/mismatch", body_of(batch, rows_of(batch))
        )

    assert (200, True) == (late.status, late.json["counted"])


async def test_metrics_have_the_mean_of_each_part_and_each_verdict_of_a_batch_once(proxy, batch):
    """A part that is repeated does not count again."""
    parts = [body_of(batch, [row], rank=rank) for rank, row in enumerate(rows_of(batch))]
    for part in (*parts, parts[0]):
        assert 200 == (await send(proxy, batch, part)).status
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tokentape_mismatch_"))
    verdicts = {name: value for name, value in found.items() if "verdicts" in name}

    assert "4.0" == found['tokentape_mismatch_abs_mean_count{policy="default"}']
    assert 0 < float(found['tokentape_mismatch_abs_mean_sum{policy="default"}']) < 0.08
    assert len(MISMATCHES) == len(verdicts)
    assert {"1.0"} == {value for name, value in verdicts.items() if "too_few" in name}
    assert {"0.0"} == {value for name, value in verdicts.items() if "too_few" not in name}


async def test_verdicts_follow_the_settings(proxy, store):
    """Those of the process that responds."""
    await proxy.put("/policy", {"version": 3})
    (member,) = await proxy.open_group("g1")
    await proxy.chat(member, max_tokens=200, min_tokens=200)
    await proxy.finish(member, reward=1)
    batch = await proxy.claim(format="sequences")
    usual = (await send(proxy, batch, body_of(batch, rows_of(batch)))).json
    path = f"/batches/{batch['batch_id']}/mismatch"
    async with running(settings_for("http://127.0.0.1:9", mismatch={"min_tokens": 100}), store) as other:
        shown = (await Session(proxy.http, other.url).get(path)).json

    assert ["too_few"] == [each["verdict"] for each in usual["verdicts"]]
    assert ["numeric"] == [each["verdict"] for each in shown["verdicts"]]


async def test_training_has_the_newest_reports_and_the_cells_of_the_newest(proxy, store, batch):
    """Also of groups that are deleted; a damaged report is omitted."""
    for part in (rows_of(batch)[:2], rows_of(batch)[2:]):
        reported = await send(proxy, batch, body_of(batch, part))
    await proxy.ack(batch, delete=True)
    await proxy.group("g3", 1.0)
    second = await proxy.claim(format="sequences")
    await send(proxy, second, body_of(second, rows_of(second), version="2"))
    await store.mismatches.open("mismatch:x", {"mismatch": b"{"}, now_ms=SystemClock().now_ms())
    found = (await proxy.get("/training")).json["mismatch"]

    assert [second["batch_id"], batch["batch_id"]] == [each["batch_id"] for each in found["batches"]]
    assert ["2", "3"] == [each["policy_version"] for each in found["batches"]]
    assert reported.json["tokens"] == found["batches"][1]["tokens"]
    assert ["too_few"] == found["batches"][1]["verdicts"]
    assert {"-1"} == set(found["newest"]["cells"]["lag"])
    assert 1 == found["newest"]["sequences"]["rows"]


async def test_training_without_reports_has_none(proxy):
    assert {"batches": [], "newest": None} == (await proxy.get("/training")).json["mismatch"]


async def test_the_client_reports_a_batch(proxy, batch):
    await proxy.release(batch)
    async with AsyncClient(proxy.url) as client:
        async for claimed in client.batches(consumer="t", groups=2, format="sequences", wait_s=0):
            rows = [row for group in claimed.groups for row in group["data"]]
            logprobs = [[value for value, bit in zip(row["logprobs"], row["mask"], strict=True) if bit] for row in rows]
            reported = await client.mismatch(claimed, rows, logprobs, policy_version=3)
            shown = await client.batch_mismatch(claimed.batch_id)

    assert reported["counted"]
    assert reported["verdicts"] == shown["verdicts"]
    assert 0.0 == shown["cells"]["all"]["all"]["abs_mean"]
