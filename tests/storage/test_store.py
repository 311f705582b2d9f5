"""What `Store` promises, on every kind of server it runs on."""

import asyncio
from dataclasses import replace

import pytest

from storage.errors import FieldsChanged, MissingBlocks, RolloutDeleted, RolloutExpired
from storage.redis.keys import rollout_keys
from storage.types import Announcement, Origin, Reservation, StepWrite

HOSTILE = (
    "a", "A", "a:b", "a:records:b", "{a}", "{a}{b}", "}{", "a\nb", "a\r\n$3\r\n", "../a", "a/b", "%41", "%", "*", "?", "[a-z]",
    "🙂", "é", "e\u0301", " ", " a", "\x00", "f:status", "listing", "birth", "\ud800", "x" * 256, "🙂" * 256,
)  # fmt: skip


@pytest.fixture(params=["embedded", "redis", "cluster"])
async def store(request, url_of, opened):
    """An empty store."""
    return await opened(url_of(request.param))


async def opened_entry(store, rollout="r", **more):
    """A rollout, opened, and an entry to append to it."""
    incarnation = (await store.open(rollout, {}, now_ms=1)).incarnation
    return StepWrite(rollout, incarnation, "s1", b"record", **more)


async def test_the_first_open_makes_a_rollout_and_later_ones_find_it(store):
    """`open` makes the rollout with the fields given if there is none, and changes no field of one that is there."""
    made = await store.open("r", {"status": b"open", "empty": b""}, now_ms=1_000)
    found = await store.open("r", {"status": b"other"}, now_ms=2_000)

    assert made.created
    assert (made.created_ms, made.touched_ms) == (1_000, 1_000)
    assert {"status": b"open", "empty": b""} == made.fields == found.fields
    assert replace(made, created=False, touched_ms=2_000) == found


async def test_many_opens_of_one_name_at_once_make_one_birth(store):
    """However many open a name at once, one of them makes it and all get the same life."""
    rollouts = await asyncio.gather(*(store.open("r", {"who": b"%d" % i}, now_ms=i) for i in range(50)))

    assert 1 == len({rollout.incarnation for rollout in rollouts})
    assert 1 == sum(rollout.created for rollout in rollouts)
    assert 1 == len({rollout.fields["who"] for rollout in rollouts})
    assert ("r",) == (await store.list()).names


async def test_look_makes_nothing(store, key_count):
    """`look` gives None for a rollout that is not there, and makes nothing."""
    assert None is await store.get("r")
    assert 0 == await key_count(store)

    made = await store.open("r", {"a": b"1"}, now_ms=1)

    assert replace(made, created=False) == await store.get("r")


async def test_amend_sets_and_removes_fields_if_all_expectations_hold(store):
    """`amend` sets and removes fields, touches nothing else, and gives the rollout as it is then."""
    await store.open("r", {"a": b"1", "b": b"2", "c": b"3"}, now_ms=1)

    amended = await store.update_if("r", {"a": b"", "b": None, "d": b"="}, expect={"a": b"1", "d": None}, now_ms=2)

    assert {"a": b"", "c": b"3", "d": b"="} == amended.fields
    assert 2 == amended.touched_ms
    assert amended == await store.get("r")


@pytest.mark.parametrize("expect", [{"a": b"2"}, {"a": None}, {"b": b""}, {"a": b"1", "b": b"1"}])
async def test_amend_writes_nothing_if_an_expectation_fails(store, expect):
    """A field that is not as expected raises `FieldsChanged`, which says how the rollout stands, and changes nothing."""
    before = replace(await store.open("r", {"a": b"1"}, now_ms=1), created=False)

    with pytest.raises(FieldsChanged) as caught:
        await store.update_if("r", {"a": b"9", "z": b"9"}, expect=expect, now_ms=2)

    assert before == caught.value.rollout
    assert before == await store.get("r")


async def test_amend_makes_no_rollout(store, key_count):
    """`amend` gives None when there is no such rollout, whatever was expected."""
    assert None is await store.update_if("r", {"a": b"1"}, expect={}, now_ms=1)
    assert None is await store.update_if("r", {"a": b"1"}, expect={"a": b"2"}, now_ms=1)
    assert 0 == await key_count(store)


async def test_of_many_amends_that_expect_the_same_one_wins(store):
    """Compare and set: of those that expect the same value, one sets it."""
    await store.open("r", {"holder": b""}, now_ms=1)

    answers = await asyncio.gather(
        *(store.update_if("r", {"holder": b"%d" % i}, expect={"holder": b""}, now_ms=2) for i in range(20)),
        return_exceptions=True,
    )

    assert 19 == sum(isinstance(answer, FieldsChanged) for answer in answers)


async def test_append_keeps_records_in_order_with_their_blocks_and_counts(store):
    """Records, blocks and counts of an append are all there when it returns its index."""
    entry = await opened_entry(store, blocks={b"\x00b1": b"\r\n", b"b2": b""}, counts={"steps": 1, "tokens": 7})
    second = replace(entry, name="s2", record=b"", blocks={}, required_blocks=(b"\x00b1", b"b2"), counts={"steps": 1})

    indices = [(await store.append(one, now_ms=5 + place)).position for place, one in enumerate((entry, second))]

    assert [0, 1] == indices
    assert [b"record", b""] == await store.read("r", 0, 10)
    assert {b"\x00b1": b"\r\n", b"b2": b""} == await store.blocks("r")
    rollout = await store.get("r")
    assert {"steps": 2, "tokens": 7} == rollout.counts
    assert (1, 6) == (rollout.created_ms, rollout.touched_ms)


async def test_append_of_a_name_that_is_there_changes_nothing(store):
    """Appending a name again gives its first index and changes no record, block or count."""
    entry = await opened_entry(store, blocks={b"b": b"1"}, counts={"steps": 1})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2"), now_ms=3)

    again = replace(entry, record=b"other", blocks={b"c": b"2"}, required_blocks=(b"nowhere",))

    assert (0, False, False) == await store.append(again, now_ms=4)
    assert [b"record", b"record"] == await store.read("r", 0, 10)
    assert {b"b": b"1"} == await store.blocks("r")
    assert {"steps": 2} == (await store.get("r")).counts


async def test_append_with_missing_blocks_writes_nothing(store):
    """An entry that leans on blocks that are not there raises `MissingBlocks` with their names, and writes nothing."""
    entry = await opened_entry(store, blocks={b"new": b"1"}, counts={"steps": 1})
    await store.append(replace(entry, name="s0", blocks={b"old": b"0"}, counts={}), now_ms=2)
    before = await store.get("r")

    with pytest.raises(MissingBlocks) as caught:
        await store.append(replace(entry, required_blocks=(b"lost", b"old", b"new")), now_ms=3)

    assert (b"lost", b"new") == caught.value.names
    assert before == await store.get("r")
    assert {b"old": b"0"} == await store.blocks("r")
    assert [b"record"] == await store.read("r", 0, 10)
    assert None is await store.find("r", "s1")


async def test_a_block_is_written_once(store):
    """A block that is there already stays as it is: its name tells its bytes."""
    entry = await opened_entry(store, blocks={b"b": b"1"})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", blocks={b"b": b"other"}), now_ms=3)

    assert {b"b": b"1"} == await store.blocks("r")


async def test_append_to_another_life_is_refused(store, key_count):
    """After a rollout was deleted, or deleted and opened anew, appends and marks of its old life raise `RolloutDeleted`."""
    entry = await opened_entry(store, counts={"steps": 1})
    await store.delete("r")

    with pytest.raises(RolloutDeleted, match="'r' was deleted"):
        await store.append(entry, now_ms=2)
    with pytest.raises(RolloutDeleted):
        await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=2)
    assert 0 == await key_count(store)

    anew = replace(await store.open("r", {}, now_ms=3), created=False)

    assert anew.incarnation != entry.incarnation
    with pytest.raises(RolloutDeleted):
        await store.append(entry, now_ms=4)
    with pytest.raises(RolloutDeleted):
        await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=4)
    assert anew == await store.get("r")


async def test_appends_at_once_are_all_kept(store):
    """Of appends at the same time none is lost and none stored twice; each gets an index of its own."""
    entry = await opened_entry(store, counts={"steps": 1})
    entries = [replace(entry, name=f"s{i % 100}", record=b"%d" % (i % 100)) for i in range(200)]

    indices = [one.position for one in await asyncio.gather(*(store.append(one, now_ms=2) for one in entries))]

    assert indices[:100] == indices[100:]
    assert list(range(100)) == sorted(indices[:100])
    records = await store.read("r", 0, 1000)
    assert [b"%d" % i for i in range(100)] == [records[index] for index in indices[:100]]
    assert {"steps": 100} == (await store.get("r")).counts


async def test_a_large_entry_is_kept_whole(store):
    """Records of megabytes and thousands of blocks in one entry are kept as they are."""
    blocks = {b"b%d" % i: b"%d" % i for i in range(10_000)}
    entry = await opened_entry(store, blocks=blocks)
    entry = replace(entry, record=bytes(range(256)) * 16_384)

    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", blocks={}, required_blocks=tuple(blocks)), now_ms=3)

    assert [entry.record] * 2 == await store.read("r", 0, 2)
    assert blocks == await store.blocks("r")


async def test_marks_are_set_and_read(store):
    """Marks are kept beside the records; the last value of a mark holds."""
    entry = await opened_entry(store)
    await store.mark("r", entry.incarnation, {"reward:s1": b"1", "é": b"\xff"}, now_ms=2)
    await store.mark("r", entry.incarnation, {"reward:s1": b"2"}, now_ms=3)

    assert {"reward:s1": b"2", "é": b"\xff"} == await store.marks("r")
    assert {"é": b"\xff"} == await store.marks("r", ["é", "none"])
    assert {} == await store.marks("r", [])
    assert {} == await store.marks("other") == await store.marks("other", ["é"])
    assert 3 == (await store.get("r")).touched_ms


async def test_read_gives_a_stretch_of_records(store):
    """`read` gives up to `limit` records from `start` on; none beyond the end, before the start, or for no limit."""
    entry = await opened_entry(store)
    for i in range(5):
        await store.append(replace(entry, name=f"s{i}", record=b"%d" % i), now_ms=2)

    assert [b"1", b"2"] == await store.read("r", 1, 2)
    assert [b"4"] == await store.read("r", 4, 9)
    assert [] == await store.read("r", 5, 9)
    assert [] == await store.read("r", -1, 9)
    assert [] == await store.read("r", 0, 0)
    assert [] == await store.read("other", 0, 9)


async def test_find_gives_a_record_by_name(store):
    """`find` gives index and record of a name, or None."""
    entry = await opened_entry(store)
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", record=b"2"), now_ms=2)

    assert (1, b"2") == await store.find("r", "s2")
    assert None is await store.find("r", "s3")
    assert None is await store.find("other", "s2")


async def test_a_whole_rollout_is_one_answer(store):
    """`whole` gives records, blocks, marks and the rollout as the verbs for each do; None for one that is not there."""
    assert None is await store.read_all("r", 10)
    entry = await opened_entry(store, blocks={b"b": b"1"}, counts={"steps": 1})
    await store.append(entry, now_ms=2)
    await store.append(replace(entry, name="s2", record=b"second"), now_ms=3)
    await store.mark("r", entry.incarnation, {"m": b"1"}, now_ms=4)

    told = await store.read_all("r", 10)

    assert (await store.read("r", 0, 10), await store.blocks("r"), await store.marks("r")) == (
        told.records,
        told.blocks,
        told.marks,
    )
    assert await store.get("r") == told.rollout
    assert [b"record"] == (await store.read_all("r", 1)).records


async def test_blocks_are_found_by_name(store):
    """`blocks` gives those of the names asked for that exist; of no names, none."""
    entry = await opened_entry(store, blocks={b"a": b"1", b"b": b"2", b"c": b"3"})
    await store.append(entry, now_ms=2)

    assert {b"a": b"1", b"c": b"3"} == await store.blocks("r", [b"c", b"x", b"a"])
    assert {} == await store.blocks("r", [])
    assert {} == await store.blocks("other")


async def test_list_is_newest_first_and_pages_without_gap_or_repeat(store):
    """Paging gives every rollout once, newest first, of one millisecond too, whatever is opened or deleted meanwhile."""
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
    """The cursor is None on the last page, also when that is full, and on an empty one."""
    assert ((), None) == ((page := await store.list()).names, page.cursor)
    for i in range(4):
        await store.open(f"r{i}", {}, now_ms=i)

    first = await store.list(limit=2)
    second = await store.list(limit=2, cursor=first.cursor)

    assert ("r3", "r2") == first.names
    assert ("r1", "r0") == second.names
    assert None is second.cursor


async def test_list_since_a_time(store):
    """`since_ms` leaves out what was created before it."""
    for i in range(4):
        await store.open(f"r{i}", {}, now_ms=10 * i)

    assert ("r3", "r2") == (await store.list(since_ms=20)).names
    assert ("r3",) == (await store.list(since_ms=21)).names
    assert 4 == len((await store.list(since_ms=-5)).names)


@pytest.mark.parametrize(
    "cursor", ["", "x", "5", "000000000000001", "-", "(", "00000000000000\u0661r", "000000000000001é"]
)
async def test_a_cursor_that_is_none_is_refused(on_redis, cursor):
    """A cursor that no page gave raises ValueError, in a sentence that shows it."""
    with pytest.raises(ValueError, match="is not a cursor of this listing"):
        await on_redis.list(cursor=cursor)


async def test_names_gives_all_rollouts(store):
    """`names` gives every rollout, newest first."""
    for i in range(5):
        await store.open(f"r{i}", {}, now_ms=i)

    assert ["r4", "r3", "r2", "r1", "r0"] == [name async for name in store.names()]


async def test_hostile_names_do_not_touch_each_other(store, key_count):
    """Whatever a rollout is called, its records, fields, listing and deletion are its own."""
    for i, name in enumerate(HOSTILE):
        entry = await opened_entry(store, name, blocks={b"b": b"%d" % i}, counts={"steps": 1})
        await store.append(replace(entry, record=b"%d" % i), now_ms=2)

    assert sorted(HOSTILE) == sorted((await store.list()).names)
    for i, name in enumerate(HOSTILE):
        assert [b"%d" % i] == await store.read(name, 0, 9)
        assert {b"b": b"%d" % i} == await store.blocks(name)
        assert {"steps": 1} == (await store.get(name)).counts
        assert await store.delete(name)
        assert len(HOSTILE) - 1 - i == len((await store.list()).names)
    assert 0 == await key_count(store)


async def test_drop_leaves_no_key(store, key_count):
    """`drop` deletes everything of a rollout and says whether there was anything; nothing of it is left."""
    for name in ("r", "q"):
        entry = await opened_entry(store, name, blocks={b"b": b"1"}, counts={"steps": 1})
        await store.append(entry, now_ms=2)
        await store.mark(name, entry.incarnation, {"m": b"1"}, now_ms=3)

    assert [True, False, False] == [await store.delete(name) for name in ("r", "r", "never")]
    assert None is await store.get("r")
    assert ("q",) == (await store.list()).names
    assert [b"record"] == await store.read("q", 0, 9)
    assert {"m": b"1"} == await store.marks("q")
    assert await store.delete("q")
    assert 0 == await key_count(store)


async def test_constants_are_set_once(store):
    """The first value of a constant holds, for everybody."""
    values = await asyncio.gather(*(store.set_once("salt", b"%d" % i) for i in range(10)))

    assert 1 == len(set(values))
    assert values[0] == await store.set_once("salt", b"later")
    assert b"x" == await store.set_once("other", b"x")


async def test_facts_and_ping_reach_the_store(store):
    """`ping` returns, and `facts` names servers, versions and durability in words."""
    await store.ping()
    facts = await store.info()

    assert "acknowledged" == facts["durability"]
    assert facts["version"].split()[0] in ("valkey", "redis")
    assert facts["servers"]
    assert all(isinstance(fact, str) for fact in facts.values())


def names_beside(store, group: str, count: int) -> list[str]:
    found = (f"r{n}" for n in range(10_000))
    return [name for name in found if store.same_slot(group, name)][:count]


async def test_a_group_and_its_rollouts_are_made_at_once(store):
    """With the fields of each, listed like any other; the group lies in a space of its own."""
    names = names_beside(store, "g", 5)
    made = await store.open_group("g", {"size": b"5"}, {name: {"of": b"g", "n": b""} for name in names}, now_ms=7)

    assert (True, {"size": b"5"}, 7) == (made.created, made.fields, made.created_ms)
    assert [{"of": b"g", "n": b""}] * 5 == [(await store.get(name)).fields for name in names]
    assert sorted(names) == sorted((await store.list()).names)
    assert ("g",) == (await store.groups.list()).names
    assert await store.get("g") is None
    assert replace(made, created=False) == await store.groups.get("g")


async def test_a_group_that_is_there_stays_as_it_is(store):
    """Nothing is made the second time, and the answer says so."""
    first, other = names_beside(store, "g", 2)
    made = await store.open_group("g", {"size": b"1"}, {first: {}}, now_ms=1)
    again = await store.open_group("g", {"size": b"2"}, {other: {}}, now_ms=2)

    assert replace(made, created=False) == again
    assert await store.get(other) is None


async def test_a_rollout_that_is_not_beside_its_group_is_refused(store, key_count):
    """In a cluster the two could not be made at once."""
    (name,) = [name for name in (f"r{n}" for n in range(100)) if not store.same_slot("g", name)][:1]

    with pytest.raises(ValueError, match="beside"):
        await store.open_group("g", {}, {name: {}}, now_ms=1)
    assert 0 == await key_count(store)


async def test_a_group_is_amended_marked_and_dropped_like_a_rollout(store):
    """It has all the verbs; what is done to it leaves a rollout of the same name alone."""
    await store.open("g", {"a": b"rollout"}, now_ms=1)
    made = await store.open_group("g", {}, {}, now_ms=1)
    await store.groups.mark("g", made.incarnation, {"m": b"1"}, now_ms=2)
    await store.groups.update_if("g", {"status": b"complete"}, expect={"status": None}, now_ms=3)

    assert {"m": b"1"} == await store.groups.marks("g")
    assert {"status": b"complete"} == (await store.groups.get("g")).fields
    assert await store.groups.delete("g")
    assert {"a": b"rollout"} == (await store.get("g")).fields


async def test_notices_are_told_by_every_open(store):
    """The last that was announced, whichever rollout is opened; other stores' rollouts are not told."""
    assert {} == (await store.open("r", {}, now_ms=1)).announcements
    await store.announcements.announce("policy", b"1")
    await store.announcements.announce("policy", b"2")
    await store.announcements.announce("other", b"")

    told = [(await store.open(f"r{n}", {}, now_ms=1)).announcements for n in range(40)]

    assert [{"policy": Announcement(b"2", 2), "other": Announcement(b"", 1)}] * 40 == told
    assert told[0] == await store.announcements.read()
    assert {} == (await store.groups.open("g", {}, now_ms=1)).announcements


async def test_a_beat_is_heard_until_its_life_is_over(store):
    """By everybody who beats, with all notices; a life of 0 ends at once."""
    notice = await store.announcements.announce("policy", b"1")
    await store.announcements.heartbeat("a", b"1", lifetime_ms=60_000)
    told, beats = await store.announcements.heartbeat("b", b"2", lifetime_ms=60_000)
    assert ({"policy": notice}, {"a": b"1", "b": b"2"}) == (told, beats)
    assert {"b": b"2"} == (await store.announcements.heartbeat("a", b"", lifetime_ms=0))[1]

    await store.announcements.heartbeat("b", b"2", lifetime_ms=1)
    await asyncio.sleep(0.01)
    assert {"c": b""} == (await store.announcements.heartbeat("c", b"", lifetime_ms=60_000))[1]


async def test_after_many_announce_at_once_all_are_told_the_same(store):
    """However their announcing interleaves."""
    await asyncio.gather(*(store.announcements.announce("policy", b"%d" % n) for n in range(30)))

    told = {(await store.open(f"r{n}", {}, now_ms=1)).announcements["policy"] for n in range(60)}

    assert 1 == len(told)


async def test_batches_are_a_space_of_their_own(store):
    """Kept like groups, apart from them, and never for longer than a week."""
    made = await store.batches.open("b", {"a": b"1"}, now_ms=1)

    assert replace(made, created=False) == await store.batches.get("b")
    assert await store.groups.get("b") is None
    assert await store.get("b") is None
    assert str(7 * 86_400) == (await store.batches.info())["ttl_s"]


async def with_place(store, name, rollout="r", lease_ms=60_000):
    """A rollout of five places, opened with one of them; whether it was given."""
    return (
        await store.open(rollout, {"places": b"5"}, now_ms=1, reservation=Reservation(name, lease_ms))
    ).has_reservation


async def test_as_many_places_are_given_as_the_rollout_has(store):
    """However many ask at once; who asks again has its own still."""
    given = await asyncio.gather(*(with_place(store, f"s{number}") for number in range(50)))
    again = await asyncio.gather(*(with_place(store, f"s{number}") for number in range(50)))

    assert 5 == sum(given)
    assert given == again


async def test_a_place_goes_to_the_record_of_its_name_and_comes_free_when_it_is_let_go(store):
    """Records and places together are never more than the rollout takes."""
    given = [await with_place(store, f"s{number}") for number in range(1, 7)]
    entry = await opened_entry(store)
    for _ in range(2):  # the second one's answer was lost
        await store.append(entry, now_ms=2)
    full = await with_place(store, "s7")
    await store.reservations.extend("r", entry.incarnation, Reservation("s2", 0))
    free = [await with_place(store, "s8"), await with_place(store, "s9")]

    assert [True] * 5 + [False] == given
    assert [False, True, False] == [full, *free]


async def test_a_place_whose_lease_is_over_is_free_unless_it_is_held_again(store, until):
    """What a process held that died comes free by itself."""
    given = [await with_place(store, f"s{number}", lease_ms=20) for number in range(5)]
    incarnation = (await store.get("r")).incarnation
    await store.reservations.extend("r", incarnation, Reservation("s0", 60_000))

    async def all_are_over():
        return all([await with_place(store, f"t{number}", lease_ms=60_000) for number in range(4)])

    await until(all_are_over)
    assert [True] * 5 == given
    assert not await with_place(store, "u")


async def test_of_a_rollout_without_places_none_is_given_or_refused(store):
    """Nor of one that is opened for no record."""
    free = await store.open("free", {}, now_ms=1, reservation=Reservation("s", 60_000))
    looked = await store.open("r", {"places": b"0"}, now_ms=1)

    assert (None, None) == (free.has_reservation, looked.has_reservation)


async def test_a_place_of_another_life_is_not_held(store):
    """The rollout was deleted and opened anew: its places are all free."""
    await with_place(store, "s0")
    incarnation = (await store.get("r")).incarnation
    await store.delete("r")
    await store.reservations.extend("r", incarnation, Reservation("s0", 60_000))
    made_nothing = await store.get("r")
    given = [await with_place(store, f"t{number}") for number in range(5)]
    await store.reservations.extend("r", incarnation, Reservation("t0", 0))

    assert None is made_nothing
    assert [True] * 5 == given
    assert not await with_place(store, "u")


async def test_a_record_is_late_if_a_field_is_there_when_it_is_stored(store):
    """It has a mark and is counted, by the same write; asked again it stays what it is, whatever was set meanwhile."""
    entry = replace(await opened_entry(store, counts={"steps": 1}), late_if="closed")
    early = await store.append(entry, now_ms=2)
    await store.update_if("r", {"closed": b"1"}, expect={}, now_ms=3)
    again = await store.append(entry, now_ms=4)
    late = [await store.append(replace(entry, name="s2"), now_ms=5) for _ in range(2)]
    other = await store.append(replace(entry, name="s3", late_if="elsewhere"), now_ms=6)
    plain = await store.append(replace(entry, name="s4", late_if=None), now_ms=6)

    assert [(0, False), (0, False), (1, True), (1, True), (2, False), (3, False)] == [
        (one.position, one.is_late) for one in (early, again, *late, other, plain)
    ]
    assert {"late:s2": b"1"} == await store.marks("r")
    assert {"steps": 4, "late": 1} == (await store.get("r")).counts


async def test_of_appends_and_a_closing_at_once_each_is_before_it_or_late(store):
    """Who reads the rollout after it was closed sees every record that will ever be in it unmarked."""
    entry = replace(await opened_entry(store), late_if="closed")

    async def unmarked() -> set[bytes]:
        """Records first: the mark of each one that was read is there by then."""
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
    """An empty store whose rollouts expire."""
    return await opened(url_of(request.param), ttl_s=1000)


async def expire(store, name="r"):
    """What happens to a rollout when its time has come."""
    keys = rollout_keys(store._prefix, name)
    for key in keys.all()[:5]:
        await store._servers.ask(key, [("DEL", key)])


async def ttl_of(store, key):
    (reply,) = await store._servers.ask(key, [("PTTL", key)])
    return reply


async def test_an_append_restores_a_rollout_that_expired(mortal):
    """With its incarnation, its age, its fields and the record; it is listed, lives on, and takes the next append."""
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

    assert ((0, False, True), (1, False, False)) == (restored, following)
    assert replace(made, created=False, touched_ms=13, counts={"steps": 2}) == await mortal.get("r")
    assert ("newer", "r", "older") == (await mortal.list()).names
    assert [b"record"] * 2 == await mortal.read("r", 0, 9)
    for key in rollout_keys(mortal._prefix, "r").all():
        assert 900_000 < await ttl_of(mortal, key)


async def test_a_restoring_append_that_misses_blocks_restores_nothing(mortal, key_count):
    """They expired with the rollout: send them along."""
    incarnation = (await mortal.open("r", {}, now_ms=1)).incarnation
    await expire(mortal)
    before = await key_count(mortal)

    with pytest.raises(MissingBlocks):
        await mortal.append(StepWrite("r", incarnation, "s1", b"1", {}, (b"b",), {}, None, Origin(1)), now_ms=2)
    assert (None, before) == (await mortal.get("r"), await key_count(mortal))


async def test_of_many_restoring_appends_at_once_all_are_kept(mortal):
    """In one life, the one that expired."""
    incarnation = (await mortal.open("r", {}, now_ms=1)).incarnation
    await expire(mortal)
    entries = [
        StepWrite("r", incarnation, f"s{number}", b"1", {}, (), {"steps": 1}, None, Origin(1)) for number in range(30)
    ]

    appended = await asyncio.gather(*(mortal.append(entry, now_ms=2) for entry in entries))

    assert (1, [*range(30)]) == (sum(one.is_restored for one in appended), sorted(one.position for one in appended))
    assert (incarnation, {"steps": 30}) == ((await mortal.get("r")).incarnation, (await mortal.get("r")).counts)


async def test_a_record_of_a_rollout_that_expired_and_was_opened_again_goes_to_the_new_life(mortal):
    """The same rollout to all who name it; so do its marks. The new life keeps its incarnation and its fields."""
    old = await mortal.open("r", {"a": b"1"}, now_ms=1)
    await expire(mortal)
    new = await mortal.open("r", {"b": b"1"}, now_ms=2)
    entry = StepWrite("r", old.incarnation, "s1", b"1", {}, (), {"steps": 1}, "b")

    with pytest.raises(RolloutExpired):
        await mortal.append(entry, now_ms=3)
    appended = await mortal.append(replace(entry, origin=Origin(1, old.fields)), now_ms=3)
    await mortal.mark("r", old.incarnation, {"m": b"1"}, now_ms=4)

    assert (0, True, True) == appended
    assert (new.incarnation, {"b": b"1"}) == ((await mortal.get("r")).incarnation, (await mortal.get("r")).fields)
    assert {"late:s1": b"1", "m": b"1"} == await mortal.marks("r")


async def test_a_rollout_that_was_deleted_stays_deleted(mortal):
    """Whatever comes of the life that was: nothing is restored, and nothing enters a later life of the name."""
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
    await expire(mortal)  # the new life, which nobody deleted
    with pytest.raises(RolloutDeleted):
        await mortal.append(entry, now_ms=4)
    assert await mortal.get("r") is None
    assert (await mortal.append(replace(entry, incarnation=new.incarnation), now_ms=5)).is_restored


async def test_what_is_kept_of_deleted_rollouts_is_forgotten(mortal, command):
    """After a day, or the ttl where that is longer: by itself, and by later deletions."""
    (key,) = [rollout_keys(mortal._prefix, "r").listing.replace(b"listing", b"deleted")]
    for _ in range(3):
        await mortal.open("r", {}, now_ms=1)
        await mortal.delete("r")
    (incarnations,) = await mortal._servers.ask(key, [("ZRANGE", key, 0, -1)])
    lifetime_ms = await ttl_of(mortal, key)
    await mortal._servers.ask(key, [("ZADD", key, 1, incarnations[0])])
    last = await mortal.open("r", {}, now_ms=1)
    await mortal.delete("r")
    (left,) = await mortal._servers.ask(key, [("ZRANGE", key, 0, -1)])

    assert 3 == len(incarnations)
    assert 86_000_000 < lifetime_ms <= 86_400_000
    assert {*incarnations[1:], last.incarnation.encode()} == {*left}


async def test_renewing_begins_a_lifetime_anew_and_changes_nothing_else(mortal):
    """Of the life that is named, or of any; a rollout that is not there is not made."""
    made = await mortal.open("r", {"a": b"1"}, now_ms=1)
    await mortal.append(StepWrite("r", made.incarnation, "s1", b"1", {b"b": b"1"}), now_ms=1)
    await mortal.mark("r", made.incarnation, {"m": b"1"}, now_ms=1)
    before, keys = await mortal.get("r"), rollout_keys(mortal._prefix, "r").all()
    for incarnation, is_there in ((made.incarnation, True), (None, True), ("another", False)):
        for key in keys:
            await mortal._servers.ask(key, [("PEXPIRE", key, 5_000)])
        assert is_there == await mortal.renew("r", incarnation)
        assert [is_there] * 7 == [await ttl_of(mortal, key) > 900_000 for key in keys]
    assert before == await mortal.get("r")
    assert not await mortal.renew("nobody", None)
    assert await mortal.get("nobody") is None


async def test_without_a_ttl_every_other_life_was_deleted(store, key_count):
    """Nothing expires, so nothing is kept of what was deleted, and nothing is restored."""
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    await store.delete("r")

    assert 0 == await key_count(store)
    with pytest.raises(RolloutDeleted):
        await store.append(StepWrite("r", incarnation, "s1", b"1", {}, (), {}, None, Origin(1)), now_ms=2)
    assert store.ttl_s is None
