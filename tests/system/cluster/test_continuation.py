"""The turns of a rollout go to one proxy after another, with a cluster as the store, and a primary is replaced meanwhile."""

import asyncio
from contextlib import ExitStack
from signal import SIGKILL

import aiohttp
from tests.support.commands import started
from tests.support.continued_calls import Served, continuations, tapped
from tests.system.cluster.fleet import STORE_TIMEOUT_S
from tests.system.cluster.nodes import clustered, promoted

from storage import StoreOptions, open_store

_ROLLOUTS = 12
_TURNS = 4  # before the primary is killed, and after it was replaced


async def test_each_rollout_is_one_sequence_whichever_proxy_takes_its_turn(binary, tmp_path, monkeypatch):
    """Each prompt is the ids that were sampled, as the engine renders them; before, and after a shard was promoted."""
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")
    monkeypatch.setenv("TOKENTAPE_CONTINUATION__MODE", "append")
    monkeypatch.setenv("TOKENTAPE_STORE__TIMEOUT_S", str(STORE_TIMEOUT_S))
    async with (
        clustered(binary, tmp_path) as cluster,
        tapped(template="qwen3") as engine,
        aiohttp.ClientSession() as http,
    ):
        store = await open_store(cluster.url, StoreOptions(timeout_s=STORE_TIMEOUT_S))
        words = ("serve", "--listen", "127.0.0.1:0", "--store", cluster.url, "--engine", engine.url)
        with ExitStack() as stack:
            starts = [asyncio.to_thread(stack.enter_context, started(*words)) for _ in range(3)]
            proxies = [Served(url, http, engine, store, process) for process, url, _ in await asyncio.gather(*starts)]
            agents = [proxies[0].agent(f"r{number}", tools=True) for number in range(_ROLLOUTS)]
            await _turns(agents, proxies, range(_TURNS))
            lost = (await cluster.primaries())[0]
            replica = await cluster.replica_of(lost)
            lost.send(SIGKILL)
            await promoted(replica)
            await lost.start()
            await cluster.settled()
            await _turns(agents, proxies, range(_TURNS, 2 * _TURNS))
            steps = {agent.rollout: await proxies[0].steps(agent.rollout) for agent in agents}
            rows = {agent.rollout: await proxies[1].rows(agent.rollout) for agent in agents}
            await asyncio.gather(*(proxies[2].check_bridges(agent.rollout) for agent in agents))
        await store.close()

    assert {tuple(continuations(found)) for found in steps.values()} == {(None, *["sent"] * (2 * _TURNS - 1))}
    assert all(step.exact for found in steps.values() for step in found)
    assert {len(found) for found in rows.values()} == {1}


async def _turns(agents, proxies, turns) -> None:
    for turn in turns:
        for number, agent in enumerate(agents):
            agent.served, agent.stream = proxies[(turn + number) % 3], turn % 2 > 0
        await asyncio.gather(*(agent.turn(f"Question {turn}?") for agent in agents))
