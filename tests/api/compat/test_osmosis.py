"""Dispatching rollouts to rollout servers, and the requests to these."""

import asyncio
import gzip

import pytest
from tests.support.recorded import load
from tests.support.rollout_servers import ADD, QUESTION, dispatching, post, rollout_server
from tests.support.stored import stored_rollout, stored_steps

from proxy.api.api_keys import read_minted
from proxy.api.compat.osmosis import RolloutServers, ServerFault
from proxy.config.sections import OsmosisSettings
from proxy.errors import UnprocessableRequest
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


async def wait_until_finished(store, rollout_id="r1"):
    """Return the rollout once it is finished."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (rollout := await stored_rollout(store, rollout_id)).is_finished:
            await asyncio.sleep(0.005)
    return rollout


async def test_a_synchronous_dispatch_sends_its_options_the_proxys_url_and_a_minted_key(proxy, runner, store):
    options = {"sampling_params": {"temperature": 0.5}, "max_turns": 3, "tokenizer_name": "t", "metadata": {"a": 1}}
    status, payload = await proxy.post("/rollouts/r1/dispatch", SYNC | options)
    rollout = await wait_until_finished(store)
    (received,) = runner.requests
    key = read_minted(received.pop("callback_api_key"))

    assert (status, payload["status"], payload["result"]) == (202, "open", None)
    assert key.rollout_id == "r1"
    assert {
        "rollout_id": "r1", "server_url": proxy.url, "messages": QUESTION, "max_tokens_total": 8192, **options
    } == received  # fmt: skip
    assert (rollout.status, rollout.metadata["osmosis"]["finish_reason"]) == ("completed", "stop")


async def test_without_wait_a_dispatch_returns_before_the_server_responds(proxy, runner, store):
    runner.release = asyncio.Event()
    status, _ = await proxy.post("/rollouts/r1/dispatch", SYNC)
    before = (await stored_rollout(store, "r1")).status
    runner.release.set()

    assert (status, before) == (202, "open")
    assert (await wait_until_finished(store)).status == "completed"


async def test_an_asynchronous_rollout_gets_its_tools_and_is_finished_by_its_callback(proxy, runner, store):
    """Its first call precedes the init response, and waits for the tools in it."""
    runner.is_slow = True
    status, _ = await proxy.post("/rollouts/r1/dispatch", ASYNC | {"completion_params": {"temperature": 1}})
    async with asyncio.timeout(TIMEOUT_S):
        await runner.over.wait()
    rollout, (step,) = await stored_rollout(store, "r1"), await stored_steps(store, "r1")
    (received,) = runner.requests

    assert status == 202
    assert received["completion_params"] == {"temperature": 1}
    assert not {"sampling_params", "callback_api_key"} & received.keys()
    assert step.sent["set"]["tools"] == [ADD]
    assert runner.responses[0]["usage"]["total_tokens"] > 0
    assert runner.over.result == (200, {"status": "ok"})
    assert (rollout.status, rollout.reward, rollout.tools) == ("completed", 0.5, (ADD,))


async def test_a_retry_of_a_call_of_a_dispatched_rollout_replays_the_response(proxy, runner, store):
    """The client's SDK retries without a key; the rollout may be finished."""
    await proxy.post("/rollouts/r1/dispatch", ASYNC)
    async with asyncio.timeout(TIMEOUT_S):
        await runner.over.wait()
    body = {"model": "default", "messages": QUESTION, "rollout_id": "r1", "logprobs": True}
    replayed = await proxy.post("/v1/chat/completions", body)

    assert (200, runner.responses[0]) == replayed
    assert len(await stored_steps(store, "r1")) == 1


@pytest.mark.parametrize(
    ("status", "response_body", "category"),
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
async def test_a_failing_rollout_server_fails_the_rollout_with_an_error_category(
    proxy, runner, store, status, response_body, category
):
    """The category is a term of the protocol."""
    runner.status, runner.response_body = status, response_body
    response, shown = await proxy.post("/rollouts/r1/dispatch", SYNC | {"wait": True})
    fields = shown["result"]["extra_fields"]

    assert (response, shown["status"], fields["error_category"]) == (200, "failed", category)
    assert (None if status == 200 else status) == fields.get("http_status")
    assert "calculator" in shown["result"]["error_message"]


async def test_an_asynchronous_server_that_rejects_the_init_fails_the_rollout(proxy, runner, store):
    """Calls are then rejected, and do not wait for tools."""
    runner.status = 503
    await proxy.post("/rollouts/r1/dispatch", ASYNC | {"wait": True})
    status, _ = await proxy.post("/v1/chat/completions", {"messages": QUESTION, "rollout_id": "r1"})

    assert ((await stored_rollout(store, "r1")).status, status) == ("failed", 409)


async def test_an_unreachable_and_a_slow_rollout_server_have_different_error_categories(store, engine, runner):
    servers = {"servers": {"unreachable": {"url": "http://127.0.0.1:1"}, "slow": {"url": runner.url}}, "timeout_s": 2}
    runner.release = asyncio.Event()
    shown = {}
    async with dispatching(engine.url, store, runner, osmosis=servers) as proxy:
        for name in ("unreachable", "slow"):
            await proxy.post("/rollouts", {"rollout_id": name})
            _, shown[name] = await proxy.post(f"/rollouts/{name}/dispatch", SYNC | {"server": name, "wait": True})

    assert {name: rollout["result"]["extra_fields"]["error_category"] for name, rollout in shown.items()} == {
        "unreachable": "network_error",
        "slow": "timeout",
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"server": "http://evil"}, "configured in osmosis.servers: calculator"),
        ({"messages": []}, "messages"),
        ({"completion_params": {}}, "completion_params does not exist in the sync protocol"),
        ({"protocol": "async", "tokenizer_name": "t"}, "tokenizer_name does not exist in the async protocol"),
        ({"max_turns": 101}, "max_turns"),
        ({"url": "http://evil"}, "url"),
    ],
)
async def test_an_invalid_dispatch_is_422_and_no_server_gets_a_request(proxy, runner, body, message):
    """Only configured servers can be named."""
    status, payload = await proxy.post("/rollouts/r1/dispatch", SYNC | body)

    assert (status, runner.requests) == (422, [])
    assert message in payload["error"]["message"]


async def test_a_rollout_is_dispatched_once(proxy, runner, store):
    """The same dispatch again is accepted and does nothing; another one, and one of a finished or unknown rollout, is
    rejected.
    """
    runner.release = asyncio.Event()
    statuses = [(await proxy.post("/rollouts/r1/dispatch", SYNC))[0] for _ in range(2)]
    statuses.append((await proxy.post("/rollouts/r1/dispatch", SYNC | {"max_turns": 2}))[0])
    runner.release.set()
    await wait_until_finished(store)
    statuses.append((await proxy.post("/rollouts/r1/dispatch", SYNC))[0])
    await proxy.post("/rollouts", {"rollout_id": "r2"})
    await proxy.post("/rollouts/r2/finish", {"status": "completed"})
    statuses += [(await proxy.post(f"/rollouts/{name}/dispatch", SYNC))[0] for name in ("r2", "absent")]

    assert statuses == [202, 202, 409, 202, 409, 404]
    assert len(runner.requests) == 1


async def test_a_rollout_shows_the_server_and_protocol_of_its_dispatch(proxy, store):
    before = (await proxy.get("/rollouts/r1"))[1]
    await proxy.post("/rollouts/r1/dispatch", SYNC)
    await wait_until_finished(store)

    assert "dispatch" not in before
    assert (await proxy.get("/rollouts/r1"))[1]["dispatch"] == {
        "server": "calculator",
        "protocol": "sync",
        "state": "started",
    }


async def test_a_dispatch_requires_a_control_key_on_the_control_apis_port(store, engine, runner):
    control = {"api_keys": ["boss"], "listen": "127.0.0.1:0"}
    key = {"Authorization": "Bearer boss"}
    async with dispatching(engine.url, store, runner, control=control) as proxy:
        statuses = [
            (await post(proxy.http, f"{url}/rollouts/absent/dispatch", SYNC, headers))[0]
            for url, headers in ((proxy.url, key), (proxy.control_url, {}), (proxy.control_url, key))
        ]
        _, last = await post(proxy.http, f"{proxy.control_url}/rollouts/absent/dispatch", SYNC, key)

    assert (statuses, last["error"]["message"]) == ([404, 401, 404], "Rollout 'absent' not found.")


async def test_the_shutdown_aborts_dispatched_rollouts(store, engine, runner):
    """Their results could not be recorded later."""
    runner.release = asyncio.Event()
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        await proxy.post("/rollouts/r1/dispatch", SYNC)
    rollout = await stored_rollout(store, "r1")

    assert (
        rollout.status, rollout.metadata["osmosis"]["extra_fields"]["error_category"]
    ) == ("aborted", "aborted")  # fmt: skip


async def test_a_dispatch_response_does_not_change_a_finished_rollout(proxy, runner, store):
    runner.release = asyncio.Event()
    await proxy.post("/rollouts/r1/dispatch", SYNC)
    await proxy.post("/rollouts/r1/finish", {"status": "aborted"})
    runner.release.set()
    async with asyncio.timeout(TIMEOUT_S):
        while not runner.masks:
            await asyncio.sleep(0.005)

    assert (await stored_rollout(store, "r1")).status == "aborted"


async def test_osmosis_server_url_is_sent_to_rollout_servers(store, engine, runner):
    """It is needed behind a load balancer."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, osmosis={"server_url": "http://127.0.0.1:1/x/v1"}) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        await proxy.post("/rollouts/r1/dispatch", SYNC)
        async with asyncio.timeout(TIMEOUT_S):
            while not runner.requests:
                await asyncio.sleep(0.005)

    assert runner.requests[0]["server_url"] == "http://127.0.0.1:1/x"


@pytest.fixture
async def servers(runner):
    named = {"one": {"url": runner.url, "api_key": "secret"}, "two": {"url": runner.url}}
    servers = RolloutServers(OsmosisSettings.model_validate({"servers": named}))
    yield servers
    await servers.close()


@pytest.mark.parametrize(("name", "key"), [("one", "Bearer secret"), ("two", None)])
async def test_a_request_has_the_key_of_its_server_if_one_is_configured(servers, runner, name, key):
    runner.response_body = {"rollout_id": "r1"}

    assert await servers.post(name, "/rollout", {"a": 1}) == {"rollout_id": "r1"}
    assert (runner.headers[0].get("authorization"), runner.requests[0]) == (key, {"a": 1})


@pytest.mark.parametrize(
    ("status", "response_body", "category"),
    [
        (429, {}, "rate_limited"),
        (503, {}, "internal_error"),
        (404, {}, "validation_error"),
        (200, [], "internal_error"),
    ],
)
async def test_an_error_response_has_an_error_category_and_its_status(servers, runner, status, response_body, category):
    """A response with status 200 that is not an object has no status."""
    runner.status, runner.response_body = status, response_body
    with pytest.raises(ServerFault) as fault:
        await servers.post("one", "/rollout", {})

    assert (fault.value.category, fault.value.status) == (category, None if status == 200 else status)


async def test_a_response_that_is_not_json_is_an_internal_error(servers, runner):
    """A load balancer may return HTML."""
    runner.raw = b"<html>"
    with pytest.raises(ServerFault, match="did not return a JSON object") as fault:
        await servers.post("one", "/rollout", {})

    assert fault.value.category == "internal_error"


async def test_an_unknown_server_name_is_rejected_with_the_configured_names(servers):
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: one, two"):
        servers.named("http://elsewhere")
    without_servers = RolloutServers(OsmosisSettings())
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: none"):
        without_servers.named("one")
    await without_servers.close()

    assert (
        repr(servers),
        repr(without_servers),
    ) == ("<RolloutServers one, two; 0 requests>", "<RolloutServers none; 0 requests>")


async def test_close_cancels_waiting_dispatches(servers):
    never = asyncio.Event()

    async def wait():
        await never.wait()

    task = servers.start(wait())
    await asyncio.sleep(0)
    await servers.close()

    assert task.cancelled()


@pytest.mark.parametrize("raw", [b" " * (2**23 + 1), b"[" + b"{}," * 500_000 + b"1]"])
async def test_a_response_is_limited_in_bytes_and_values(servers, runner, raw):
    """It is no JSON object if it has too many values."""
    runner.raw = raw
    with pytest.raises(ServerFault, match="more than 8388608 bytes|not return a JSON object") as fault:
        await servers.post("one", "/rollout", {})

    assert fault.value.category == "internal_error"


async def test_no_compressed_response_is_requested_or_decompressed(servers, runner):
    runner.raw = gzip.compress(b"{}")
    with pytest.raises(ServerFault, match="not return a JSON object"):
        await servers.post("one", "/rollout", {})

    assert runner.headers[0]["accept-encoding"] == "identity"
