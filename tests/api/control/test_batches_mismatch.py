"""Reports of a batch's mismatch: parts, what is refused, and what is read back."""

import asyncio
import copy
from itertools import permutations

import numpy as np
import orjson
import pytest
from tests.support.fakes import settings_for
from tests.support.reading_rows import BACK, TURNS, entries
from tests.support.session import Session
from tests.support.sweeping import SetClock

from proxy.clock import SystemClock
from proxy.server.listener import running
from proxy.telemetry.metrics import MISMATCHES
from tokentape import AsyncClient, ClientError
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

    assert (span["engine"], span["logprobs_mode"]) == ("vllm", "raw_logprobs")
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

    assert counted == [True] * 4
    assert (again.status, again.json["counted"]) == (200, False)
    assert len(shown.json["parts"]) == 4
    tokens = sum(sum(row["mask"]) for row in rows_of(batch))
    assert tokens == shown.json["tokens"] == again.json["tokens"] == shown.json["cells"]["lag"]["0"]["tokens"]
    assert [verdict["verdict"] for verdict in shown.json["verdicts"]] == ["too_few"]
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

    assert [other_rank.status, wider.status, rest.status] == [409, 409, 200]
    assert rest.json["parts"] == [{"rank": 0, "rows": 2}, {"rank": 0, "rows": 2}]


@pytest.mark.parametrize("version", ["4", "x"])
async def test_a_version_that_was_not_announced_is_422(proxy, batch, version):
    refused = await send(proxy, batch, body_of(batch, rows_of(batch), version=version))

    assert (refused.status, refused.json["error"]["param"]) == (422, "policy_version")


async def test_a_version_that_tokens_have_is_taken(proxy):
    """Names that are no numbers have no order: an earlier one is known by the tokens that were sampled with it."""
    await proxy.put("/policy", {"version": "blue"})
    await proxy.group("g1", 1.0)
    batch = await proxy.claim(format="sequences")
    await proxy.put("/policy", {"version": "green"})
    taken, refused = [
        await send(proxy, batch, body_of(batch, rows_of(batch), version=version)) for version in ("blue", "red")
    ]

    assert (taken.status, refused.status) == (200, 422)


async def test_an_earlier_version_is_taken_and_all_parts_have_one(proxy, batch):
    rows = rows_of(batch)
    first = await send(proxy, batch, body_of(batch, rows[:1], version="2"))
    second = await send(proxy, batch, body_of(batch, rows[1:], version="3"))

    assert (first.status, second.status) == (200, 422)


async def test_an_unknown_batch_is_422_and_one_without_parts_404(proxy, batch):
    unknown = await send(proxy, {"batch_id": "none"}, body_of(batch, rows_of(batch)))
    unread = await proxy.get(f"/batches/{batch['batch_id']}/mismatch")

    assert (unknown.status, unread.status) == (422, 404)


async def test_rows_that_are_not_of_the_batch_are_422(proxy, batch):
    body = body_of(batch, rows_of(batch))
    refused = await send(proxy, batch, body | {"rows": {"other": [0, 1, 2, 3]}})

    assert (refused.status, refused.json["error"]["param"]) == (422, "rows")


async def test_sums_that_contradict_each_other_or_are_incomplete_are_422(proxy, batch):
    body = body_of(batch, rows_of(batch))
    contradicting, incomplete = copy.deepcopy(body), copy.deepcopy(body)
    contradicting["sums"]["cells"]["all"]["all"]["tail"] = 10**6
    del incomplete["sums"]["uncertain"][0]
    refused = [await send(proxy, batch, each) for each in (contradicting, incomplete)]

    assert [(response.status, response.json["error"]["param"]) for response in refused] == [(422, "sums")] * 2


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[NaN', 1), 422),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[Infinity', 1), 422),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[' + b"9" * 30, 1), 400),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[' + b"[" * 1000 + b"]" * 1000, 1), 400),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[true', 1), 422),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[18446744073709551615', 1), 422),
        (lambda text: text.replace(b'"uncertain":[0', b'"uncertain":[-9223372036854775808', 1), 422),
        (lambda text: text.replace(b'"rank":0', b'"rank":-1', 1), 422),
        (lambda text: text.replace(b'"policy_version":"3"', b'"policy_version":3', 1), 422),
        (lambda text: text.replace(b'"all":{"all"', b'"all":{"every"', 1), 422),
        (lambda text: text.replace(b'"all":{"all"', '"é\u202e":{"all"'.encode(), 1), 422),
        (lambda text: text.replace(b'"sums":{', b'"sums":{},"more":{', 1), 422),
    ],
)
async def test_hostile_bodies_are_refused_and_count_nothing(proxy, batch, change, status):
    text = orjson.dumps(body_of(batch, rows_of(batch)))
    assert text != change(text)
    path = f"/batches/{batch['batch_id']}/mismatch"
    refused = await proxy.call("POST", path, data=change(text), headers={"Content-Type": "application/json"})

    assert status == refused.status
    assert refused.json["error"]["message"]
    assert (await proxy.get(path)).status == 404


async def test_a_report_requires_the_control_key(proxy, store, batch):
    keys = {"control": {"api_keys": ["control"]}, "agents": {"api_keys": ["agent"]}}
    path, body = f"/batches/{batch['batch_id']}/mismatch", body_of(batch, rows_of(batch))
    async with running(settings_for("http://127.0.0.1:9", **keys), store) as guarded:
        session = Session(proxy.http, guarded.url)
        sent = [
            await session.post(path, body, headers={"Authorization": f"Bearer {key}"})
            for key in ("", "agent", "control")
        ]

    assert [response.status for response in sent] == [401, 403, 200]


async def test_a_damaged_report_is_named(proxy, store, batch):
    body, path = body_of(batch, rows_of(batch)), f"/batches/{batch['batch_id']}/mismatch"
    await store.mismatches.open(f"mismatch:{batch['batch_id']}", {"mismatch": b"{"}, now_ms=1000)
    responses = [await proxy.get(path), await send(proxy, batch, body)]

    assert [(each.status, each.json["error"]["code"]) for each in responses] == [(409, "damaged_record")] * 2
    assert batch["batch_id"] in responses[0].json["error"]["message"]


async def test_a_batch_is_reported_after_its_acknowledgement_but_not_after_a_release(proxy, batch):
    """The groups of a released batch are trained by another consumer."""
    await proxy.ack(batch, delete=True)
    acked = await send(proxy, batch, body_of(batch, rows_of(batch)))
    await proxy.group("g3", 1.0)
    released = await proxy.claim(format="sequences")
    await proxy.release(released)
    refused = await send(proxy, released, body_of(released, rows_of(released)))

    assert (acked.status, refused.status) == (200, 409)


async def test_reports_expire_an_hour_after_the_longest_lease(proxy, store, batch):
    await send(proxy, batch, body_of(batch, rows_of(batch)))

    assert store.mismatches.ttl_s == 25 * 3600


async def test_a_batch_is_reported_an_hour_after_its_lease(proxy, store, batch):
    """By a proxy whose clock is that much later."""
    now_ms = SystemClock().now_ms()
    async with running(settings_for("http://127.0.0.1:9"), store, SetClock(now_ms + 2 * 3_600_000)) as later:
        late = await Session(proxy.http, later.url).post(
            f"/batches/{batch['batch_id']}/mismatch", body_of(batch, rows_of(batch))
        )

    assert (late.status, late.json["counted"]) == (200, True)


async def test_metrics_have_the_mean_of_each_part_and_each_verdict_of_a_batch_once(proxy, batch):
    """A part that is repeated does not count again."""
    parts = [body_of(batch, [row], rank=rank) for rank, row in enumerate(rows_of(batch))]
    for part in (*parts, parts[0]):
        assert (await send(proxy, batch, part)).status == 200
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tokentape_mismatch_"))
    verdicts = {name: value for name, value in found.items() if "verdicts" in name}

    assert found['tokentape_mismatch_abs_mean_count{policy="default"}'] == "4.0"
    assert 0 < float(found['tokentape_mismatch_abs_mean_sum{policy="default"}']) < 0.08
    assert len(MISMATCHES) == len(verdicts)
    assert {value for name, value in verdicts.items() if "too_few" in name} == {"1.0"}
    assert {value for name, value in verdicts.items() if "too_few" not in name} == {"0.0"}


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

    assert [each["verdict"] for each in usual["verdicts"]] == ["too_few"]
    assert [each["verdict"] for each in shown["verdicts"]] == ["numeric"]


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
    assert [each["policy_version"] for each in found["batches"]] == ["2", "3"]
    assert reported.json["tokens"] == found["batches"][1]["tokens"]
    assert found["batches"][1]["verdicts"] == ["too_few"]
    assert set(found["newest"]["cells"]["lag"]) == {"-1"}
    assert found["newest"]["sequences"]["rows"] == 1


async def test_training_without_reports_has_none(proxy):
    assert (await proxy.get("/training")).json["mismatch"] == {"batches": [], "newest": None}


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
    assert shown["cells"]["all"]["all"]["abs_mean"] == 0.0


@pytest.mark.parametrize(
    "form", ["trl", "verl_dataproto", "slime", "openrlhf_experience", "areal", "training_examples"]
)
async def test_the_client_reports_rows_of_other_formats_by_what_the_claim_has_of_them(proxy, batch, form):
    await proxy.release(batch)
    options = {"format": form, "prompt_length": 64, "response_length": 64}
    async with AsyncClient(proxy.url) as client:
        async for claimed in client.batches(consumer="t", groups=2, wait_s=0, **options):
            rows = [row for group in claimed.groups for row in group["rows"]]
            data = [row for group in claimed.groups for row in entries(form, group["data"])]
            reported = await client.mismatch(claimed, rows, [recorded_in(form, row) for row in data], policy_version=3)
            shown = await client.batch_mismatch(claimed.batch_id)

    assert reported["counted"]
    assert sum(sum(row["mask"]) for row in rows_of(batch)) == reported["tokens"]
    assert pytest.approx(shown["cells"]["all"]["all"]["abs_mean"], abs=1e-7) == 0


def recorded_in(form, row):
    """Return the logprobs of the trained tokens of a row."""
    if form in TURNS:
        return TURNS[form](row)[2]
    _, mask, logprobs = BACK[form](row)
    return [value for value, bit in zip(logprobs, mask, strict=True) if bit]


async def test_the_options_of_a_claim_select_the_tokens_that_are_read_again(proxy):
    """Here the longest row, without its last turn."""
    (member,) = await proxy.open_group("g", 1)
    await proxy.turns(member, 3)
    await proxy.chat(member)
    await proxy.finish(member, reward=1.0)
    row = max((await proxy.get(f"/rollouts/{member}/export")).json["rows"], key=lambda row: len(row["token_ids"]))
    options = {"format": "slime", "branches": "longest", "max_len": row["spans"][1]["end"]}
    async with AsyncClient(proxy.url) as client:
        async for claimed in client.batches(consumer="t", groups=1, wait_s=0, **options):
            (place,), (data,) = claimed.groups[0]["rows"], claimed.groups[0]["data"]
            await proxy.put("/policy", {"version": 3})
            reported = await client.mismatch(claimed, [place], [recorded_in("slime", data)], policy_version=3)

    assert len(place["step_ids"]) == 2
    assert sum(data["loss_mask"]) == reported["tokens"] > 0


async def test_a_batch_that_was_not_claimed_has_a_name_and_a_policy(proxy, batch, monkeypatch):
    """Its rollouts were exported one by one: the ID of each is enough. The proxy reads few of them at a time."""
    monkeypatch.setattr("proxy.api.control.batches._AT_ONCE", 1)
    rows = rows_of(batch)
    names = [row["rollout_id"] for row in rows]
    logprobs = [recorded_in("sequences", row) for row in rows]
    given = {"policy_version": 3, "policy": "default"}
    async with AsyncClient(proxy.url) as client:
        first = await client.mismatch("run-1", names[:2], logprobs[:2], **given)
        second = await client.mismatch("run-1", names[2:], logprobs[2:], rank=1, **given)
        again = await client.mismatch("run-1", names[2:], logprobs[2:], rank=1, **given)
        with pytest.raises(ClientError, match="'run-1' not found"):
            await client.mismatch("run-1", names, logprobs, policy_version=3)
        shown = await client.batch_mismatch("run-1")

    assert [each["counted"] for each in (first, second, again)] == [True, True, False]
    assert [{"rank": 0, "rows": 2}, {"rank": 1, "rows": len(rows) - 2}] == shown["parts"]
    assert sum(sum(row["mask"]) for row in rows) == shown["tokens"]


async def test_a_batch_that_was_not_claimed_has_known_rollouts_and_a_known_policy(proxy, batch):
    body = body_of(batch, rows_of(batch)) | {"policy": "default"}
    path = "/batches/run-1/mismatch"
    refused = [
        await proxy.post(path, body_of(batch, rows_of(batch)[:1]) | {"policy": "default", "rows": {"other": [0]}}),
        await proxy.post(path, body | {"policy": "other"}),
        await proxy.post(path, body_of(batch, rows_of(batch), version="x") | {"policy": "default"}),
        await send(proxy, batch, body | {"policy": "other"}),
    ]

    assert [(response.status, response.json["error"]["param"]) for response in refused] == [
        (422, "rows"),
        (422, "policy"),
        (422, "policy_version"),
        (422, "policy"),
    ]
