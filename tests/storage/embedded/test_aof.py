"""Checks and repairs of append-only files: complete writes are kept, a damaged end is cut off and saved."""

import logging
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import open_store
from storage.embedded import aof
from storage.errors import StorageError
from storage.types import StepWrite

MARKS = {"mark": b"\r\nlast"}


def encode(*words):
    """Encode a command as the server does."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def transaction(*commands):
    return encode(b"MULTI") + b"".join(commands) + encode(b"EXEC")


def create_files(path, *incr):
    """Create the files of a store: these incremental files, a base file and a manifest."""
    folder = path / "appendonlydir"
    folder.mkdir(parents=True)
    names = [f"appendonly.aof.{number}.incr.aof" for number in range(1, len(incr) + 1)]
    (folder / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS")
    lines = ["file appendonly.aof.1.base.rdb seq 1 type b\n"]
    for number, (name, data) in enumerate(zip(names, incr, strict=True), 1):
        (folder / name).write_bytes(data)
        lines.append(f"file {name} seq {number} type i\n")
    (folder / "appendonly.aof.manifest").write_text("".join(lines))
    return [folder / name for name in names]


COMMANDS = st.lists(st.lists(st.binary(max_size=12), min_size=1, max_size=3).map(lambda words: encode(b"SET", *words)))
UNITS = st.one_of(COMMANDS.map(lambda commands: transaction(*commands)), st.just(encode(b"SET", b"k", b"v")))


@given(st.lists(UNITS, min_size=1, max_size=4), st.data())
def test_an_incomplete_end_is_cut_off_and_saved(tmp_path_factory, units, data):
    """For any truncation, zeros or garbage: complete transactions stay, everything else is in the copy."""
    path, whole = tmp_path_factory.mktemp("aof"), b"".join(units)
    offset = data.draw(st.integers(0, len(whole)))
    rest = data.draw(
        st.one_of(st.just(b""), st.just(bytes(len(whole) - offset)), st.binary(max_size=30), st.just(bytes(9000)))
    )
    if b"*" in rest:
        rest = rest.replace(b"*", b"")
    damaged = whole[:offset] + rest
    (file,) = create_files(path, damaged)
    kept = b""
    for unit in units:
        if not damaged.startswith(kept + unit):
            break
        kept += unit

    cut = aof.repair(path)

    assert kept == file.read_bytes()
    assert (cut is None) == (kept == damaged)
    if cut:
        assert (file, len(kept), len(damaged) - len(kept)) == (cut.file, cut.offset, cut.size)
        assert damaged[len(kept) :] == cut.saved.read_bytes()
        assert cut.saved.stat().st_mode & 0o077 == 0
    assert aof.repair(path) is None


@pytest.mark.parametrize(
    "after",
    [
        transaction(encode(b"SET", b"a", b"1")),
        encode(b"SET", b"a", b"1"),
        encode(b"RPUSH", b"l", b"1") + encode(b"EXEC") + transaction(encode(b"SET", b"a", b"1")),
        transaction(encode(b"SET", b"a", b"1")) + b"*3\r\n$3\r\nSE",
    ],
    ids=["a transaction", "a command", "the rest of one and a transaction", "a transaction and half a command"],
)
@pytest.mark.parametrize(
    "damage", [bytes(4096), b"*2\r\n$3\r\nSET\r\n$999999\r\nab\r\n", b"garbage\r\n"], ids=["zeros", "length", "garbage"]
)
def test_damage_before_complete_commands_is_an_error(tmp_path, damage, after):
    """The file is not changed; the error has the offsets, and the commands to start without the rest."""
    first = transaction(encode(b"SET", b"k", b"v"))
    (file,) = create_files(tmp_path, first + damage + after)

    with pytest.raises(StorageError, match=f"truncate -s {len(first)} ") as raised:
        aof.repair(tmp_path)

    assert file.read_bytes() == first + damage + after
    assert f"is damaged at byte {len(first)}" in str(raised.value)
    assert list(file.parent.glob("*.incr.aof*")) == [file]


def test_the_rest_of_a_damaged_transaction_is_cut_off(tmp_path):
    """Commands up to the EXEC of a damaged transaction are incomplete without its beginning."""
    first = transaction(encode(b"SET", b"k", b"v"))
    (file,) = create_files(tmp_path, first + encode(b"MULTI") + bytes(100) + encode(b"INCR", b"n") + encode(b"EXEC"))

    cut = aof.repair(tmp_path)

    assert first == file.read_bytes()
    assert cut.size == cut.saved.stat().st_size > 100


def test_damage_in_an_earlier_file_is_an_error(tmp_path):
    """Only the last file can end with an incomplete write."""
    whole = transaction(encode(b"SET", b"k", b"v"))
    first, _ = create_files(tmp_path, whole[:-1], whole)

    with pytest.raises(StorageError, match=r"1\.incr\.aof is damaged at byte 0 .*not the last file"):
        aof.repair(tmp_path)

    assert whole[:-1] == first.read_bytes()


def test_a_saved_end_is_not_overwritten(tmp_path):
    """A second crash at the same offset creates another copy."""
    (file,) = create_files(tmp_path, b"first")
    first = aof.repair(tmp_path)
    file.write_bytes(b"second")
    second = aof.repair(tmp_path)

    assert [first.saved.read_bytes(), second.saved.read_bytes()] == [b"first", b"second"]


def test_an_end_that_cannot_be_saved_is_not_cut_off(tmp_path, monkeypatch):
    """On a full disk, the file is not changed, and the error names the fix."""
    (file,) = create_files(tmp_path, b"end")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(StorageError, match=r"last 3 bytes of .* cannot be saved .*No space left.*free disk space"):
        aof.repair(tmp_path)

    assert file.read_bytes() == b"end"
    assert list(file.parent.glob("*.incr.aof*")) == [file]


@pytest.fixture
async def stored(tmp_path):
    """Return the path of a stopped store with three records and, as its last write, a mark."""
    path = tmp_path / "store"
    store = await open_store(f"embedded:{path}")
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    for number in range(3):
        await store.append(StepWrite("r", incarnation, f"s{number}", b"%d" % number, counts={"steps": 1}), now_ms=2)
    await store.mark("r", incarnation, MARKS, now_ms=3)
    await store.close()
    return path


def last(path):
    (file,) = (path / "appendonlydir").glob("*.incr.aof")
    return file


def zeroed(data):
    return data[:-40] + bytes(40)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="cut short by a byte"),
        pytest.param(lambda data: data[: data.rindex(b"*1\r\n$4\r\nEXEC")], id="cut short between two commands"),
        pytest.param(zeroed, id="its last block not written"),
        pytest.param(lambda data: zeroed(data) + bytes(8192), id="its length ahead of its blocks"),
        pytest.param(lambda data: zeroed(data) + b"\xff\r\n" * 100, id="garbage at its end"),
    ],
)
async def test_a_store_with_a_damaged_last_write_starts(stored, opened, caplog, damage):
    """It has all writes before it; the log has the number of bytes that were cut off and their copy."""
    file = last(stored)
    whole = file.read_bytes()
    kept = whole.rindex(b"*1\r\n$5\r\nMULTI")
    damaged = damage(whole)
    file.write_bytes(damaged)

    with caplog.at_level(logging.WARNING, "tokentape.storage"):
        store = await opened(f"embedded:{stored}")

    assert await store.read("r", 0, 9) == [b"0", b"1", b"2"]
    assert (await store.get("r")).counts == {"steps": 3}
    assert await store.marks("r") == {}
    assert whole[:kept] == file.read_bytes()[:kept]
    (saved,) = file.parent.glob("*.cut-*")
    assert damaged[kept:] == saved.read_bytes()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"its last {len(damaged) - kept} bytes, from byte {kept}, are cut off and saved as {saved};" in message


async def test_a_command_that_ends_with_zeros_is_not_loaded(stored, opened):
    """The server does not check the end of a command, and would load the zeros."""
    file = last(stored)
    whole = file.read_bytes()
    file.write_bytes(whole + encode(b"SET", b"tt:x", b"value")[:-4] + bytes(4))

    store = await opened(f"embedded:{stored}")

    ((found,),) = [await server.execute(b"", [("GET", "tt:x")]) for server in await store._servers.all()]
    assert found is None
    assert await store.marks("r") == MARKS


async def test_a_store_with_damage_in_the_middle_does_not_start(stored):
    """The file is not changed; the error has the offset of the damage and the command to start without the rest."""
    file = last(stored)
    whole = file.read_bytes()
    offset = whole.index(b"$5\r\nRPUSH")
    file.write_bytes(whole[:offset] + bytes(9) + whole[offset + 9 :])

    with pytest.raises(StorageError, match=r"complete commands follow from byte .* restore .* truncate -s \d+ "):
        await open_store(f"embedded:{stored}")

    file.write_bytes(whole)
    await (await open_store(f"embedded:{stored}")).close()


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: data[:30] + bytes(10) + data[40:]], ids=["cut short", "zeros"]
)
async def test_a_damaged_base_file_is_an_error(stored, damage):
    """A snapshot cannot be repaired; the error has its name and the fix."""
    base = next((stored / "appendonlydir").glob("*.base.rdb"))
    base.write_bytes(damage(base.read_bytes()))

    with pytest.raises(StorageError, match=r"(?s)base\.rdb, which .* is damaged: restore .* the log .*RDB"):
        await open_store(f"embedded:{stored}")


def without(*patterns):
    def remove(folder):
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return remove


@pytest.mark.parametrize(
    ("lose", "named"),
    [
        (without("*.manifest"), r"no appendonly\.aof\.manifest, .* although appendonly\.aof\.1\.incr\.aof exists"),
        (without("*"), r"no appendonly\.aof\.manifest, .* although the directory had a store"),
        (shutil.rmtree, r"no appendonly\.aof\.manifest, .* although the directory had a store"),
        (without("*.incr.aof"), r"no appendonly\.aof\.1\.incr\.aof, which appendonly\.aof\.manifest lists"),
        (
            without("*.base.rdb", "*.incr.aof"),
            r"no appendonly\.aof\.1\.base\.rdb, appendonly\.aof\.1\.incr\.aof, which",
        ),
    ],
)
async def test_a_store_with_missing_files_does_not_start_empty(stored, lose, named):
    """The error names them; after the directory is moved away, an empty store is created."""
    lose(stored / "appendonlydir")

    with pytest.raises(StorageError, match=f"{named}.*: restore .*; to create an empty store, move {stored} away"):
        await open_store(f"embedded:{stored}")

    stored.rename(stored.with_name("away"))
    store = await open_store(f"embedded:{stored}")
    assert await store.read("r", 0, 9) == []
    await store.close()


async def test_files_without_a_manifest_and_marker_are_an_error(stored):
    """For directories of earlier versions, and for copies of the data."""
    (stored / "begun").unlink()
    without("*.manifest")(stored / "appendonlydir")

    with pytest.raises(StorageError, match="although .* exists"):
        await open_store(f"embedded:{stored}")


async def test_a_killed_first_start_does_not_prevent_the_next(tmp_path, opened):
    """The files that the server creates before its first manifest have no data."""
    folder = tmp_path / "store" / "appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS")
    (folder / "appendonly.aof.1.incr.aof").touch()
    (folder / "temp-appendonly.aof.manifest").touch()

    assert (await (await opened(f"embedded:{tmp_path / 'store'}")).open("r", {}, now_ms=1)).created


async def test_a_copy_of_the_data_is_a_store(stored, tmp_path, opened):
    """A backup of appendonlydir can be opened in another directory."""
    shutil.copytree(stored / "appendonlydir", tmp_path / "copy" / "appendonlydir")

    assert await (await opened(f"embedded:{tmp_path / 'copy'}")).read("r", 0, 9) == [b"0", b"1", b"2"]


async def test_a_lost_manifest_can_be_written_by_hand(stored, opened):
    """As documented in reliability.md, for one base file and one incremental file."""
    manifest = stored / "appendonlydir" / "appendonly.aof.manifest"
    lost = manifest.read_text()
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text()
    lines = re.findall(r"`(file appendonly\.aof\.N\.\S+ seq N type [bi])`", page)
    manifest.write_text("".join(line.replace("N", "1") + "\n" for line in lines))

    assert lost == manifest.read_text()
    assert await (await opened(f"embedded:{stored}")).read("r", 0, 9) == [b"0", b"1", b"2"]
