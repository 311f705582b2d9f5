"""The commands of docs/operations.md, run on a store in use."""

import asyncio
import os
import shutil
import subprocess
from asyncio import TaskGroup, to_thread

import orjson
import pytest
import redis
from tests.support.fakes import settings_for
from tests.support.pages import ROOT, blocks_of

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

BACKUP, PLAIN, PLAY = (
    block.text for block in blocks_of(ROOT / "docs" / "operations.md") if block.checked_by == "tests/test_operations.py"
)
NO_REDIS = "redis-server and redis-cli are not installed (Debian: apt-get install redis-server)"

pytestmark = pytest.mark.skipif(not (shutil.which("redis-server") and shutil.which("redis-cli")), reason=NO_REDIS)


@pytest.fixture
async def engine():
    """A simulated engine."""
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


def serving(engine, store):
    """Start a proxy over a store."""
    return running(settings_for(engine, store={"url": store}))


async def run(commands, folder):
    """Run commands of the page with bash."""
    done = await to_thread(
        subprocess.run,
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def call(http, url, rollout):
    """Make a call of a rollout."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    async with http.post(f"{url}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
        assert response.status == 200


async def fill(http, url):
    """Record three rollouts of two steps, and a complete group."""
    for rollout in ("r1", "r2", "r3"):
        await call(http, url, rollout)
        await call(http, url, rollout)
    async with http.post(f"{url}/groups", json={"group_id": "g1", "size": 1}) as response:
        (opened,) = orjson.loads(await response.read())["rollouts"]
    await call(http, url, opened["rollout_id"])
    async with http.post(
        f"{url}/rollouts/{opened['rollout_id']}/finish", json={"status": "completed", "reward": 1.0}
    ) as response:
        assert response.status == 200


async def exported(http, url):
    """Return every step, as a line."""
    async with http.get(f"{url}/export?format=steps&container=ndjson") as response:
        return set((await response.read()).splitlines())


async def test_a_backup_made_during_calls_has_everything_recorded_before_it(engine, http, tmp_path):
    over = asyncio.Event()

    async def keep_calling(url):
        while not over.is_set():
            await call(http, url, "busy")

    async with serving(engine, f"embedded:{tmp_path}/data") as served:
        await fill(http, served.url)
        before = await exported(http, served.url)
        async with TaskGroup() as group:
            group.create_task(keep_calling(served.url))
            await run(BACKUP, tmp_path)
            over.set()
    async with serving(engine, f"embedded:{tmp_path}/backup") as served:
        restored = await exported(http, served.url)

    assert len(before) == 7
    assert before <= restored


async def test_an_embedded_store_can_be_moved_to_redis(engine, http, tmp_path, unused_tcp_port):
    """Exports are equal, and a complete group can be claimed."""
    async with serving(engine, f"embedded:{tmp_path}/data") as served:
        await fill(http, served.url)
        await run(PLAIN, tmp_path)
        await call(http, served.url, "late")  # written after the rewrite
        before = await exported(http, served.url)
    server = await asyncio.create_subprocess_exec(
        "redis-server", "--port", str(unused_tcp_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes",
        cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        with redis.Redis(port=unused_tcp_port) as client:
            assert await wait_until_reachable(client)
        assert "errors: 0" in await run(PLAY.replace("6379", str(unused_tcp_port)), tmp_path)
        async with serving(engine, f"redis://127.0.0.1:{unused_tcp_port}") as served:
            moved = await exported(http, served.url)
            async with http.post(f"{served.url}/batches/claim", json={"consumer": "trainer-0"}) as response:
                claimed = orjson.loads(await response.read())["groups"]
    finally:
        server.kill()
        await server.wait()

    assert len(before) == 8
    assert before == moved
    assert [group["group_id"] for group in claimed] == ["g1"]


async def wait_until_reachable(client):
    """Wait until the server responds to PING."""
    while True:
        try:
            return client.ping()
        except redis.ConnectionError:
            await asyncio.sleep(0.01)
