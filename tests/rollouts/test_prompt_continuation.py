"""The cache of turns: its bound, the reading of steps from the store, and failures of the store."""

import asyncio
import threading

import pytest
from tests.support.continued_calls import CHAT, TOKENIZE, continuations, continuations_made, served, tapped
from tests.support.fakes import FailingStore

from proxy.errors import BadRequest, DamagedStep
from proxy.rollouts import prompt_continuation
from proxy.rollouts.prompt_continuation import mode_of


@pytest.fixture
def reads(monkeypatch):
    """The index of the first record of each read of steps from the store, by the continuation."""
    found = []
    real = prompt_continuation.decode_records

    async def decode_records(store, rollout, records, start, *, whole):
        found.append(start)
        return await real(store, rollout, records, start, whole=whole)

    monkeypatch.setattr(prompt_continuation, "decode_records", decode_records)
    return found


@pytest.fixture
async def proxy(store):
    async with served(store) as proxy:
        yield proxy


async def cached_bytes(proxy) -> int:
    """The memory of the cache, as its metric has it."""
    async with proxy.http.get(proxy.url + "/metrics") as response:
        line = next(
            line for line in (await response.text()).splitlines() if line.startswith("tokentape_rollout_cache_bytes ")
        )
    return int(float(line.split()[1]))


async def bytes_during(proxy, agent, continuation) -> int:
    """The memory of the turns while the next call of an agent is at its engine: the steps before it are turns."""
    found = []

    async def measure(_body):
        found.append(continuation._rollouts.get("r1").known.turns.size)

    proxy.engine.faults[CHAT] = measure
    await agent.turn()
    del proxy.engine.faults[CHAT]
    return found[0]


async def test_the_steps_of_this_process_are_continued_without_reading_the_store(reads, proxy):
    """The newest step is kept until the next call, and then added."""
    await proxy.agent("r1").turns(4)
    rows = await proxy.rows("r1")

    assert reads == []
    assert len(rows) == 1


async def test_processes_that_take_turns_continue_each_others_steps(store, reads):
    """Each reads only what the other one stored since."""
    async with served(store) as one, served(store, engine=one.engine) as other:
        agent = one.agent("r1")
        for number in range(6):
            agent.served = (one, other)[number % 2]
            await agent.turn(f"Question {number}?")
        found = continuations(await one.steps("r1"))
        rows = await one.rows("r1")

    assert found == [None, *["sent"] * 5]
    assert len(rows) == 1
    assert sorted(reads) == [0, 1, 2, 3, 4]


async def test_a_restarted_process_continues_the_steps_of_the_earlier_one(store, reads):
    """They are in the store."""
    async with tapped() as engine:
        async with served(store, engine=engine) as proxy:
            agent = proxy.agent("r1")
            await agent.turns(3)
        async with served(store, engine=engine) as proxy:
            agent.served = proxy
            await agent.turns(3)
            rows = await proxy.rows("r1")

    assert len(rows) == 1
    assert reads == [0]


async def test_many_steps_are_read_in_pages(store, reads, monkeypatch):
    """Each page is added before the next one is read."""
    monkeypatch.setattr(prompt_continuation, "_PAGE", 2)
    async with served(store, sections={"continuation": {"mode": "off"}}) as proxy:
        agent = proxy.agent("r1")
        await agent.turns(5)
        agent.headers = {"X-Rollout-Continuation": "faithful"}
        await agent.turns(2)
        found = continuations(await proxy.steps("r1"))

    assert found == [None] * 5 + ["sent", "sent"]
    assert reads == [0, 2, 4]


async def test_a_rollout_that_continues_nothing_has_at_most_one_step_in_memory(reads, proxy):
    """Its first step, until the second one is stored. A call that continues them later reads them from the store."""
    agents, sizes = [proxy.agent("r1") for _ in range(3)], []
    for agent in agents:
        await agent.turn("word " * 100)
        sizes.append(await cached_bytes(proxy))
    await agents[1].turns(2)
    found = continuations(await proxy.steps("r1"))

    assert sizes[0] - 4 * 500 > sizes[1]
    assert abs(sizes[2] - sizes[1]) < 2000  # what finds drift remembers the ids of each reply
    assert found == [None, None, None, "sent", "sent"]
    assert reads == [0]


@pytest.mark.parametrize("limit", [0, 1, 20_000])
async def test_the_cache_has_at_most_the_configured_bytes(store, reads, limit):
    """The least recently used rollouts are dropped, and read from the store when they are continued."""
    async with served(store, sections={"agents": {"rollout_cache_bytes": limit}}) as proxy:
        agents = [proxy.agent(f"r{number}") for number in range(12)]
        sizes = []
        for agent in agents:
            await agent.turns(2)
            sizes.append(await cached_bytes(proxy))
        reads.clear()
        await agents[0].turn("More?")
        found = continuations(await proxy.steps("r0"))

    assert max(sizes) <= limit
    assert found == [None, "sent", "sent"]
    assert reads == [0]


async def test_rollouts_without_turns_count_towards_the_limit(store):
    """Failed calls have no turns, but a rollout of them has an entry."""
    async with served(store, sections={"agents": {"rollout_cache_bytes": 50_000}}) as proxy:
        proxy.engine.answers(CHAT, {"error": {"message": "no"}}, status=400)
        sizes = []
        for number in range(20):
            assert (await proxy.send(f"/rollouts/r{number}{CHAT}", proxy.agent("r").body()))[0] == 400
            sizes.append(await cached_bytes(proxy))

    assert 40_000 < sizes[-1] <= max(sizes) <= 50_000


async def test_branches_count_with_all_their_prompts(store, monkeypatch):
    """Many calls continue the same long step; each branch has its own prompt in memory."""
    made = continuations_made(monkeypatch)
    async with served(store) as proxy:
        first = proxy.agent("r1")
        await first.turn("word " * 2000)
        before = await bytes_during(proxy, first.branch(), made[0])
        for number in range(7):
            await first.branch().turn(f"Branch {number}?")
        after = await bytes_during(proxy, first.branch(), made[0])
        steps = (await proxy.steps("r1"))[:-1]

    prompts = [4 * len(step.prompts[0]) for step in steps]
    assert continuations(steps) == [None, *["sent"] * 8]
    assert before > prompts[0]
    assert after - before > sum(prompts[1:]) - prompts[0]


async def test_the_prompts_of_a_linear_rollout_are_counted_once(store, monkeypatch):
    """A prompt that begins with the earlier ones replaces them."""
    made = continuations_made(monkeypatch)
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn("word " * 2000)
        await agent.turns(5)
        size, steps = await bytes_during(proxy, agent, made[0]), (await proxy.steps("r1"))[:-1]

    longest, sampled = 4 * len(steps[-1].prompts[0]), sum(step.sampled for step in steps)
    assert longest < size < longest + 6 * 1000 + 12 * sampled + 3000


async def test_long_steps_are_added_in_threads(monkeypatch, proxy):
    """Calls that follow at once, concurrent ones and later ones find them."""
    monkeypatch.setattr(prompt_continuation, "LONG_IDS", 10)
    agent = proxy.agent("r1")
    await agent.turns(3)
    branches = [agent.branch() for _ in range(6)]
    await asyncio.gather(*(branch.turns(3) for branch in branches))
    found = continuations(await proxy.steps("r1"))

    assert found == [None, *["sent"] * 20]


@pytest.fixture
def slow_thread(monkeypatch):
    """Two events: a thread adds a long step, and it may proceed."""
    monkeypatch.setattr(prompt_continuation, "LONG_IDS", 10)
    real, adding, proceed = prompt_continuation._add_all, threading.Event(), threading.Event()

    def add_all(turns, steps):
        adding.set()
        proceed.wait(50)
        real(turns, steps)

    monkeypatch.setattr(prompt_continuation, "_add_all", add_all)
    return adding, proceed


async def test_a_step_that_is_stored_while_others_are_added_is_added_after_them(reads, slow_thread, proxy):
    """It is not read from the store."""
    adding, proceed = slow_thread
    first, second = proxy.agent("r1"), proxy.agent("r1")
    await first.turn("One?")
    continued = asyncio.create_task(first.turn())
    await asyncio.to_thread(adding.wait, 20)
    await second.turn("Two?")
    proceed.set()
    await asyncio.gather(continued, second.turn())
    found = continuations(await proxy.steps("r1"))

    assert found == [None, None, "sent", "sent"]
    assert reads == []


async def test_a_timeout_while_a_step_is_added_leaves_the_turns_whole(store, monkeypatch, slow_thread):
    """The thread ends before another call searches the turns."""
    (adding, proceed), made = slow_thread, continuations_made(monkeypatch)
    async with served(store, sections={"continuation": {"timeout_s": 0.1}}) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        branches = [agent.branch() for _ in range(3)]
        await asyncio.gather(*(branch.turn() for branch in branches))
        assert adding.is_set()
        proceed.set()
        made[0]._timeout_s = 50
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert found == [None, "timeout", "timeout", "timeout", "sent"]


async def test_an_unreachable_store_sends_the_call_unchanged(store, reads):
    """The step is stored, and the next call continues it."""
    failing = FailingStore(store)
    async with (
        served(store, sections={"continuation": {"mode": "off"}}) as proxy,
        served(failing, engine=proxy.engine) as other,
    ):
        agent = proxy.agent("r1")
        await agent.turn()
        agent.served = other
        failing.failing.add("read")
        await agent.turn()
        sent = proxy.engine.bodies()[-1]
        failing.failing.clear()
        await agent.turn()
        found, counts = continuations(await proxy.steps("r1")), await other.counts()

    assert found == [None, "store", "sent"]
    assert "kv_transfer_params" not in sent
    assert counts == {"refused:store": 1, "continued": 1}


async def test_a_damaged_step_sends_the_call_unchanged(store, monkeypatch):
    """Nothing is guessed about the rest of the rollout."""

    async def decode_records(*args, **named):
        raise DamagedStep("the record is unreadable")

    async with served(store, sections={"continuation": {"mode": "off"}}) as proxy:
        agent = proxy.agent("r1", headers={"X-Rollout-Continuation": "append"})
        await agent.turn()
        monkeypatch.setattr(prompt_continuation, "decode_records", decode_records)
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert found == [None, "store"]


async def test_the_reading_of_a_slow_store_continues_after_the_timeout(store, reads, monkeypatch):
    """The call is sent unchanged; the next one finds the steps."""
    made = continuations_made(monkeypatch)
    slow = FailingStore(store)
    slow.waiting["read"] = asyncio.Event()
    sections = {"continuation": {"timeout_s": 0.1}}
    async with served(store) as proxy, served(slow, engine=proxy.engine, sections=sections) as other:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.served = other
        await agent.turn()
        slow.waiting.pop("read").set()
        made[1]._timeout_s = 50
        await agent.turn()
        found, counts = continuations(await proxy.steps("r1")), await other.counts()

    assert found == [None, "timeout", "sent"]
    assert counts["refused:timeout"] == 1


async def test_a_rollout_that_was_created_again_has_no_earlier_turns(proxy):
    """Its first call continues nothing of the deleted rollout."""
    agent = proxy.agent("r1")
    await agent.turns(2)
    assert (await proxy.send("/rollouts/r1", {}, method="DELETE"))[0] == 204
    await agent.turn()
    await agent.turn()
    found = continuations(await proxy.steps("r1"))

    assert found == [None, "sent"]


async def test_a_rollout_that_is_deleted_during_a_rendering_fails_no_call(proxy):
    """The response arrives; its step is discarded with the rollout."""
    agent, deleted = proxy.agent("r1"), asyncio.Event()
    await agent.turn()

    async def delete(body):
        assert (await proxy.send("/rollouts/r1", {}, method="DELETE"))[0] == 204
        deleted.set()

    proxy.engine.faults[TOKENIZE] = delete
    await agent.turn()
    proxy.engine.faults.clear()
    await agent.turn()
    found = continuations(await proxy.steps("r1"))

    assert deleted.is_set()
    assert found == [None]


async def test_steps_in_the_journal_are_continued_once_they_are_stored(store, tmp_path):
    """Until then calls are sent unchanged, and none is lost."""
    failing = FailingStore(store)
    sections = {"store": {"on_failure": "spool", "spool_path": str(tmp_path / "steps")}}
    async with served(failing, sections=sections) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        failing.failing.add("append")
        await agent.turn()
        await agent.turn()
        failing.failing.clear()
        async with asyncio.timeout(50):
            while len(await proxy.steps("r1")) < 3:
                await asyncio.sleep(0.02)
        await agent.turn()
        steps = await proxy.steps("r1")
        rows = await proxy.rows("r1")

    assert len(steps) == 4
    assert continuations(steps)[:2] == [None, "sent"]
    assert continuations(steps)[3] == "sent"
    assert all(step.exact for step in steps)
    assert len(rows) == 2


async def test_an_aborted_client_leaves_no_task(proxy):
    """The engine's request is closed with the client's."""
    agent = proxy.agent("r1")
    await agent.turn()
    before, reached = asyncio.all_tasks(), asyncio.Event()
    aborted = asyncio.Event()

    async def hang(body):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()

    proxy.engine.faults[TOKENIZE] = hang
    call = asyncio.create_task(agent.turn())
    await asyncio.wait_for(reached.wait(), 50)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.wait_for(aborted.wait(), 50)
    async with asyncio.timeout(50):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)
    proxy.engine.faults.clear()
    agent.messages.pop()
    await agent.turn()
    found = continuations(await proxy.steps("r1"))

    assert found == [None, "sent"]


def test_the_header_is_not_case_sensitive():
    assert [mode_of(header) for header in (" APPEND ", "Off")] == ["append", "off"]


@pytest.mark.parametrize("header", ["", "on", "true", "x" * 10_000])
def test_an_unknown_mode_in_the_header_is_an_error_that_lists_the_modes(header):
    """It contains the beginning of the value."""
    with pytest.raises(BadRequest, match="X-Rollout-Continuation must be one of off, faithful, append, not") as caught:
        mode_of(header)

    assert (caught.value.status, caught.value.param) == (400, "X-Rollout-Continuation")
    assert repr(header[:100]) in caught.value.message
    assert len(caught.value.message) < 200
