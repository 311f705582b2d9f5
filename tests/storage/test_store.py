"""The guarantees of `Store`, tested on every kind of server."""

import asyncio

import pytest
from msgspec.structs import replace

from storage.errors import FieldsChanged, MissingBlocks, RolloutDeleted, RolloutExpired
from storage.types import Announcement, Origin, Reservation, StepWrite

HOSTILE = (
    "a", "A", "a:b", "a:records:b", "{a}", "{a}{b}", "}{", "a\nb", "a\r\n$3\r\n", "../a", "a/b", "%41", "%", "*", "?", "[a-z]",
    "🙂", "é", "e\u0301", " ", " a", "\x00", "f:status", "listing", "birth", "\ud800", "x" * 256, "🙂" * 256,
)  # fmt: skip


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """Return an empty store."""
    return await opened(url_of(request.param))


async def opened_entry(store, rollout="r", **more):
    """Open a rollout and return an entry to append to it."""
    incarnation = (await store.open(rollout, {}, now_ms=1)).incarnation
    return StepWrite(rollout, incarnation, "s1", b"record", **more)


async def test_the_first_open_creates_a_rollout_and_later_ones_return_it(store):
    """`open` creates the rollout with the fields if it does not exist, and changes no field of an existing one."""
    made = await store.open("r", {"status": b"open", "empty": b""}, now_ms=1_000)
    found = await store.open("r", {"status": b"other"}, now_ms=2_000)

    assert made.created
    assert (made.created_ms, made.touched_ms) == (1_000, 1_000)
    assert made.fields == found.fields == {"status": b"open", "empty": b""}
    assert replace(made, created=False, touched_ms=2_000) == found


async def test_concurrent_opens_of_one_name_create_one_incarnation(store):
    """One of many concurrent opens creates the rollout, and all return the same incarnation."""
    rollouts = await asyncio.gather(*(store.open("r", {"who": b"%d" % i}, now_ms=i) for i in range(50)))

    assert len({rollout.incarnation for rollout in rollouts}) == 1
    assert sum(rollout.created for rollout in rollouts) == 1
    assert len({rollout.fields["who"] for rollout in rollouts}) == 1
    assert (await store.list()).names == ("r",)


async def test_get_creates_nothing(store, key_count):
    """`get` returns None for a rollout that does not exist, and creates nothing."""
    assert None is await store.get("r")
    assert await key_count(store) == 0

    made = await store.open("r", {"a": b"1"}, now_ms=1)

    assert replace(made, created=False) == await store.get("r")


async def test_update_if_sets_and_removes_fields_if_all_have_the_expected_values(store):
    """`update_if` sets and removes fields, changes nothing else, and returns the new state."""
    await store.open("r", {"a": b"1", "b": b"2", "c": b"3"}, now_ms=1)

    updated = await store.update_if("r", {"a": b"", "b": None, "d": b"="}, expect={"a": b"1", "d": None}, now_ms=2)

    assert updated.fields == {"a": b"", "c": b"3", "d": b"="}
    assert updated.touched_ms == 2
    assert updated == await store.get("r")


@pytest.mark.parametrize("expect", [{"a": b"2"}, {"a": None}, {"b": b""}, {"a": b"1", "b": b"1"}])
async def test_update_if_writes_nothing_if_a_field_has_another_value(store, expect):
    """A field with another value raises `FieldsChanged` with the current state, and changes nothing."""
    before = replace(await store.open("r", {"a": b"1"}, now_ms=1), created=False)

    with pytest.raises(FieldsChanged) as caught:
        await store.update_if("r", {"a": b"9", "z": b"9"}, expect=expect, now_ms=2)

    assert before == caught.value.rollout
    assert before == await store.get("r")


async def test_update_if_can_expect_that_a_rollout_was_not_touched(store):
    """A write of any kind since then raises `FieldsChanged`."""
    await store.open("r", {"a": b"1"}, now_ms=1)
    updated = await store.update_if("r", {"a": b"2"}, expect={"a": b"1"}, now_ms=2, touched_ms=1)
    await store.open("r", {}, now_ms=3)

    with pytest.raises(FieldsChanged) as caught:
        await store.update_if("r", {"a": b"3"}, expect={"a": b"2"}, now_ms=4, touched_ms=2)
    assert (updated.touched_ms, caught.value.rollout.touched_ms) == (2, 3)
    assert (await store.get("r")).fields == {"a": b"2"}


async def test_update_if_creates_no_rollout(store, key_count):
    """`update_if` returns None if the rollout does not exist, with any expected values."""
    assert None is await store.update_if("r", {"a": b"1"}, expect={}, now_ms=1)
    assert None is await store.update_if("r", {"a": b"1"}, expect={"a": b"2"}, now_ms=1)
    assert await key_count(store) == 0


async def test_one_of_concurrent_updates_with_the_same_expected_value_succeeds(store):
    """Compare and set: one of many updates that expect the same value sets it."""
    await store.open("r", {"holder": b""}, now_ms=1)

    responses = await asyncio.gather(
        *(store.update_if("r", {"holder": b"%d" % i}, expect={"holder": b""}, now_ms=2) for i in range(20)),
        return_exceptions=True,
    )

    assert sum(isinstance(response, FieldsChanged) for response in responses) == 19


async def test_append_stores_records_in_order_with_their_blocks_and_counts(store):
    """Records, blocks and counts are stored when `append` returns the position."""
    entry = await opened_entry(store, blocks={b"\x00b1": b"\r\n", b"b2": b""}, counts={"steps": 1, "tokens": 7})
    second = replace(entry, name="s2", record=b"", blocks={}, required_blocks=(b"\x00b1", b"b2"), counts={"steps": 1})

    indices = [(await store.append(write, now_ms=5 + index)).position for index, write in enumerate((entry, second))]

    assert indices == [0, 1]
    assert await store.read("r", 0, 10) == [b"record", b""]
    assert await store.blocks("r") == {b"\x00b1": b"\r\n", b"b2": b""}
    rollout = await store.get("r")
    assert rollout.counts == {"steps": 2, "tokens": 7}
    assert (rollout.created_ms, rollout.touched_ms) == (1, 6)


async def test_append_of_a_stored_name_changes_nothing(store):
    """Appending a name again returns the first position and changes no record, block or count."""
    entry = await opened_entry(store, blocks={b"b": b"1"}, counts={"steps": 1})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2"), now_ms=3)

    again = replace(entry, record=b"other", blocks={b"c": b"2"}, required_blocks=(b"missing",))

    assert await store.append(again, now_ms=4) == (0, False, False, False)
    assert await store.read("r", 0, 10) == [b"record", b"record"]
    assert await store.blocks("r") == {b"b": b"1"}
    assert (await store.get("r")).counts == {"steps": 2}


async def test_append_with_missing_blocks_writes_nothing(store):
    """An entry that requires missing blocks raises `MissingBlocks` with their names, and writes nothing."""
    entry = await opened_entry(store, blocks={b"new": b"1"}, counts={"steps": 1})
    await store.append(replace(entry, name="s0", blocks={b"old": b"0"}, counts={}), now_ms=2)
    before = await store.get("r")

    with pytest.raises(MissingBlocks) as caught:
        await store.append(replace(entry, required_blocks=(b"absent", b"old", b"new")), now_ms=3)

    assert caught.value.names == (b"absent", b"new")
    assert before == await store.get("r")
    assert await store.blocks("r") == {b"old": b"0"}
    assert await store.read("r", 0, 10) == [b"record"]
    assert None is await store.find("r", "s1")


async def test_a_block_is_written_once(store):
    """A stored block is not overwritten, since its name determines its bytes."""
    entry = await opened_entry(store, blocks={b"b": b"1"})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", blocks={b"b": b"other"}), now_ms=3)

    assert await store.blocks("r") == {b"b": b"1"}


async def test_append_to_a_deleted_incarnation_is_refused(store, key_count):
    """After a delete, and after a later open, appends and marks of the old incarnation raise `RolloutDeleted`."""
    entry = await opened_entry(store, counts={"steps": 1})
    await store.delete("r")

    with pytest.raises(RolloutDeleted, match="'r' was deleted"):
        await store.append(entry, now_ms=2)
    with pytest.raises(RolloutDeleted):
        await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=2)
    assert await key_count(store) == 0

    reopened = replace(await store.open("r", {}, now_ms=3), created=False)

    assert reopened.incarnation != entry.incarnation
    with pytest.raises(RolloutDeleted):
        await store.append(entry, now_ms=4)
    with pytest.raises(RolloutDeleted):
        await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=4)
    assert reopened == await store.get("r")


async def test_concurrent_appends_are_all_stored(store):
    """Of concurrent appends, none is lost and none is stored twice; each name has its own position."""
    entry = await opened_entry(store, counts={"steps": 1})
    entries = [replace(entry, name=f"s{i % 100}", record=b"%d" % (i % 100)) for i in range(200)]

    indices = [
        appended.position for appended in await asyncio.gather(*(store.append(write, now_ms=2) for write in entries))
    ]

    assert indices[:100] == indices[100:]
    assert sorted(indices[:100]) == list(range(100))
    records = await store.read("r", 0, 1000)
    assert [b"%d" % i for i in range(100)] == [records[index] for index in indices[:100]]
    assert (await store.get("r")).counts == {"steps": 100}


async def test_a_large_entry_is_stored_unchanged(store):
    """Records of megabytes and thousands of blocks in one entry are stored unchanged."""
    blocks = {b"b%d" % i: b"%d" % i for i in range(10_000)}
    entry = await opened_entry(store, blocks=blocks)
    entry = replace(entry, record=bytes(range(256)) * 16_384)

    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", blocks={}, required_blocks=tuple(blocks)), now_ms=3)

    assert [entry.record] * 2 == await store.read("r", 0, 2)
    assert blocks == await store.blocks("r")


async def test_marks_are_set_and_read(store):
    """Marks are stored with the rollout; the last value of a mark is returned."""
    entry = await opened_entry(store)
    await store.mark("r", entry.incarnation, {"reward:s1": b"1", "é": b"\xff"}, now_ms=2)
    await store.mark("r", entry.incarnation, {"reward:s1": b"2"}, now_ms=3)

    assert await store.marks("r") == {"reward:s1": b"2", "é": b"\xff"}
    assert await store.marks("r", ["é", "none"]) == {"é": b"\xff"}
    assert await store.marks("r", []) == {}
    assert await store.marks("other") == await store.marks("other", ["é"]) == {}
    assert (await store.get("r")).touched_ms == 3


async def test_read_returns_a_range_of_records(store):
    """`read` returns up to `limit` records from `start`; none after the end, for a negative start or for limit 0."""
    entry = await opened_entry(store)
    for i in range(5):
        await store.append(replace(entry, name=f"s{i}", record=b"%d" % i), now_ms=2)

    assert await store.read("r", 1, 2) == [b"1", b"2"]
    assert await store.read("r", 4, 9) == [b"4"]
    assert await store.read("r", 5, 9) == []
    assert await store.read("r", -1, 9) == []
    assert await store.read("r", 0, 0) == []
    assert await store.read("other", 0, 9) == []


async def test_find_returns_a_record_by_name(store):
    """`find` returns the position and the record of a name, or None."""
    entry = await opened_entry(store)
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", record=b"2"), now_ms=2)

    assert await store.find("r", "s2") == (1, b"2")
    assert None is await store.find("r", "s3")
    assert None is await store.find("other", "s2")


async def test_read_all_returns_the_same_as_the_single_methods(store):
    """`read_all` returns records, blocks, marks and the rollout; None for a rollout that does not exist."""
    assert None is await store.read_all("r", 10)
    entry = await opened_entry(store, blocks={b"b": b"1"}, counts={"steps": 1})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", record=b"second"), now_ms=3)
    await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=4)

    full = await store.read_all("r", 10)

    assert (await store.read("r", 0, 10), await store.blocks("r"), await store.marks("r")) == (
        full.records,
        full.blocks,
        full.marks,
    )
    assert await store.get("r") == full.rollout
    assert (await store.read_all("r", 1)).records == [b"record"]


async def test_blocks_are_found_by_name(store):
    """`blocks` returns the existing blocks of the requested names; none for no names."""
    entry = await opened_entry(store, blocks={b"a": b"1", b"b": b"2", b"c": b"3"})
    await store.append(entry, now_ms=2)

    assert await store.blocks("r", [b"c", b"x", b"a"]) == {b"a": b"1", b"c": b"3"}
    assert await store.blocks("r", []) == {}
    assert await store.blocks("other") == {}


async def test_list_is_newest_first_and_pages_without_gap_or_repeat(store):
    """Paging lists every rollout once, newest first, while others are opened and deleted."""
    expected = {}
    for i in range(60):
        expected[f"r{i}"] = i // 7
        await store.open(f"r{i}", {}, now_ms=i // 7)

    seen, cursor = [], None
    for page_number in range(100):
        page = await store.list(cursor=cursor, limit=7)
        assert len(page.names) <= 7
        seen += page.names
        await store.open(f"new{page_number}", {}, now_ms=50 + page_number)
        await store.delete(f"new{page_number - 1}")
        cursor = page.cursor
        if cursor is None:
            break

    assert sorted(expected) == sorted(seen)
    assert sorted(expected.values(), reverse=True) == [expected[name] for name in seen]


async def test_the_last_page_has_no_cursor(store):
    """The cursor is None on the last page, even if that page is full, and on an empty one."""
    assert ((page := await store.list()).names, page.cursor) == ((), None)
    for i in range(4):
        await store.open(f"r{i}", {}, now_ms=i)

    first = await store.list(limit=2)
    second = await store.list(limit=2, cursor=first.cursor)

    assert first.names == ("r3", "r2")
    assert second.names == ("r1", "r0")
    assert None is second.cursor


async def test_list_since_a_time_omits_older_rollouts(store):
    """`since_ms` omits rollouts that were created before it."""
    for i in range(4):
        await store.open(f"r{i}", {}, now_ms=10 * i)

    assert (await store.list(since_ms=20)).names == ("r3", "r2")
    assert (await store.list(since_ms=21)).names == ("r3",)
    assert len((await store.list(since_ms=-5)).names) == 4


@pytest.mark.parametrize(
    "cursor", ["", "x", "5", "000000000000001", "-", "(", "00000000000000\u0661r", "000000000000001é"]
)
async def test_an_invalid_cursor_is_refused(on_redis, cursor):
    """A cursor that no page returned raises ValueError."""
    with pytest.raises(ValueError, match="is not a cursor of this listing"):
        await on_redis.list(cursor=cursor)


async def test_names_iterates_over_all_rollouts(store):
    """`names` returns every rollout, newest first."""
    for i in range(5):
        await store.open(f"r{i}", {}, now_ms=i)

    assert [name async for name in store.names()] == ["r4", "r3", "r2", "r1", "r0"]


async def test_hostile_names_do_not_touch_each_other(store, key_count):
    """Rollouts with any names have separate records, fields, listings and deletions."""
    for i, name in enumerate(HOSTILE):
        entry = await opened_entry(store, name, blocks={b"b": b"%d" % i}, counts={"steps": 1})
        await store.append(replace(entry, record=b"%d" % i), now_ms=2)

    assert sorted(HOSTILE) == sorted((await store.list()).names)
    for i, name in enumerate(HOSTILE):
        assert await store.read(name, 0, 9) == [b"%d" % i]
        assert await store.blocks(name) == {b"b": b"%d" % i}
        assert (await store.get(name)).counts == {"steps": 1}
        assert await store.delete(name)
        assert len(HOSTILE) - 1 - i == len((await store.list()).names)
    assert await key_count(store) == 0


async def test_a_delete_may_expect_the_time_of_the_last_write(store):
    """A rollout that was touched since remains."""
    await store.open("r", {}, now_ms=5)

    assert [await store.delete("r", touched_ms=touched_ms) for touched_ms in (4, 5, 5)] == [False, True, False]


async def test_delete_leaves_no_key(store, key_count):
    """`delete` removes all keys of a rollout and returns whether it existed."""
    for name in ("r", "q"):
        entry = await opened_entry(store, name, blocks={b"b": b"1"}, counts={"steps": 1})
        await store.append(entry, now_ms=2)
        await store.mark(name, entry.incarnation, {"m": b"1"}, now_ms=3)

    assert [await store.delete(name) for name in ("r", "r", "never")] == [True, False, False]
    assert None is await store.get("r")
    assert (await store.list()).names == ("q",)
    assert await store.read("q", 0, 9) == [b"record"]
    assert await store.marks("q") == {"m": b"1"}
    assert await store.delete("q")
    assert await key_count(store) == 0


async def test_constants_are_set_once(store):
    """All callers get the first value of a constant."""
    values = await asyncio.gather(*(store.set_once("salt", b"%d" % i) for i in range(10)))

    assert len(set(values)) == 1
    assert values[0] == await store.set_once("salt", b"later")
    assert await store.set_once("other", b"x") == b"x"


async def test_info_and_ping_connect_to_the_store(store):
    """`ping` returns, and `info` has servers, versions and durability as text."""
    await store.ping()
    facts = await store.info()

    assert facts["durability"] == "acknowledged"
    assert facts["version"].split()[0] in ("valkey", "redis")
    assert facts["servers"]
    assert all(isinstance(fact, str) for fact in facts.values())


def names_in_slot(store, group: str, count: int) -> list[str]:
    found = (f"r{n}" for n in range(10_000))
    return [name for name in found if store.same_slot(group, name)][:count]


async def test_open_group_creates_a_group_and_its_rollouts(store):
    """All have their fields and are listed; groups have a separate namespace."""
    names = names_in_slot(store, "g", 5)
    made = await store.open_group("g", {"size": b"5"}, {name: {"of": b"g", "n": b""} for name in names}, now_ms=7)

    assert (made.created, made.fields, made.created_ms) == (True, {"size": b"5"}, 7)
    assert [(await store.get(name)).fields for name in names] == [{"of": b"g", "n": b""}] * 5
    assert sorted(names) == sorted((await store.list()).names)
    assert (await store.groups.list()).names == ("g",)
    assert await store.get("g") is None
    assert replace(made, created=False) == await store.groups.get("g")


async def test_open_group_does_not_change_an_existing_group(store):
    """The second call creates nothing, and its result is not `created`."""
    first, other = names_in_slot(store, "g", 2)
    made = await store.open_group("g", {"size": b"1"}, {first: {}}, now_ms=1)
    again = await store.open_group("g", {"size": b"2"}, {other: {}}, now_ms=2)

    assert replace(made, created=False) == again
    assert await store.get(other) is None


async def test_a_rollout_in_another_slot_than_its_group_is_refused(store, key_count):
    """A cluster cannot create both in one transaction."""
    (name,) = [name for name in (f"r{n}" for n in range(100)) if not store.same_slot("g", name)][:1]

    with pytest.raises(ValueError, match="not in the same slot"):
        await store.open_group("g", {}, {name: {}}, now_ms=1)
    assert await key_count(store) == 0


async def test_a_group_has_the_methods_of_a_rollout(store):
    """Changes of a group do not change a rollout with the same name."""
    await store.open("g", {"a": b"rollout"}, now_ms=1)
    made = await store.open_group("g", {}, {}, now_ms=1)
    await store.groups.mark("g", made.incarnation, {"m": b"1"}, now_ms=2)
    await store.groups.update_if("g", {"status": b"complete"}, expect={"status": None}, now_ms=3)

    assert await store.groups.marks("g") == {"m": b"1"}
    assert (await store.groups.get("g")).fields == {"status": b"complete"}
    assert await store.groups.delete("g")
    assert (await store.get("g")).fields == {"a": b"rollout"}


async def test_every_open_returns_the_announcements(store):
    """Every `open` of any rollout returns the latest announcements; `open` of a group does not."""
    assert (await store.open("r", {}, now_ms=1)).announcements == {}
    await store.announcements.announce("policy", b"1")
    await store.announcements.announce("policy", b"2")
    await store.announcements.announce("other", b"")

    announced = [(await store.open(f"r{n}", {}, now_ms=1)).announcements for n in range(40)]

    assert [{"policy": Announcement(b"2", 2), "other": Announcement(b"", 1)}] * 40 == announced
    assert announced[0] == await store.announcements.read()
    assert (await store.groups.open("g", {}, now_ms=1)).announcements == {}


async def test_concurrent_announcements_end_with_one_value_in_all_buckets(store):
    """All buckets have the same announcement after any interleaving."""
    await asyncio.gather(*(store.announcements.announce("policy", b"%d" % n) for n in range(30)))

    announced = {(await store.open(f"r{n}", {}, now_ms=1)).announcements["policy"] for n in range(60)}

    assert len(announced) == 1


async def test_of_concurrent_conditional_announcements_one_succeeds(store):
    """The number of the present announcement is compared; all buckets have the value that won."""
    tried = [store.announcements.announce_if("lock", b"%d" % n, 0) for n in range(10)]
    made = [announcement for announcement in await asyncio.gather(*tried) if announcement is not None]
    outdated = await store.announcements.announce_if("lock", b"x", 0)
    later = await store.announcements.announce_if("lock", b"y", made[0].number)
    announced = [(await store.open(f"r{n}", {}, now_ms=1)).announcements["lock"] for n in range(40)]

    assert ([announcement.number for announcement in made], outdated) == ([1], None)
    assert [Announcement(b"y", 2)] * 40 == [later] * 40 == announced


async def test_batches_have_a_separate_namespace(store):
    """Batches are stored like groups, for one week at most."""
    made = await store.batches.open("b", {"a": b"1"}, now_ms=1)

    assert replace(made, created=False) == await store.batches.get("b")
    assert await store.groups.get("b") is None
    assert await store.get("b") is None
    assert str(7 * 86_400) == (await store.batches.info())["ttl_s"]


async def reserve(store, name, rollout="r", lease_ms=60_000):
    """Open a rollout with a limit of five; return whether the reservation was made."""
    return (
        await store.open(rollout, {"places": b"5"}, now_ms=1, reservation=Reservation(name, lease_ms))
    ).has_reservation


async def test_reservations_are_made_up_to_the_limit(store):
    """Concurrent requests get as many reservations as the limit; a repeated request keeps its own."""
    reserved = await asyncio.gather(*(reserve(store, f"s{number}") for number in range(50)))
    again = await asyncio.gather(*(reserve(store, f"s{number}") for number in range(50)))

    assert sum(reserved) == 5
    assert reserved == again


async def test_a_reservation_is_used_up_by_its_record_or_released(store):
    """Records and reservations together never exceed the limit."""
    reserved = [await reserve(store, f"s{number}") for number in range(1, 7)]
    entry = await opened_entry(store)
    for _ in range(2):  # repeated, as if the response was lost
        await store.append(entry, now_ms=2)
    full = await reserve(store, "s7")
    await store.extend("r", entry.incarnation, Reservation("s2", 0))
    released = [await reserve(store, "s8"), await reserve(store, "s9")]

    assert reserved == [True] * 5 + [False]
    assert [full, *released] == [False, True, False]


async def test_a_reservation_expires_unless_it_is_extended(store, until):
    """Reservations of a process that died are released."""
    reserved = [await reserve(store, f"s{number}", lease_ms=20) for number in range(5)]
    incarnation = (await store.get("r")).incarnation
    await store.extend("r", incarnation, Reservation("s0", 60_000))

    async def have_all_expired():
        return all([await reserve(store, f"t{number}", lease_ms=60_000) for number in range(4)])

    await until(have_all_expired)
    assert reserved == [True] * 5
    assert not await reserve(store, "u")


async def test_a_rollout_without_a_limit_has_no_reservations(store):
    """The same is true for an `open` without a reservation."""
    unlimited = await store.open("unlimited", {}, now_ms=1, reservation=Reservation("s", 60_000))
    unreserved = await store.open("r", {"places": b"0"}, now_ms=1)

    assert (unlimited.has_reservation, unreserved.has_reservation) == (None, None)


async def test_a_reservation_of_another_incarnation_is_not_extended(store):
    """A rollout that was deleted and opened again has no reservations."""
    await reserve(store, "s0")
    incarnation = (await store.get("r")).incarnation
    await store.delete("r")
    await store.extend("r", incarnation, Reservation("s0", 60_000))
    not_created = await store.get("r")
    reserved = [await reserve(store, f"t{number}") for number in range(5)]
    await store.extend("r", incarnation, Reservation("t0", 0))

    assert None is not_created
    assert reserved == [True] * 5
    assert not await reserve(store, "u")


async def test_a_record_is_late_if_a_field_is_set_when_it_is_stored(store):
    """The same transaction marks and counts it; a repeated append does not change that."""
    entry = replace(await opened_entry(store, counts={"steps": 1}), late_if="closed")
    early = await store.append(entry, now_ms=2)
    await store.update_if("r", {"closed": b"1"}, expect={}, now_ms=3)
    again = await store.append(entry, now_ms=4)
    late = [await store.append(replace(entry, name="s2"), now_ms=5) for _ in range(2)]
    other = await store.append(replace(entry, name="s3", late_if="elsewhere"), now_ms=6)
    plain = await store.append(replace(entry, name="s4", late_if=None), now_ms=6)

    assert [(appended.position, appended.is_late) for appended in (early, again, *late, other, plain)] == [
        (0, False),
        (0, False),
        (1, True),
        (1, True),
        (2, False),
        (3, False),
    ]
    assert await store.marks("r") == {"late:s2": b"1"}
    assert (await store.get("r")).counts == {"steps": 4, "late": 1}


async def test_each_append_concurrent_with_closing_is_earlier_or_late(store):
    """A reader who sees the field sees every record that is not late."""
    entry = replace(await opened_entry(store), late_if="closed")

    async def unmarked() -> set[bytes]:
        """Read the records first, so that the marks of all of them are stored."""
        records = set(await store.read("r", 0, 1000))
        return records - {mark.removeprefix("late:").encode() for mark in await store.marks("r")}

    async def closed() -> set[bytes]:
        await store.update_if("r", {"closed": b"1"}, expect={}, now_ms=3)
        return await unmarked()

    names = [f"s{number}" for number in range(60)]
    appended = [store.append(replace(entry, name=name, record=name.encode()), now_ms=2) for name in names]
    seen, *_ = await asyncio.gather(closed(), *appended)

    assert await unmarked() == seen


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def mortal(request, url_of, opened):
    """Return an empty store that expires rollouts."""
    return await opened(url_of(request.param), ttl_s=1000)


async def expire(store, name="r"):
    """Delete the keys of a rollout, as expiry does."""
    keys = store.layout.rollout(name)
    for key in keys.all[:5]:
        await store._servers.execute(key, [("DEL", key)])


async def ttl_of(store, key):
    (reply,) = await store._servers.execute(key, [("PTTL", key)])
    return reply


async def test_a_renewal_touches_the_rollout_if_it_has_a_time(mortal):
    """It changes nothing else, and nothing of another incarnation."""
    made = replace(await mortal.open("r", {"a": b"1"}, now_ms=5), created=False)
    await mortal.renew("r", made.incarnation)
    before = await mortal.get("r")
    found = [await mortal.renew("r", made.incarnation, now_ms=9), await mortal.renew("r", "other", now_ms=10)]

    assert found == [True, False]
    assert made == before
    assert replace(made, touched_ms=9) == await mortal.get("r")


async def test_an_append_restores_an_expired_rollout(mortal):
    """With its incarnation, creation time, fields and the record; it is listed and has a new lifetime."""
    await mortal.open("older", {}, now_ms=1)
    made = await mortal.open("r", {"a": b"1", "b": b"\xff"}, now_ms=5)
    await mortal.open("newer", {}, now_ms=9)
    entry = StepWrite("r", made.incarnation, "s1", b"record", {b"b": b"1"}, (), {"steps": 1})
    await expire(mortal)

    with pytest.raises(RolloutExpired, match="'r' has expired"):
        await mortal.append(entry, now_ms=10)
    assert await mortal.get("r") is None
    restored = await mortal.append(replace(entry, origin=Origin(made.created_ms, made.fields)), now_ms=11)
    following = await mortal.append(replace(entry, name="s2", blocks={}, required_blocks=(b"b",)), now_ms=12)
    await mortal.mark("r", made.incarnation, {"m": b"1"}, now_ms=13)

    assert (restored, following) == ((0, False, True, True), (1, False, False, True))
    assert replace(made, created=False, touched_ms=13, counts={"steps": 2}) == await mortal.get("r")
    assert (await mortal.list()).names == ("newer", "r", "older")
    assert await mortal.read("r", 0, 9) == [b"record"] * 2
    for key in mortal.layout.rollout("r").all:
        assert await ttl_of(mortal, key) > 900_000


async def test_a_restoring_append_with_missing_blocks_restores_nothing(mortal, key_count):
    """The blocks expired with the rollout: the caller must send them again."""
    incarnation = (await mortal.open("r", {}, now_ms=1)).incarnation
    await expire(mortal)
    before = await key_count(mortal)

    with pytest.raises(MissingBlocks):
        await mortal.append(StepWrite("r", incarnation, "s1", b"1", {}, (b"b",), {}, None, Origin(1)), now_ms=2)
    assert (await mortal.get("r"), await key_count(mortal)) == (None, before)


async def test_concurrent_restoring_appends_are_all_stored(mortal):
    """They restore one incarnation, the expired one."""
    incarnation = (await mortal.open("r", {}, now_ms=1)).incarnation
    await expire(mortal)
    entries = [
        StepWrite("r", incarnation, f"s{number}", b"1", {}, (), {"steps": 1}, None, Origin(1)) for number in range(30)
    ]

    appended = await asyncio.gather(*(mortal.append(entry, now_ms=2) for entry in entries))

    assert (1, [*range(30)]) == (
        sum(result.is_restored for result in appended),
        sorted(result.position for result in appended),
    )
    assert ((await mortal.get("r")).incarnation, (await mortal.get("r")).counts) == (incarnation, {"steps": 30})


async def test_a_record_of_an_expired_incarnation_is_added_to_the_new_one(mortal):
    """Marks are, too. The new incarnation keeps its fields."""
    old = await mortal.open("r", {"a": b"1"}, now_ms=1)
    await expire(mortal)
    new = await mortal.open("r", {"b": b"1"}, now_ms=2)
    entry = StepWrite("r", old.incarnation, "s1", b"1", {}, (), {"steps": 1}, "b")

    with pytest.raises(RolloutExpired):
        await mortal.append(entry, now_ms=3)
    appended = await mortal.append(replace(entry, origin=Origin(1, old.fields)), now_ms=3)
    await mortal.mark("r", old.incarnation, {"m": b"1"}, now_ms=4)

    assert appended == (0, True, True, True)
    assert (new.incarnation, {"b": b"1"}) == ((await mortal.get("r")).incarnation, (await mortal.get("r")).fields)
    assert await mortal.marks("r") == {"late:s1": b"1", "m": b"1"}


async def test_a_deleted_rollout_is_not_restored(mortal):
    """Nothing of a deleted incarnation is restored or added to a later one."""
    old = await mortal.open("r", {}, now_ms=1)
    await mortal.delete("r")
    entry = StepWrite("r", old.incarnation, "s1", b"1", {}, (), {}, None, Origin(1))

    for opened in (False, True, True):
        if opened:
            new = await mortal.open("r", {}, now_ms=2)
        with pytest.raises(RolloutDeleted):
            await mortal.append(entry, now_ms=3)
        with pytest.raises(RolloutDeleted):
            await mortal.mark("r", old.incarnation, {"m": b"1"}, now_ms=3)
    await expire(mortal)  # the new incarnation, which was not deleted
    with pytest.raises(RolloutDeleted):
        await mortal.append(entry, now_ms=4)
    assert await mortal.get("r") is None
    assert (await mortal.append(replace(entry, incarnation=new.incarnation), now_ms=5)).is_restored


async def test_deleted_incarnations_expire(mortal, command):
    """After one day or the TTL, whichever is longer, or with a later deletion."""
    (key,) = [mortal.layout.rollout("r").listing.replace(b"listing", b"deleted")]
    for _ in range(3):
        await mortal.open("r", {}, now_ms=1)
        await mortal.delete("r")
    (incarnations,) = await mortal._servers.execute(key, [("ZRANGE", key, 0, -1)])
    lifetime_ms = await ttl_of(mortal, key)
    await mortal._servers.execute(key, [("ZADD", key, 1, incarnations[0])])
    last = await mortal.open("r", {}, now_ms=1)
    await mortal.delete("r")
    (left,) = await mortal._servers.execute(key, [("ZRANGE", key, 0, -1)])

    assert len(incarnations) == 3
    assert 86_000_000 < lifetime_ms <= 86_400_000
    assert {*incarnations[1:], last.incarnation.encode()} == {*left}


async def test_renew_restarts_the_lifetime_only(mortal):
    """Of the given incarnation, or of any; a rollout that does not exist is not created."""
    made = await mortal.open("r", {"a": b"1"}, now_ms=1)
    await mortal.append(StepWrite("r", made.incarnation, "s1", b"1", {b"b": b"1"}), now_ms=1)
    await mortal.mark("r", made.incarnation, {"m": b"1"}, now_ms=1)
    before, keys = await mortal.get("r"), mortal.layout.rollout("r").all
    for incarnation, exists in ((made.incarnation, True), (None, True), ("another", False)):
        for key in keys:
            await mortal._servers.execute(key, [("PEXPIRE", key, 5_000)])
        assert exists == await mortal.renew("r", incarnation)
        assert [await ttl_of(mortal, key) > 900_000 for key in keys] == [exists] * 7
    assert before == await mortal.get("r")
    assert not await mortal.renew("unknown", None)
    assert await mortal.get("unknown") is None


async def test_without_a_ttl_another_incarnation_was_deleted(store, key_count):
    """Rollouts cannot expire, so deleted incarnations are not recorded and nothing is restored."""
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    await store.delete("r")

    assert await key_count(store) == 0
    with pytest.raises(RolloutDeleted):
        await store.append(StepWrite("r", incarnation, "s1", b"1", {}, (), {}, None, Origin(1)), now_ms=2)
    assert store.ttl_s is None
