"""Dispatch: rollouts that rollout servers run."""

import asyncio

import pytest
from recorded import load
from rollout_servers import ADD, QUESTION, dispatching, post, rollout_server
from stored import stored_rollout, stored_steps

from proxy.api.api_keys import read_minted
from proxy.server.listener import simulating
from proxy.simulator.options import Options

WHOLE = load("chat_ids_lp")
SYNC = {"server": "calculator", "messages": QUESTION}
ASYNC = {"server": "calculator", "protocol": "async", "messages": QUESTION}
TIMEOUT_S = 50


@pytest.fixture
async def runner():
    async with rollout_server() as runner:
        yield runner


@pytest.fixture
async def proxy(store, runner):
    async with (
        simulating("127.0.0.1:0", Options()) as simulator,
        dispatching(simulator, store, runner) as proxy,
    ):
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        yield proxy


async def finished(store, rollout_id="r1"):
    """The rollout, once it is finished: nobody waits for it."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (rollout := await stored_rollout(store, rollout_id)).is_finished:
            await asyncio.sleep(0.005)
    return rollout


async def test_a_server_is_told_what_its_protocol_knows(proxy, runner, store):
    """The synchronous one: our base URL, the rollout's own key, and what the dispatch said, whole."""
    said = {"sampling_params": {"temperature": 0.5}, "max_turns": 3, "tokenizer_name": "t", "metadata": {"a": 1}}
    status, told = await proxy.post("/rollouts/r1/dispatch", SYNC | said)
    rollout = await finished(store)
    (asked,) = runner.requests
    key = read_minted(asked.pop("callback_api_key"))

    assert (202, "open", None) == (status, told["status"], told["result"])
    assert "r1" == key.rollout_id
    assert {
        "rollout_id": "r1", "server_url": proxy.url, "messages": QUESTION, "max_tokens_total": 8192, **said
    } == asked  # fmt: skip
    assert ("completed", "stop") == (rollout.status, rollout.metadata["osmosis"]["finish_reason"])


async def test_a_dispatch_does_not_wait_unless_asked(proxy, runner, store):
    """Its answer is there while the server is still at it."""
    runner.release = asyncio.Event()
    status, _ = await proxy.post("/rollouts/r1/dispatch", SYNC)
    before = (await stored_rollout(store, "r1")).status
    runner.release.set()

    assert (202, "open") == (status, before)
    assert "completed" == (await finished(store)).status


async def test_an_asynchronous_rollout_gets_its_tools_and_is_finished_by_its_callback(proxy, runner, store):
    """Its first call is made before its init is answered, and waits for the tools that the answer names."""
    runner.is_slow = True
    status, _ = await proxy.post("/rollouts/r1/dispatch", ASYNC | {"completion_params": {"temperature": 1}})
    async with asyncio.timeout(TIMEOUT_S):
        await runner.over.wait()
    rollout, (step,) = await stored_rollout(store, "r1"), await stored_steps(store, "r1")
    (asked,) = runner.requests

    assert 202 == status
    assert {"temperature": 1} == asked["completion_params"]
    assert not {"sampling_params", "callback_api_key"} & asked.keys()
    assert [ADD] == step.sent["set"]["tools"]
    assert runner.responses[0]["usage"]["total_tokens"] > 0
    assert (200, {"status": "ok"}) == runner.over.result
    assert ("completed", 0.5, (ADD,)) == (rollout.status, rollout.reward, rollout.tools)


async def test_a_retry_of_a_dispatched_rollout_is_told_its_answer_again(proxy, runner, store):
    """Its client's SDK retries without a key; also when the rollout is over."""
    await proxy.post("/rollouts/r1/dispatch", ASYNC)
    async with asyncio.timeout(TIMEOUT_S):
        await runner.over.wait()
    body = {"model": "default", "messages": QUESTION, "rollout_id": "r1", "logprobs": True}
    again = await proxy.post("/v1/chat/completions", body)

    assert (200, runner.responses[0]) == again
    assert 1 == len(await stored_steps(store, "r1"))


@pytest.mark.parametrize(
    ("status", "told", "category"),
    [
        (422, {"detail": "no"}, "validation_error"),
        (500, {}, "internal_error"),
        (429, {}, "rate_limited"),
        (302, {}, "validation_error"),
        (200, ["not", "an", "object"], "internal_error"),
        (200, {"rollout_id": "r1", "status": "DONE"}, "validation_error"),
        (200, {"rollout_id": "r2", "status": "COMPLETED"}, "validation_error"),
    ],
)
async def test_a_server_that_fails_leaves_a_failed_rollout_that_says_why(proxy, runner, store, status, told, category):
    """The category is the protocol's own word."""
    runner.status, runner.response_body = status, told
    response, shown = await proxy.post("/rollouts/r1/dispatch", SYNC | {"wait": True})
    fields = shown["result"]["extra_fields"]

    assert (200, "failed", category) == (response, shown["status"], fields["error_category"])
    assert (None if status == 200 else status) == fields.get("http_status")
    assert "calculator" in shown["result"]["error_message"]


async def test_an_asynchronous_server_that_refuses_leaves_a_failed_rollout(proxy, runner, store):
    """Calls of it are refused then, and do not wait for tools."""
    runner.status = 503
    await proxy.post("/rollouts/r1/dispatch", ASYNC | {"wait": True})
    status, _ = await proxy.post("/v1/chat/completions", {"messages": QUESTION, "rollout_id": "r1"})

    assert ("failed", 409) == ((await stored_rollout(store, "r1")).status, status)


async def test_a_server_that_is_away_or_silent_is_named_so(store, engine, runner):
    """Each by its category."""
    servers = {"servers": {"away": {"url": "http://127.0.0.1:1"}, "silent": {"url": runner.url}}, "timeout_s": 0.1}
    runner.release = asyncio.Event()
    told = {}
    async with dispatching(engine.url, store, runner, osmosis=servers) as proxy:
        for name in ("away", "silent"):
            await proxy.post("/rollouts", {"rollout_id": name})
            _, told[name] = await proxy.post(f"/rollouts/{name}/dispatch", SYNC | {"server": name, "wait": True})

    assert {"away": "network_error", "silent": "timeout"} == {
        name: one["result"]["extra_fields"]["error_category"] for name, one in told.items()
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"server": "http://evil"}, "configured in osmosis.servers: calculator"),
        ({"messages": []}, "messages"),
        ({"completion_params": {}}, "completion_params does not exist in the sync protocol"),
        ({"protocol": "async", "tokenizer_name": "t"}, "tokenizer_name does not exist in the async protocol"),
        ({"max_turns": 101}, "max_turns"),
        ({"url": "http://evil"}, "url"),
    ],
)
async def test_a_dispatch_that_may_not_be_is_422_and_nobody_is_asked(proxy, runner, body, said):
    """Only servers of the configuration can be named."""
    status, told = await proxy.post("/rollouts/r1/dispatch", SYNC | body)

    assert (422, []) == (status, runner.requests)
    assert said in told["error"]["message"]


async def test_a_rollout_is_dispatched_once(proxy, runner, store):
    """The same again starts nothing; another dispatch is refused, and so is one of a finished or unknown rollout."""
    runner.release = asyncio.Event()
    statuses = [(await proxy.post("/rollouts/r1/dispatch", SYNC))[0] for _ in range(2)]
    statuses.append((await proxy.post("/rollouts/r1/dispatch", SYNC | {"max_turns": 2}))[0])
    runner.release.set()
    await finished(store)
    statuses.append((await proxy.post("/rollouts/r1/dispatch", SYNC))[0])
    await proxy.post("/rollouts", {"rollout_id": "r2"})
    await proxy.post("/rollouts/r2/finish", {"status": "completed"})
    statuses += [(await proxy.post(f"/rollouts/{name}/dispatch", SYNC))[0] for name in ("r2", "nobody")]

    assert [202, 202, 409, 202, 409, 404] == statuses
    assert 1 == len(runner.requests)


async def test_a_dispatch_shows_on_the_rollout(proxy, store):
    """Which server, by which protocol."""
    before = (await proxy.get("/rollouts/r1"))[1]
    await proxy.post("/rollouts/r1/dispatch", SYNC)
    await finished(store)

    assert "dispatch" not in before
    assert {"server": "calculator", "protocol": "sync", "state": "started"} == (await proxy.get("/rollouts/r1"))[1][
        "dispatch"
    ]


async def test_a_dispatch_is_of_the_control_api(store, engine, runner):
    """With a key of its own, and on a port of its own where it has one."""
    control = {"api_keys": ["boss"], "listen": "127.0.0.1:0"}
    key = {"Authorization": "Bearer boss"}
    async with dispatching(engine.url, store, runner, control=control) as proxy:
        told = [
            (await post(proxy.http, f"{url}/rollouts/nobody/dispatch", SYNC, headers))[0]
            for url, headers in ((proxy.url, key), (proxy.control_url, {}), (proxy.control_url, key))
        ]
        _, last = await post(proxy.http, f"{proxy.control_url}/rollouts/nobody/dispatch", SYNC, key)

    assert ([404, 401, 404], "Rollout 'nobody' not found.") == (told, last["error"]["message"])


async def test_a_stop_ends_what_was_dispatched_and_says_so(store, engine, runner):
    """Nobody would record its result: it is aborted, not open for ever."""
    runner.release = asyncio.Event()
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        await proxy.post("/rollouts/r1/dispatch", SYNC)
    rollout = await stored_rollout(store, "r1")

    assert ("aborted", "aborted") == (
        rollout.status, rollout.metadata["osmosis"]["extra_fields"]["error_category"]
    )  # fmt: skip


async def test_what_was_finished_meanwhile_stays_as_it_is(proxy, runner, store):
    """People and callbacks may be quicker than the server."""
    runner.release = asyncio.Event()
    await proxy.post("/rollouts/r1/dispatch", SYNC)
    await proxy.post("/rollouts/r1/finish", {"status": "aborted"})
    runner.release.set()
    async with asyncio.timeout(TIMEOUT_S):
        while not runner.masks:
            await asyncio.sleep(0.005)

    assert "aborted" == (await stored_rollout(store, "r1")).status


async def test_the_configured_url_of_ours_is_what_servers_are_told(store, engine, runner):
    """Behind a balancer, nobody knows it but the configuration."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, osmosis={"server_url": "http://127.0.0.1:1/x/v1"}) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        await proxy.post("/rollouts/r1/dispatch", SYNC)
        async with asyncio.timeout(TIMEOUT_S):
            while not runner.requests:
                await asyncio.sleep(0.005)

    assert "http://127.0.0.1:1/x" == runner.requests[0]["server_url"]
