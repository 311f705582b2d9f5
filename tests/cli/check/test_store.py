"""Checks of the store."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.support.findings import graded

from proxy.cli.check.store import check_store
from proxy.clock import SystemClock
from proxy.config.sections import StoreSettings
from storage.embedded.server import bundled_server
from storage.options import StoreOptions, parse_url
from storage.redis.connections import connections_to


@pytest.fixture
async def lax_server(tmp_path, unused_tcp_port):
    """A server without persistence that evicts keys: its URL, and a function that runs a command."""
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
            await connections.execute(b"", [command])

        yield url, setting
        await connections.close()
    finally:
        server.kill()
        await server.wait()


async def findings_for(url: str, clock=None, *, runs=False, **options):
    settings = StoreSettings(url=url, timeout_s=2, **options)
    return graded([finding async for finding in check_store(settings, clock or SystemClock(), runs=runs)])


class Late(SystemClock):
    """A clock that is an hour behind."""

    def now(self) -> float:
        return super().now() - 3600


async def test_a_store_without_persistence_is_a_fault_until_it_is_configured(lax_server):
    """The fix has the right value of each setting."""
    url, setting = lax_server
    faults = (await findings_for(url))["fault"]
    assert ["noeviction", "appendonly yes"] == [
        fix for fault in faults for fix in ("noeviction", "appendonly yes") if fix in fault
    ]

    await setting("CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "yes", "appendfsync", "no")
    after = await findings_for(url)
    assert [] == after["fault"]
    assert "appendfsync everysec" in after["note"][0]
    assert 1 == len(after["ok"])


async def test_a_durability_that_the_store_cannot_provide_is_a_fault_with_a_fix(lax_server):
    (fault,) = (await findings_for(lax_server[0], durability="fsync"))["fault"]

    assert "durability fsync requires an append-only file" in fault
    assert "choose a lower store.durability" in fault


async def test_a_replica_is_a_fault_with_the_primarys_address(lax_server):
    url, setting = lax_server
    await setting("REPLICAOF", "127.0.0.1", "9")

    assert any("use the address of the primary: 127.0.0.1:9" in fault for fault in (await findings_for(url))["fault"])


async def test_a_store_with_another_clock_is_a_note(lax_server):
    """The clock is read with TIME."""
    assert any("3600 s ahead of ours" in note for note in (await findings_for(lax_server[0], Late()))["note"])


async def test_an_unreachable_store_is_a_fault_without_its_password():
    (fault,) = (await findings_for("redis://u:hunter2@127.0.0.1:9"))["fault"]

    assert "check that the server is running" in fault
    assert "hunter2" not in fault


async def test_an_embedded_store_in_use_is_a_fault_unless_a_proxy_of_this_configuration_runs(tmp_path):
    async with open_embedded(tmp_path / "store") as url:
        (fault,) = (await findings_for(url))["fault"]
        with_running_proxy = await findings_for(url, runs=True)

    assert "only one process can open an embedded store" in fault
    assert [] == with_running_proxy["fault"]
    assert "no action is needed if that is the running proxy" in with_running_proxy["note"][0]


async def test_an_embedded_store_in_an_invalid_folder_is_a_fault(tmp_path):
    (tmp_path / "file").touch()
    (fault,) = (await findings_for(f"embedded:{tmp_path}/file/store"))["fault"]

    assert "choose a path that this user can create" in fault


@asynccontextmanager
async def open_embedded(path):
    """Open an embedded store."""
    from storage import open_store

    store = await open_store(f"embedded:{path}")
    try:
        yield f"embedded:{path}"
    finally:
        await store.close()


@pytest.mark.parametrize("path", ["data", "new/deeper/data"])
async def test_a_check_does_not_create_an_embedded_store(tmp_path, path):
    """It opens a temporary one beside it, and leaves nothing."""
    url = f"embedded:{tmp_path / path}"
    found = [finding async for finding in check_store(StoreSettings(url=url), SystemClock())]

    assert ["ok"] == [finding.grade for finding in found]
    assert f"store {url}" == found[0].subject
    assert "not created yet" in found[0].seen
    assert [] == list(tmp_path.iterdir())


async def test_an_embedded_store_below_a_file_is_a_fault_without_errno(tmp_path):
    (tmp_path / "file").touch()
    url = f"embedded:{tmp_path / 'file' / 'data'}"
    (fault,) = graded([finding async for finding in check_store(StoreSettings(url=url), SystemClock())])["fault"]

    assert "Not a directory" in fault
    assert "Errno" not in fault
    assert "(store.url)" in fault
