"""Whether the store opens, and keeps what it is told."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from findings import graded

from proxy.cli.check.store import check_store
from proxy.clock import SystemClock
from proxy.config.sections import StoreSettings
from storage.embedded.server import bundled_server
from storage.options import StoreOptions, parse_url
from storage.redis.connections import connections_to


@pytest.fixture
async def lax(tmp_path, unused_tcp_port):
    """A real server that keeps nothing on disk, and throws keys away when it is full: its URL, and what sets it."""
    words = ["--port", str(unused_tcp_port), "--dir", str(tmp_path), "--save", "", "--maxmemory", "50mb"]
    server = await asyncio.create_subprocess_exec(
        str(bundled_server()), *words, "--maxmemory-policy", "allkeys-lru", stdout=asyncio.subprocess.PIPE
    )
    try:
        async for line in server.stdout:
            if b"Ready to accept connections" in line:
                break
        url = f"redis://127.0.0.1:{unused_tcp_port}"
        connections = connections_to("127.0.0.1", unused_tcp_port, parse_url(url), StoreOptions())

        async def setting(*command: str) -> None:
            await connections.execute([command])

        yield url, setting
        await connections.close()
    finally:
        server.kill()
        await server.wait()


async def told(url: str, clock=None, *, runs=False, **said):
    settings = StoreSettings(url=url, timeout_s=2, **said)
    return graded([finding async for finding in check_store(settings, clock or SystemClock(), runs=runs)])


class Late(SystemClock):
    """A clock that is an hour behind."""

    def now(self) -> float:
        return super().now() - 3600


async def test_a_store_that_forgets_is_a_fault_until_it_is_mended(lax):
    """Each of its settings with what to set instead; set so, the server is well."""
    url, setting = lax
    faults = (await told(url))["fault"]
    assert ["noeviction", "appendonly yes"] == [
        fix for fault in faults for fix in ("noeviction", "appendonly yes") if fix in fault
    ]

    await setting("CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "yes", "appendfsync", "no")
    after = await told(url)
    assert [] == after["fault"]
    assert "appendfsync everysec" in after["note"][0]
    assert 1 == len(after["ok"])


async def test_a_store_that_cannot_keep_what_is_asked_is_told_how_to(lax):
    """It is there: nobody is sent to look whether it runs."""
    (fault,) = (await told(lax[0], durability="fsync"))["fault"]

    assert "durability fsync requires an append-only file" in fault
    assert "choose a lower store.durability" in fault


async def test_a_replica_is_a_fault(lax):
    """It takes no writes; the primary's address is told."""
    url, setting = lax
    await setting("REPLICAOF", "127.0.0.1", "9")

    assert any("use the address of the primary: 127.0.0.1:9" in fault for fault in (await told(url))["fault"])


async def test_a_store_whose_clock_is_off_is_noted(lax):
    """By the server's own TIME against ours."""
    assert any("3600 s ahead of ours" in note for note in (await told(lax[0], Late()))["note"])


async def test_a_store_that_cannot_be_reached_is_told_without_its_password():
    """And what to look at."""
    (fault,) = (await told("redis://u:hunter2@127.0.0.1:9"))["fault"]

    assert "check that the server is running" in fault
    assert "hunter2" not in fault


async def test_an_embedded_store_that_another_process_has_is_told(tmp_path):
    """One process at a time has it; that is no mistake where a proxy of this configuration runs."""
    async with owned(tmp_path / "store") as url:
        (fault,) = (await told(url))["fault"]
        beside = await told(url, runs=True)

    assert "only one process can open an embedded store" in fault
    assert [] == beside["fault"]
    assert "no action is needed if that is the running proxy" in beside["note"][0]


async def test_an_embedded_store_where_no_folder_can_be_is_told(tmp_path):
    """Nobody else has it: the path is what is wrong."""
    (tmp_path / "file").touch()
    (fault,) = (await told(f"embedded:{tmp_path}/file/store"))["fault"]

    assert "choose a path that this user can create" in fault


@asynccontextmanager
async def owned(path):
    """An embedded store that is open."""
    from storage import open_store

    store = await open_store(f"embedded:{path}")
    try:
        yield f"embedded:{path}"
    finally:
        await store.close()
