"""A store that refuses writes, as clients see it, and one that rewrites its file under load."""

import asyncio
from contextlib import asynccontextmanager, suppress
from random import Random

import aiohttp
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps
from tests.system.faults.load import Agents
from tests.system.faults.run import _longest_file
from tests.system.faults.system import System, WithStore, free_port, valkey
from tests.system.faults.verdict import judge

from storage import open_store

STREAM = load("chat_ids_lp_stream")
CHAT = "/rollouts/{}/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TIMEOUT_S = 50


class Store(WithStore):
    """A Valkey with an append-only file."""

    def __init__(self, folder) -> None:
        self.folder, self.store_port = folder, free_port()
        self.store = valkey(folder, "store", self.store_port)
        self.url = f"redis://127.0.0.1:{self.store_port}"


@pytest.fixture
async def server(tmp_path):
    one = Store(tmp_path)
    await one.store.start()
    await one.store_answers()
    yield one
    one.store.process.kill()
    await one.store.process.wait()


@asynccontextmanager
async def full(server):
    await server.ask_store("CONFIG", "SET", "maxmemory", "1")
    yield
    await server.ask_store("CONFIG", "SET", "maxmemory", "0")


@asynccontextmanager
async def a_replica(server):
    await server.ask_store("REPLICAOF", "127.0.0.1", str(free_port()))
    yield
    await server.ask_store("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def without_disk(server):
    await server.ask_store("CONFIG", "SET", "appendfsync", "no")
    server.store.let_files_grow_to(_longest_file(server))
    await server.ask_store("SET", "unrelated", "1")
    await server.store_says("aof_last_write_status:err")
    yield
    server.store.let_files_grow_to(None)
    await server.store_says("aof_last_write_status:ok")


@pytest.mark.parametrize(
    ("limit", "words"),
    [(full, ("OOM", "raise maxmemory")), (a_replica, ("READONLY", "primary")), (without_disk, ("MISCONF", "disk"))],
    ids=["maxmemory", "read-only replica", "disk full"],
)
async def test_a_store_that_refuses_writes_is_a_503_with_the_reason_and_calls_continue_afterwards(
    server, engine, http, limit, words
):
    """New calls are not sent; a stream that began before is cut before its end, and its step is not stored."""
    may_end = asyncio.Event()
    engine.plays(STREAM)
    played = engine.respond

    async def respond(request, body):
        await may_end.wait()
        return await played(request, body)

    async def call(rollout: str) -> tuple[int, bytes, str]:
        text = b""
        async with http.post(served.url + CHAT.format(rollout), json=BODY) as response:
            with suppress(aiohttp.ClientPayloadError):  # the connection is closed without the end
                async for read in response.content.iter_any():
                    text += read
            return response.status, text, response.headers.get("Retry-After", "")

    async with proxying(engine.url, None, store={"url": server.url, "timeout_s": 5}) as served:
        may_end.set()
        before = await call("before")
        may_end.clear()
        engine.respond = respond
        began = asyncio.create_task(call("began"))
        async with asyncio.timeout(TIMEOUT_S):
            while "began" not in await names_in(http, served.url):
                await asyncio.sleep(0.01)
        async with limit(server):
            requests = len(engine.requests)
            may_end.set()
            cut, refused = await began, await call("refused")
            async with http.get(served.url + "/ready") as response:
                ready = response.status, (await response.json())["store"]
            sent = len(engine.requests) - requests
        async with asyncio.timeout(TIMEOUT_S):
            while (after := await call("after"))[0] != 200:
                await asyncio.sleep(0.05)
        store = await open_store(server.url)
        stored = {name: len(await stored_steps(store, name)) for name in ("before", "after", "began", "refused")}
        await store.close()

    assert (before[0], after[0]) == (200, 200)
    assert before[1].endswith(b"data: [DONE]\n\n")
    assert before[1].startswith(cut[1][:100])
    assert b"[DONE]" not in cut[1]
    assert (refused[0], refused[2], sent) == (503, "1", 0)
    assert b"store_unavailable" in refused[1]
    assert ready[0] == 503
    assert all(word in ready[1] for word in words)
    assert stored == {"before": 1, "after": 1, "began": 0, "refused": 0}


async def names_in(http: aiohttp.ClientSession, url: str) -> list[str]:
    async with http.get(url + "/rollouts") as response:
        return [rollout["rollout_id"] for rollout in (await response.json())["rollouts"]]


async def test_a_full_store_accepts_deletions(server, engine, http):
    """So operators and trainers can make room without a restart."""
    engine.plays(STREAM)
    async with proxying(engine.url, None, store={"url": server.url}) as served:
        async with http.post(served.url + CHAT.format("r"), json=BODY) as response:
            await response.read()
        async with full(server), http.delete(served.url + "/rollouts/r") as response:
            status = response.status
        names = await names_in(http, served.url)

    assert (status, names) == (204, [])


@pytest.mark.timeout(120)
async def test_rewrites_of_the_append_only_file_under_load_fail_no_call(tmp_path):
    """The server forks, and its file is replaced, again and again."""
    system = System(tmp_path, "fail")
    try:
        await system.start()
        agents = Agents(system.url, Random(1), 4, modes=["whole"])
        for _ in range(5):
            await system.ask_store("BGREWRITEAOF")
            await system.store_says(
                "aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0", "aof_last_bgrewrite_status:ok"
            )
            ended = len(agents.ended)
            async with asyncio.timeout(TIMEOUT_S):
                while len(agents.ended) < ended + 20:
                    await asyncio.sleep(0.02)
        await agents.stop()
        await system.ready()
        counted = await judge(system.store_url, agents.ended, set(system.engine_log.read_text().split()))
    finally:
        await system.stop()

    assert counted["ended"] >= 100
    assert set(agents.statuses) == {200}
