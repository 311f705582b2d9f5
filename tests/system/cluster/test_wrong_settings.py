"""A store that cannot be used: `tokentape serve` ends with a sentence that names the setting."""

import asyncio
import sys

import pytest
from tests.system.cluster.nodes import clustered, free_port, guarded, nodes


async def refused(*words: str) -> str:
    """Return what a proxy prints that does not start."""
    command = [sys.executable, "-m", "proxy", "serve", "--listen", "127.0.0.1:0", *words]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, printed = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode != 0
    return printed.decode()


async def test_a_server_that_is_no_member_of_a_cluster(binary, tmp_path):
    async with nodes(binary, tmp_path, 1) as (server,):
        printed = await refused("--store", f"redis+cluster://{server.address}")

    assert f"{server.address} is not a server of a cluster: use the URL redis://{server.address}" in printed


async def test_a_member_of_a_cluster_without_cluster_in_the_url(binary, tmp_path):
    async with clustered(binary, tmp_path) as cluster:
        printed = await refused("--store", f"redis://{cluster.servers[0].address}")

    assert f"use the URL redis+cluster://{cluster.servers[0].address}" in printed


async def test_a_service_that_no_sentinel_knows(binary, tmp_path):
    async with guarded(binary, tmp_path) as watched:
        printed = await refused("--store", watched.url.removesuffix("tt") + "other")

    assert "'other'" in printed
    assert "store.url" in printed


@pytest.mark.parametrize("path", ["redis+cluster://{}", "redis+sentinel://{}/tt"])
async def test_no_server_responds(path):
    """The process waits for the store, as its servers may be started later; the log names the setting."""
    url = path.format(f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "proxy", "serve", "--listen", "127.0.0.1:0", "--store", url]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            while b"in store.url can be reached" not in await process.stderr.readline():
                assert process.returncode is None
    finally:
        process.terminate()
        await process.communicate()
