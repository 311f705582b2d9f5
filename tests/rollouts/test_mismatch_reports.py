"""Reports of a batch in the store: parts are added atomically, limited, and read back or damaged."""

import asyncio
import copy
import random
import zlib
from functools import reduce
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from benchmarks.mismatch import RULES, VERSION, Batch, simulated
from proxy.errors import Conflict, Damaged, UnprocessableRequest
from proxy.rollouts import mismatch as reports
from proxy.rollouts.mismatch import (
    MAX_VALUES,
    Part,
    Report,
    count_part,
    merged,
    newest_reports,
    part_from,
    read_report,
    tokens_of,
)
from proxy.telemetry.metrics import make_metrics
from storage import StoreOptions, open_store
from tokentape.mismatch_sums import mismatch

CLAIMED, LOGPROBS = simulated(Batch(np.random.default_rng(1)))


def sums_of(*numbers):
    """Return the sums of rows with these numbers."""
    rows, logprobs = [CLAIMED[number] for number in numbers], [LOGPROBS[number] for number in numbers]
    return mismatch(rows, logprobs, policy_version=VERSION)


def report_of(*numbers, rank=0, sums=None, policy="default"):
    part, checked = part_from(rank, {f"r{number}": [0] for number in numbers}, sums or sums_of(*numbers))
    return Report(policy, VERSION, (part,), checked)


RANKS = [report_of(*range(rank, 16, 4), rank=rank) for rank in range(4)]


def of_row(report, name):
    """Return the report as if it were of another row."""
    return Report(report.policy, report.version, (Part(0, frozenset([str(name)])),), report.sums)


async def add(store, report, batch="b"):
    before, now = await count_part(store, batch, report, now_ms=1000)
    return now is not before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_parts_of_four_ranks_add_up_in_any_order_repeated_and_partly_lost(sent):
    """The sums are those of the parts that arrived, each once."""
    reports = [RANKS[rank] for rank in sent]
    total = reports[0]
    for each in reports[1:]:
        total = total.with_part(*each.parts, each.version, each.sums)

    assert sorted({*sent}) == sorted(part.rank for part in total.parts)
    assert reduce(merged, [RANKS[rank].sums for rank in sorted({*sent})]) == total.sums


@pytest.fixture
def unordered(monkeypatch):
    """Let each addition of this process compete in the store, as those of several processes do."""
    monkeypatch.setattr("proxy.rollouts.mismatch._TURNS", SimpleNamespace(setdefault=lambda name, turn: turn))


@pytest.mark.usefixtures("unordered")
async def test_parts_that_processes_add_at_once_are_all_counted_once(server, store):
    """In any order, each of them repeatedly."""
    other = await open_store(f"unix:{server.socket}", StoreOptions(prefix=store.layout.prefix))
    reports = [report_of(number, rank=number) for number in range(8)] * 3
    random.Random(1).shuffle(reports)
    added = await asyncio.gather(*(add((store, other)[at % 2], each) for at, each in enumerate(reports)))
    found = await read_report(store, "b")
    await other.close()

    assert sum(added) == len(found.parts) == 8
    expected = sums_of(0)
    for number in range(1, 8):
        expected = merged(expected, sums_of(number))
    assert found.sums == expected


@pytest.mark.usefixtures("unordered")
async def test_of_parts_that_overlap_one_is_counted(store):
    """The others are conflicts, also if all are added at once."""
    added = await asyncio.gather(*(add(store, report_of(at, at + 1)) for at in (0, 1, 0)), return_exceptions=True)
    found = await read_report(store, "b")

    assert len(found.parts) == 1
    assert len(found.parts[0].rows) == found.sums["sequences"][0] == 2
    assert {True, False, Conflict} >= {each if isinstance(each, bool) else type(each) for each in added}
    assert any(isinstance(each, Conflict) for each in added)


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: b"",
        lambda stored: stored[:-9],
        lambda stored: zlib.compress(b"{"),
        lambda stored: zlib.compress(b"[]"),
        lambda stored: zlib.compress(b"[" * 5000),
        lambda stored: rewritten(stored, lambda report: report.pop()),
        lambda stored: rewritten(stored, lambda report: report[3]["cells"].update(lag={"0": 5})),
        lambda stored: rewritten(stored, lambda report: report[3]["cells"]["all"]["all"]["bins"].pop()),
        lambda stored: rewritten(stored, lambda report: report[3]["cells"]["all"]["all"]["histogram"].append(1)),
        lambda stored: rewritten(stored, lambda report: report[3]["uncertain"].__setitem__(0, None)),
        lambda stored: rewritten(stored, lambda report: report[3].pop("neighbours")),
        lambda stored: rewritten(stored, lambda report: report[2].append([0])),
    ],
)
async def test_a_damaged_report_is_named_and_no_part_is_added_to_it(store, change):
    await add(store, report_of(1))
    stored = (await store.mismatches.get("mismatch:b")).fields["mismatch"]
    await store.mismatches.update_if("mismatch:b", {"mismatch": change(stored)}, expect={}, now_ms=1000)

    with pytest.raises(Damaged, match="stored mismatch 'b'"):
        await read_report(store, "b")
    with pytest.raises(Damaged):
        await add(store, report_of(2))


def rewritten(stored, change):
    report = orjson.loads(zlib.decompress(stored))
    change(report)
    return zlib.compress(orjson.dumps(report))


def with_values(sums, dimension, names):
    """Return the sums with other names of the values of a dimension."""
    changed = copy.deepcopy(sums)
    (cell,) = changed["cells"][dimension].values()
    changed["cells"][dimension] = dict.fromkeys(names, cell)
    return changed


async def test_the_values_of_a_dimension_are_limited_over_all_parts(store):
    """A part that adds more is refused, and what was counted before it remains."""
    sums = sums_of(1)
    for at in range(MAX_VALUES):
        assert await add(store, of_row(report_of(1, sums=with_values(sums, "model", [f"m{at}"])), at))
    with pytest.raises(UnprocessableRequest, match="model has more than 256 values"):
        await add(store, of_row(report_of(1, sums=with_values(sums, "model", ["one more"])), 999))
    assert await add(store, of_row(report_of(1, sums=with_values(sums, "model", ["m0"])), 1000))

    assert len((await read_report(store, "b")).sums["cells"]["model"]) == MAX_VALUES
    assert len((await store.mismatches.get("mismatch:b")).fields["mismatch"]) < 100_000


async def test_sums_beyond_64_bits_are_refused(store):
    sums = sums_of(1)
    sums["sequences"][3] = 2**63
    await add(store, report_of(1, sums=sums))
    with pytest.raises(UnprocessableRequest, match="64 bits"):
        await add(store, of_row(report_of(1, sums=sums), 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums["uncertain"].append(0),
        lambda sums: sums["neighbours"].__setitem__(0, True),
        lambda sums: sums["neighbours"].__setitem__(0, 1.0),
        lambda sums: sums["neighbours"].__setitem__(0, float("nan")),
        lambda sums: sums["neighbours"].__setitem__(0, 10**400),
        lambda sums: sums["neighbours"].__setitem__(0, -1),
        lambda sums: sums["slopes"].update({"1": [[1]] * 6}),
        lambda sums: sums["cells"].update(lag={"x" * 257: next(iter(sums["cells"]["lag"].values()))}),
        lambda sums: sums["cells"].update(lag=[]),
        lambda sums: sums["cells"].clear(),
        lambda sums: sums.clear(),
    ],
)
def test_sums_of_another_shape_are_refused(change):
    sums = sums_of(1)
    change(sums)

    with pytest.raises(UnprocessableRequest):
        part_from(0, {"r": [0]}, sums)


def test_the_rows_of_a_part_are_those_of_its_sums_and_limited():
    with pytest.raises(UnprocessableRequest, match="of 2 rows, and rows has 1"):
        part_from(0, {"r": [0, 0]}, sums_of(1, 2))
    with pytest.raises(UnprocessableRequest, match="at most 20,000 rows"):
        part_from(0, {"r": [0] * 10_001, "q": [0] * 10_000}, sums_of(1))


async def test_the_rows_of_a_batch_are_limited(store):
    first = report_of(1)
    many = Report("default", VERSION, (Part(0, frozenset(map(str, range(100_000)))),), first.sums)
    await add(store, many)
    with pytest.raises(UnprocessableRequest, match="100,000 rows"):
        await add(store, first)


async def test_the_newest_reports_are_summarized_for_a_policy(store):
    for number, policy in enumerate(("default", "other", "default")):
        await count_part(store, f"b{number}", report_of(*range(number, 16), policy=policy), now_ms=1000 + number)
    await store.batches.open("b3", {}, now_ms=2000)
    await store.mismatches.open("mismatch:b4", {}, now_ms=2001)
    metrics = make_metrics(CollectorRegistry())
    found = await newest_reports(store, "default", RULES, metrics)

    assert [(it["batch_id"], it["verdicts"]) for it in found["batches"]] == [("b2", ["numeric"]), ("b0", ["numeric"])]
    assert tokens_of(sums_of(*range(2, 16))) == found["newest"]["tokens"] == found["batches"][0]["tokens"]
    assert await newest_reports(store, "none", RULES, metrics) == {"batches": [], "newest": None}


async def test_a_policy_with_many_reports_does_not_hide_those_of_another(store, monkeypatch):
    """At most 100 of one policy are returned."""
    monkeypatch.setattr(reports, "_LISTED", 8)
    monkeypatch.setattr(reports, "_SHOWN", 3)
    for number in range(20):
        report = report_of(*range(16), policy="rare" if number == 1 else "busy")
        await count_part(store, f"b{number}", report, now_ms=1000 + number)
    metrics = make_metrics(CollectorRegistry())
    found = {policy: await newest_reports(store, policy, RULES, metrics) for policy in ("rare", "busy")}

    assert [each["batch_id"] for each in found["rare"]["batches"]] == ["b1"]
    assert found["rare"]["newest"] is not None
    assert [each["batch_id"] for each in found["busy"]["batches"]] == ["b19", "b18", "b17"]
