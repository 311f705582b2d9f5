"""The journal stores steps on disk and replays them in order."""

import asyncio
import os
import resource
from hashlib import blake2b
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from prometheus_client import CollectorRegistry

from proxy.rollouts.outages import Journal, StoreHealth, pack, unpack
from proxy.telemetry.metrics import make_metrics
from storage.errors import RolloutDeleted, StoreUnreachable
from storage.types import Origin, StepWrite


def entry(number: int, record: bytes = b"record") -> StepWrite:
    return StepWrite("r1", "incarnation", f"S{number}", record, {b"\x01\x02": b"block"}, (b"\x03",), {"steps": 1})


def append_to(taken: list):
    async def append(write: StepWrite) -> None:
        taken.append(write)

    return append


async def replayed(journal: Journal) -> list[StepWrite]:
    """Replay all entries, and close the journal."""
    taken: list[StepWrite] = []
    await journal.replay(append_to(taken))
    journal.close()
    return taken


def names_of(taken: list[StepWrite]) -> list[str]:
    return [write.name for write in taken]


@given(st.binary(), st.dictionaries(st.binary(min_size=1), st.binary()), st.text())
def test_an_unpacked_entry_equals_the_packed_one(record, blocks, name):
    fields = {f"f{number}": block for number, block in enumerate(blocks.values())}
    plain = StepWrite("r/ö", "b", name, record, blocks, tuple(blocks), {"steps": 1, "exact": 1})
    whole = replace(plain, late_if="closed", origin=Origin(5, fields), first=fields)
    for before in (plain, whole, replace(plain, origin=Origin(0))):
        assert before == unpack(pack(before))


def framed(fields: dict) -> bytes:
    """Return an entry with these fields as a frame."""
    body = msgspec.msgpack.encode(fields)
    return b"TTJ2" + len(body).to_bytes(4, "little") + blake2b(body, digest_size=16).digest() + body


def test_an_entry_of_another_version_is_read():
    """It lacks fields of later versions, or has some that this one does not know."""
    before = entry(1)
    fields = {name: value for name, value in asdict(before).items() if name not in ("late_if", "origin", "first")}

    assert [unpack(framed(fields)), unpack(framed({**fields, "later": 1}))] == [before, before]


def test_an_entry_of_another_shape_is_damaged():
    """Although its checksum is right."""
    with pytest.raises(ValueError, match="name"):
        unpack(framed({**asdict(entry(1)), "name": 7}))


def test_a_file_that_is_no_journal_is_not_opened(tmp_path):
    """It remains as it is."""
    path = tmp_path / "spool"
    path.write_bytes(b"TTSP" + bytes(40))
    with pytest.raises(OSError, match=f"{path} is not a journal of this version: set a different store.spool_path"):
        Journal(path)

    assert b"TTSP" + bytes(40) == path.read_bytes()


async def test_the_next_process_replays_entries_in_order(tmp_path):
    """After the replay the file is empty."""
    journal = Journal(tmp_path / "deep" / "spool")
    for number in range(5):
        await journal.write(entry(number))
    journal.close()
    second = Journal(tmp_path / "deep" / "spool")
    pending = second.pending

    assert [entry(number) for number in range(5)] == await replayed(second)
    assert (pending, (tmp_path / "deep" / "spool").stat().st_size) == (5, 0)


async def test_a_failed_replay_resumes_where_it_failed(tmp_path):
    """Nothing is skipped; entries written meanwhile come last."""
    journal, taken = Journal(tmp_path / "spool"), []
    await journal.write(entry(1))
    await journal.write(entry(2))

    async def fail_at_the_second(write: StepWrite) -> None:
        if taken:
            raise StoreUnreachable("unreachable")
        taken.append(write)

    with pytest.raises(StoreUnreachable):
        await journal.replay(fail_at_the_second)
    await journal.write(entry(3))
    await journal.replay(append_to(taken))
    journal.close()

    assert [write.name for write in taken] == ["S1", "S2", "S3"]


async def test_rollouts_are_replayed_concurrently_each_in_order(tmp_path):
    """A sequential replay would not keep up with concurrent writers."""
    journal, taken, both = Journal(tmp_path / "spool"), [], asyncio.Barrier(2)
    for number in range(3):
        for rollout in ("r1", "r2"):
            await journal.write(replace(entry(number), rollout=rollout))

    async def together(write: StepWrite) -> None:
        await asyncio.wait_for(both.wait(), 50)
        taken.append((write.rollout, write.name))

    await journal.replay(together)
    journal.close()

    assert journal.pending == 0
    assert [name for rollout, name in taken if rollout == "r1"] == ["S0", "S1", "S2"]
    assert [name for rollout, name in taken if rollout == "r2"] == ["S0", "S1", "S2"]


async def test_a_rollout_that_fails_does_not_delay_others(tmp_path):
    """Only its entries are replayed again."""
    journal, taken = Journal(tmp_path / "spool"), []
    for number, rollout in enumerate(("r1", "r2", "r1")):
        await journal.write(replace(entry(number), rollout=rollout))

    failures = [StoreUnreachable("unreachable")]

    async def refusing(write: StepWrite) -> None:
        if write.rollout == "r1" and failures:
            raise failures.pop()
        taken.append(write.name)

    with pytest.raises(StoreUnreachable):
        await journal.replay(refusing)
    waiting = journal.pending
    taken.append("-")
    await journal.replay(refusing)
    journal.close()

    assert (waiting, taken) == (2, ["S1", "-", "S0", "S2"])


async def test_an_incomplete_last_frame_is_removed(tmp_path):
    """For a cut at every byte, the entries before it and those written next are complete."""
    whole, short = pack(entry(1)), pack(entry(2))
    path = tmp_path / "spool"
    for cut in range(len(short)):
        path.write_bytes(whole + short[:cut])
        journal = Journal(path)
        await journal.write(entry(3))
        assert (names_of(await replayed(journal)), journal.damaged) == (["S1", "S3"], 0)


async def test_only_damaged_entries_are_lost(tmp_path):
    """The entries before and after a damaged entry are replayed; the damaged one is counted."""
    path, frames = tmp_path / "spool", [pack(entry(number)) for number in range(3)]
    damaged = bytearray(frames[1])
    damaged[30] ^= 1
    path.write_bytes(frames[0] + damaged + frames[2])
    journal = Journal(path)

    assert (names_of(await replayed(journal)), journal.damaged) == (["S0", "S2"], 1)


async def test_a_full_disk_leaves_complete_entries(tmp_path, monkeypatch):
    """The write raises, and the next one begins after the last complete entry."""
    journal = Journal(tmp_path / "spool")
    await journal.write(entry(1))
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        await journal.write(entry(2))
    monkeypatch.setattr(os, "fsync", real)
    await journal.write(entry(3))
    journal.close()

    assert names_of(await replayed(Journal(tmp_path / "spool"))) == ["S1", "S3"]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux's limits")
async def test_a_partly_written_entry_is_removed(tmp_path):
    """After a short write, nothing of the entry remains, and a smaller entry still fits."""
    journal, size = Journal(tmp_path / "spool"), 2**20
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * size, hard))  # larger than other files that this process writes
    try:
        await journal.write(entry(1, bytes(5 * size)))
        with pytest.raises(OSError, match="too large"):
            await journal.write(entry(2, bytes(5 * size)))
        length = (tmp_path / "spool").stat().st_size
        await journal.write(entry(3, bytes(2 * size)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.close()
    second = Journal(tmp_path / "spool")

    assert length == len(pack(entry(1, bytes(5 * size))))
    assert (names_of(await replayed(second)), second.damaged) == (["S1", "S3"], 0)


async def test_only_reachable_rollouts_are_replayed(tmp_path):
    """The entries of a dead server are not before those of others: the order is that of each rollout."""
    path = tmp_path / "spool"
    journal, taken = Journal(path), []
    for number, rollout in enumerate(("lost", "kept", "lost", "kept")):
        await journal.write(replace(entry(number), rollout=rollout))
    await journal.replay(append_to(taken), lambda rollout: rollout == "kept")
    replayed = [write.name for write in taken]
    states = ("lost" in journal, "kept" in journal, journal.pending)
    await journal.write(replace(entry(4), rollout="lost"))
    await journal.replay(append_to(taken))
    journal.close()

    assert replayed == ["S1", "S3"]
    assert states == (True, False, 2)
    assert [write.name for write in taken[2:]] == ["S0", "S2", "S4"]
    assert path.stat().st_size == 0


async def test_an_entry_of_another_shape_does_not_stop_the_replay(tmp_path):
    """It is counted as damaged."""
    path = tmp_path / "spool"
    path.write_bytes(framed({**asdict(entry(1)), "rollout": 7}) + pack(entry(2)))
    journal = Journal(path)

    assert (names_of(await replayed(journal)), journal.damaged) == (["S2"], 1)


async def test_a_journal_is_locked_by_one_process(tmp_path):
    """Two writers would corrupt each other's frames."""
    journal = Journal(tmp_path / "spool")
    with pytest.raises(OSError, match="store.spool_path"):
        Journal(tmp_path / "spool")
    journal.close()


def full(store):
    return StoreUnreachable("it is full", store.server_of("r"))


@pytest.fixture
async def back():
    return asyncio.Event()


@pytest.fixture
async def store_health(store, back):
    async def is_back() -> None:
        back.set()

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    yield store_health
    await store_health.close()


async def test_a_store_that_failed_is_unreachable_until_a_write_succeeds(store_health, store, back):
    """A reply to PING is not sufficient, since a full store sends one; journaled steps of other servers are replayed."""
    store.failing.add("probe")
    store_health.failed(full(store))
    with pytest.raises(StoreUnreachable, match="it is full"):
        store_health.check("r")
    await back.wait()
    await store.ping()
    assert store_health.reason("r")
    store.failing.clear()
    while store_health.unreachable:
        await asyncio.sleep(0.01)

    store_health.check("r")


async def test_metrics_name_the_server_that_is_gone(store):
    """`store_up` is 0 if one server is unreachable; one that was replaced disappears."""
    registry = CollectorRegistry()
    health = StoreHealth(store, make_metrics(registry), AsyncMock())
    server, replaced = store.server_of("r"), "db9:1"

    def up(address):
        return registry.get_sample_value("tokentape_store_server_up", {"server": address})

    before = (registry.get_sample_value("tokentape_store_up"), up(server), up(replaced))
    health.unreachable[replaced] = "it is full"
    during = (registry.get_sample_value("tokentape_store_up"), up(server), up(replaced))
    health.probe()
    while health.unreachable:
        await asyncio.sleep(0.01)

    assert (before, during) == ((1, 1, None), (0, 1, 0))
    assert (registry.get_sample_value("tokentape_store_up"), up(server), up(replaced)) == (1, 1, None)


async def test_a_rollout_depends_on_its_server_only(store, store_health):
    """The reason applies to rollouts of the server that failed."""
    store_health.unreachable["db9:1"] = "it is full"

    store_health.check("r")
    store_health.unreachable[store.server_of("r")] = "it is full"
    with pytest.raises(StoreUnreachable, match="it is full"):
        store_health.check("r")


async def test_moving_data_makes_no_server_unreachable(store_health):
    """A slot of a cluster that moves for longer than the timeout fails its calls only."""
    store_health.failed(StoreUnreachable("slot 7 is moving"))

    assert store_health.unreachable == {}


async def test_the_store_is_probed_again_after_an_unexpected_error_of_the_recovery(store):
    """Else it would stay unreachable from the next failure on."""
    events = [asyncio.Event(), asyncio.Event()]

    async def is_back() -> None:
        first, second = events
        if first.is_set():
            second.set()
        else:
            first.set()
            raise ValueError("a bug")

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    for event in events:
        store_health.failed(full(store))
        async with asyncio.timeout(50):
            await event.wait()
    await store_health.close()

    store_health.check("r")


async def test_an_error_of_one_rollout_does_not_make_the_store_unreachable(store_health):
    """RolloutDeleted does not affect other rollouts."""
    store_health.failed(RolloutDeleted("deleted"))

    store_health.check("r")


async def test_work_after_the_recovery_is_repeated_if_it_fails(store):
    """The store counts as reachable only after the work has succeeded."""
    done = asyncio.Event()
    failures = [StoreUnreachable("unreachable again")]

    async def is_back() -> None:
        if failures:
            raise failures.pop()
        done.set()

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    store_health.probe()
    await asyncio.wait_for(done.wait(), 50)
    await store_health.close()

    store_health.check("r")
