"""The archiver: every version of a rollout is in one file, whenever processes die, and none leaves the store before."""

import asyncio
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.archives import Died, archived_versions, archiver, dying, finished
from tests.support.sweeping import Process, SetClock, open_group

from proxy.clock import SystemClock
from proxy.rollouts.archive.archiver import Archived, BackgroundArchive, RolloutChanged, write_rollout
from proxy.rollouts.archive.dataset import ArchiveError, ArchiveWriter, Dataset, read_rows
from proxy.rollouts.rollout import read_rollout
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import make_metrics
from storage.errors import StorageError, StoreUnreachable


async def names_of(store):
    return sorted([name async for name in store.names()])


async def test_finished_rollouts_are_archived_once(store, tmp_path):
    """By date; open ones are not. A second sweep, and one of another process, write nothing. The version does not change."""
    touched = await finished(store, "a", "b", steps=3)
    await store.open("open", {}, now_ms=1)
    first = await archiver(store, tmp_path).sweep()
    again = [await archiver(store, tmp_path).sweep() for _ in range(2)]

    assert (first.rollouts, first.files) == (2, 1)
    assert [Archived(), Archived()] == again
    assert touched == await archived_versions(tmp_path)
    assert [path.parent.name for path in tmp_path.rglob("*.parquet")] == ["date=1970-01-01"]
    assert touched == {name: (await store.get(name)).touched_ms for name in touched}


async def test_rows_that_are_not_compressed_yet_are_a_metric(store, tmp_path, monkeypatch):
    """At most `buffer_bytes` of them."""
    await finished(store, "a", "b", "c", steps=3)
    sizes: dict[int, list[float]] = {}
    read_all = store.read_all
    for limit in (2**20, 1):
        one = archiver(store, tmp_path / str(limit), buffer_bytes=limit)
        gauge, found = one.metrics.archive_buffer_bytes, sizes.setdefault(limit, [])

        async def noted(*arguments, gauge=gauge, found=found):
            found.append(gauge._value.get())
            return await read_all(*arguments)

        monkeypatch.setattr(store, "read_all", noted)
        await one.sweep()
        found.append(gauge._value.get())

    first, second, third, last = sizes[2**20]
    assert first == last == 0 < second < third
    assert sizes[1] == [0] * 4


async def test_a_rollout_is_archived_again_when_it_was_changed(store, tmp_path):
    """In a new file, with a higher `touched_ms`; the others are not."""
    await finished(store, "a", "b")
    await archiver(store, tmp_path).sweep()
    await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=9000)
    second = await archiver(store, tmp_path).sweep()

    assert second.rollouts == 1
    versions = [Dataset(str(tmp_path)).versions(name) for name in Dataset(str(tmp_path)).names()]
    assert 9000 == versions[1]["a"] > versions[0]["a"]


async def test_rollouts_are_archived_after_their_age(store, tmp_path):
    """The oldest one that waits is reported."""
    await finished(store, "a", now_ms=5000)
    clock = SetClock(14_999)
    early = await archiver(store, tmp_path, clock=clock, older_than_s=10).sweep()
    clock.ms = 15_000
    due = await archiver(store, tmp_path, clock=clock, older_than_s=10).sweep()

    assert (early.rollouts, early.oldest_ms) == (0, 5000)
    assert (due.rollouts, due.oldest_ms) == (1, None)


async def test_members_of_a_group_wait_until_it_is_done_or_dropped(store, tmp_path):
    """With `finished`, they do not; but they stay in the store until then, and leave it with their group."""
    clock = SetClock()
    members = await open_group(store, "g", 2)
    for name in members:
        await Process(store, clock).finisher.finish(read_rollout(await store.get(name)), "completed", reward=1)
    clock.ms = 5000
    waiting = await archiver(store, tmp_path, clock=clock, when="acknowledged").sweep()
    kept = await archiver(store, tmp_path / "f", clock=clock, delete=True).sweep()
    await store.groups.update_if("g", {"status": b'"done"'}, expect={}, now_ms=5000)
    left = await archiver(store, tmp_path / "f", clock=clock, delete=True).sweep()

    assert (waiting.rollouts, kept.rollouts, kept.deleted) == (0, 2, 0)
    assert (left.rollouts, left.deleted) == (0, 2)
    assert (await names_of(store), await store.groups.get("g")) == ([], None)


async def test_a_rollout_that_changes_while_it_is_deleted_remains(store, tmp_path):
    await finished(store, "a", "b")
    await archiver(store, tmp_path).sweep()
    delete = store._store.delete

    async def changed_before(name, **options):
        if name == "a":
            await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=9000)
        return await delete(name, **options)

    store.delete = changed_before
    result = await archiver(store, tmp_path, delete=True).sweep()

    assert (result.deleted, await names_of(store)) == (1, ["a"])


async def test_a_rollout_that_changes_while_its_file_is_written_is_in_a_later_file(store, tmp_path):
    await finished(store, "a", "b", steps=1)
    read_all, changed = store._store.read_all, []

    async def changing(name, limit):
        if name == "a" and not changed:
            changed.append(name)
            await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=9000)
        return await read_all(name, limit)

    store.read_all = changing
    first = await archiver(store, tmp_path).sweep()
    second = await archiver(store, tmp_path).sweep()

    assert (first.rollouts, second.rollouts) == (1, 1)
    assert (await archived_versions(tmp_path))["a"] == 9000


async def test_files_have_a_bounded_number_of_rollouts(store, tmp_path):
    await finished(store, *"abcde")
    result = await archiver(store, tmp_path, rollouts_per_file=2).sweep()

    assert (result.rollouts, result.files) == (5, 3)
    assert len(await archived_versions(tmp_path)) == 5


async def test_a_rollout_of_hundreds_of_steps_is_read_in_pages(store, tmp_path):
    await finished(store, "long", steps=450)
    await archiver(store, tmp_path).sweep()
    dataset = Dataset(str(tmp_path))

    assert [row["index"] for row in dataset.read(dataset.names()[0], ["index"])] == list(range(450))


async def test_several_processes_archive_one_store(store, tmp_path):
    """Every rollout is in one file."""
    touched = await finished(store, *(f"r{number}" for number in range(40)))
    sweeps = [archiver(store, tmp_path, rollouts_per_file=7, delete=True).sweep() for _ in range(3)]
    results = await asyncio.gather(*sweeps)
    last = await archiver(store, tmp_path, delete=True).sweep()

    assert touched == await archived_versions(tmp_path)
    assert sum(result.deleted for result in [*results, last]) == 40


WRITES = ("update_if", "delete", "publish", "versions", "read_all")


@given(st.lists(st.tuples(st.sampled_from(WRITES), st.integers(0, 6), st.booleans()), max_size=4), st.booleans())
async def test_every_version_is_in_one_file_whenever_processes_die(store, tmp_path_factory, deaths, deletes):
    """Before or after each write to the store or the dataset, and each read; the last sweep completes."""
    url = tmp_path_factory.mktemp("archive")
    async for name in store.names():
        await store.delete(name)
    touched = await finished(store, *"abcd", steps=1)
    for at, (verb, number, is_after) in enumerate(deaths):
        process = archiver(store, url, rollouts_per_file=2 + at, delete=deletes)
        dying(process, verb, number, is_after=is_after)
        with suppress(Died, StorageError):
            await process.sweep()
        remaining, safe = await names_of(store), await archived_versions(url)
        assert {name: touched[name] for name in touched if name not in remaining}.items() <= safe.items()
    await archiver(store, url, delete=deletes).sweep()

    assert touched == await archived_versions(url)
    assert ([] if deletes else list("abcd")) == await names_of(store)
    assert not list(url.rglob("*.part"))


async def test_a_dataset_that_cannot_be_written_leaves_the_store_as_it_is(store, tmp_path):
    """The next sweep, once it can, archives all; a store that fails raises StoreUnreachable."""
    touched = await finished(store, "a")
    target = tmp_path / "file"
    target.write_text("in the way")
    with pytest.raises(ArchiveError, match="Cannot write"):
        await archiver(store, target, delete=True).sweep()
    assert await names_of(store) == ["a"]
    target.unlink()
    store.failing.add("update_if")
    with pytest.raises(StoreUnreachable):
        await archiver(store, tmp_path / "other").sweep()
    store.failing.clear()
    await archiver(store, target).sweep()

    assert touched == await archived_versions(target)


@pytest.mark.parametrize("steps", [0, 1, 199, 200, 201, 400])
async def test_every_step_is_a_row(store, steps):
    """A rollout without steps has one."""
    await finished(store, "a", steps=steps)
    file = BytesIO()
    writer = ArchiveWriter(file)
    await write_rollout(store, writer, "a", 2000, set())
    writer.close()

    assert (list(range(steps)) or [None]) == [row["index"] for row in read_rows(file, ["index"])]


async def test_a_version_that_is_not_current_is_refused(store):
    """Also if it changes while its pages are read, or if it is deleted."""
    await finished(store, "a", steps=250)
    read = store._store.read

    async def changing(*args):
        await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=3000)
        return await read(*args)

    for touched_ms in (1999, 2000):
        store.read = changing
        with pytest.raises(RolloutChanged):
            await write_rollout(store, ArchiveWriter(BytesIO()), "a", touched_ms, set())
    await store.delete("a")
    with pytest.raises(RolloutChanged):
        await write_rollout(store, ArchiveWriter(BytesIO()), "a", 3000, set())


def process(store, url, name, **options):
    registry = CollectorRegistry()
    swept = asyncio.Event()
    found = archiver(store, url, **options)
    found.metrics = make_metrics(registry)
    sweep = found.sweep

    async def noted():
        try:
            return await sweep()
        finally:
            swept.set()

    found.sweep = noted
    made = BackgroundArchive(found, process_id=name, interval_s=0.01)
    made.swept, made.registry = swept, registry
    return made


def with_memory(store, limit: int, of_each: int = 100):
    """Let a store report this limit, and this memory for each rollout."""

    async def info():
        return {"memory_share": str(of_each * len(await names_of(store)) / limit if limit else 0)}

    store.info = info


async def test_the_oldest_rollouts_leave_a_full_store_until_less_is_used(store, tmp_path):
    """Their age does not matter; open rollouts stay, and so do those whose group no batch has acknowledged."""
    clock = SetClock(1000)
    members = await open_group(store, "g", 1, now_ms=1)
    await Process(store, clock).finisher.finish(read_rollout(await store.get(members[0])), "completed", reward=1)
    await store.open("open", {}, now_ms=2)
    for number in range(8):
        await finished(store, f"r{number}", steps=1, opened_ms=1000 + number)
    with_memory(store, 1000)
    clock.ms = 10_000
    one = archiver(
        store, tmp_path, clock=clock, when="acknowledged", older_than_s=10**6, rollouts_per_file=2, memory_share=0.65
    )
    was_full = await one.is_full()
    relieved = await one.relieve()

    assert (was_full, await one.is_full(), relieved.deleted) == (True, False, 4)
    assert sorted([*members, "open", "r4", "r5", "r6", "r7"]) == await names_of(store)
    assert sorted(await archived_versions(tmp_path)) == ["r0", "r1", "r2", "r3"]
    assert (await one.relieve()).deleted == 0


async def test_a_store_without_a_memory_limit_is_never_full(store, tmp_path, caplog, monkeypatch):
    """The log names the settings, once."""
    monkeypatch.setattr(LOG, "propagate", True)
    await finished(store, "a")
    with_memory(store, 0)
    one = archiver(store, tmp_path, memory_share=0.1)

    assert [await one.is_full() for _ in range(2)] == [False, False]
    assert caplog.text.count("archive.memory_share has no effect") == 1
    assert "maxmemory" in caplog.text


async def test_a_process_relieves_a_full_store_between_its_sweeps(store, tmp_path):
    await finished(store, "a", "b")
    with_memory(store, 150)
    made = archiver(store, tmp_path, older_than_s=10**10, rollouts_per_file=1, delete=True, memory_share=0.9)
    background = BackgroundArchive(made, process_id="01", interval_s=10**6)
    background.start()
    async with asyncio.timeout(50):
        while len(await names_of(store)) > 1:
            await asyncio.sleep(0.01)
    await background.close()

    assert len(await archived_versions(tmp_path)) == 1


async def test_the_oldest_process_archives_and_the_next_one_when_it_has_gone(store, tmp_path):
    first, second = process(store, tmp_path, "01"), process(store, tmp_path, "02")
    first.start()
    await first.swept.wait()
    second.start()
    touched = await finished(store, "a")
    async with asyncio.timeout(50):
        while not (before := await archived_versions(tmp_path)):
            await asyncio.sleep(0.01)
    leads = [await one.leads() for one in (first, second)]
    await first.close()
    touched |= await finished(store, "b")
    await second.swept.wait()
    async with asyncio.timeout(50):
        while len(after := await archived_versions(tmp_path)) < 2:
            await asyncio.sleep(0.01)
    await second.close()

    assert (list(before), leads, after) == (["a"], [True, False], touched)


async def test_a_failure_is_counted_and_the_next_sweep_continues(store, tmp_path):
    """The age of the oldest rollout that is not archived is a metric."""
    touched = await finished(store, "a")
    target = tmp_path / "file"
    target.write_text("in the way")
    one = process(store, target, "01")
    one.start()
    await one.swept.wait()
    target.unlink()
    async with asyncio.timeout(50):
        while not target.is_dir() or not (found := await archived_versions(target)):
            await asyncio.sleep(0.01)
    await one.close()
    counted = generate_latest(one.registry).decode()

    assert touched == found
    assert "tokentape_archive_failures_total 0.0" not in counted
    assert "tokentape_archive_oldest_age_seconds 0.0" in counted


async def test_the_age_of_a_rollout_that_waits_is_a_metric(store, tmp_path):
    await finished(store, "a", now_ms=SystemClock().now_ms() - 50_000)
    one = process(store, tmp_path, "01", older_than_s=3600)
    one.start()
    await one.swept.wait()
    await asyncio.sleep(0)
    counted = generate_latest(one.registry).decode()
    await one.close()
    (age,) = (
        line.split()[1] for line in counted.splitlines() if line.startswith("tokentape_archive_oldest_age_seconds ")
    )

    assert 50 <= float(age) < 3600
