"""The balancer of compose.yaml: HAProxy with deploy/haproxy/haproxy.cfg, two replicas and one Valkey."""

import asyncio
import io
import re
import signal
import subprocess
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.support.commands import started
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps

from .balancing import CONFIGURATION, balancing, naming, own_addresses
from .environment import program

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**BODY, "stream": True}
WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
EVENTS = [event + b"\n\n" for event in STREAM.response.split(b"\n\n")[:-1]]


class Setup:
    """Two replicas behind their names, and the balancers of the model API and the control API."""

    def __init__(self, tmp_path, words):
        self.address, *self.replicas = own_addresses(3)
        self._folder, self._words = tmp_path, words

    def start(self, replica):
        """Start a replica at its address, with the ports of the image."""
        config = self._folder / f"{replica}.yaml"
        agents_url = f"http://{self.address}:8400"
        config.write_text(
            f"listen: {replica}:8400\ncontrol: {{listen: '{replica}:8401'}}\nagents: {{url: '{agents_url}'}}\n"
        )
        return started(*self._words, "--config", str(config))


@pytest.fixture
async def setup(engine, server, store, http, tmp_path, monkeypatch):
    """Everything started, with both balancers forwarding."""
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", store._store.layout.prefix)
    monkeypatch.setenv(
        "TOKENTAPE_LOG__LEVEL", "warning"
    )  # this log is not read, and a full pipe would block the process
    monkeypatch.setenv("TOKENTAPE_READY_REQUIRES_ENGINE", "true")
    monkeypatch.setenv("TOKENTAPE_SHUTDOWN_DELAY_S", "5")
    monkeypatch.setenv("TOKENTAPE_DRAIN_TIMEOUT_S", "20")
    setup = Setup(tmp_path, ("serve", "--store", f"unix:{server.socket}", "--engine", engine.url))
    async with AsyncExitStack() as stack:
        names, where = await stack.enter_async_context(naming())
        starts = [asyncio.to_thread(stack.enter_context, setup.start(address)) for address in setup.replicas]
        setup.processes = {url: process for process, url, _ in await asyncio.gather(*starts)}
        names.addresses = setup.replicas
        setup.models = await stack.enter_async_context(balancing(setup.address, 8400, where, http))
        setup.control = await stack.enter_async_context(balancing(setup.address, 8401, where, http))
        yield setup


def hold_streams(engine):
    """Have the engine stream three events, and the rest once the given event is set."""
    go_on = asyncio.Event()

    async def respond(request, body):
        response = web.StreamResponse(headers={"Content-Type": STREAM.content_type})
        await response.prepare(request)
        await response.write(b"".join(EVENTS[:3]))
        await go_on.wait()
        await response.write(b"".join(EVENTS[3:]))
        return response

    engine.respond = respond
    return go_on


async def metric(http, replica, name):
    """Return the sum of a metric of a replica."""
    async with http.get(f"http://{replica}:8401/metrics") as response:
        samples = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await response.text(), re.MULTILINE)
    return sum(map(float, samples))


async def in_flight(http, setup):
    """Return the calls in flight at each replica."""
    return [await metric(http, replica, "tokentape_in_flight_calls") for replica in setup.replicas]


def test_the_configuration_is_valid(monkeypatch):
    """HAProxy reports no warning."""
    monkeypatch.setenv("API_PORT", "8400")
    done = subprocess.run(
        [program("haproxy"), "-c", "-f", str(CONFIGURATION)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


async def test_a_stream_is_forwarded_without_buffering(setup, engine, store, http):
    """The agent receives the first token before the engine sends the next; then the rest is forwarded and stored."""
    go_on = hold_streams(engine)
    async with http.post(f"{setup.models}/rollouts/r1{CHAT}", json=STREAMED) as response:
        first = await response.content.readuntil(b"\n\n")
        go_on.set()
        rest = await response.read()
    (step,) = await stored_steps(store, "r1")

    assert b'"role":"assistant"' in first
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (step.status, step.exact) == ("complete", True)


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["unstreamed", "streamed"])
async def test_a_client_disconnect_ends_the_call_at_the_engine(setup, engine, store, http, body):
    """Before the response starts, and in the middle of a stream: the engine stops sampling."""
    if body is STREAMED:
        engine.streams(EVENTS[:3], then="hang")
        response = await http.post(f"{setup.models}/rollouts/r1{CHAT}", json=body)
        await response.content.readuntil(b"\n\n")
        response.close()
    else:
        engine.hangs()
        calling = asyncio.create_task(http.post(f"{setup.models}/rollouts/r1{CHAT}", json=body))
        await engine.reached.wait()
        calling.cancel()
    await asyncio.wait_for(engine.aborted.wait(), 50)
    (step,) = await wait_for_steps(store, "r1")

    assert step.reason == "the client disconnected"


async def test_calls_go_to_the_replica_with_the_fewest(setup, engine, http):
    """Ten concurrent calls of one client are five at each replica, also on connections that are already open."""
    engine.plays(WHOLE)
    for _ in range(3):
        await (await http.post(f"{setup.models}{CHAT}", json=BODY)).read()
    go_on = hold_streams(engine)
    responses = await asyncio.gather(*(http.post(f"{setup.models}{CHAT}", json=STREAMED) for _ in range(10)))
    found = await in_flight(http, setup)
    go_on.set()
    ends = [await response.read() for response in responses]

    assert found == [5, 5]
    assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)


async def test_a_long_prompt_is_forwarded(setup, engine, store, http):
    """A prompt of 16 MB passes: no part of the path has a smaller limit."""
    engine.plays(WHOLE)
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 2**24}]}
    text, kind = io.BytesIO(orjson.dumps(body)), {"Content-Type": "application/json"}
    async with http.post(f"{setup.models}/rollouts/r1{CHAT}", data=text, headers=kind) as response:
        status = response.status

    assert status == 200
    assert body["messages"] == engine.requests[-1]["messages"]


async def test_no_call_fails_when_a_replica_stops_under_load(setup, engine, store, http):
    """Its calls in flight complete and it exits with 0; new calls go to the other one while its port is still open."""
    go_on = hold_streams(engine)
    held = [await http.post(f"{setup.models}/rollouts/held{n}{CHAT}", json=STREAMED) for n in range(2)]
    engine.plays(WHOLE)
    counts, is_over = Counter(), False

    async def agent(number):
        while not is_over:
            async with http.post(f"{setup.models}/rollouts/r{number}{CHAT}", json=BODY) as response:
                await response.read()
                counts[response.status] += 1

    async def until_calls(count):
        target = counts.total() + count
        while counts.total() < target:
            await asyncio.sleep(0.01)

    async def calls_after(count):
        """Return how many of the next calls the first replica answers."""
        before = await metric(http, setup.replicas[0], "tokentape_calls_total")
        await until_calls(count)
        return await metric(http, setup.replicas[0], "tokentape_calls_total") - before

    agents = [asyncio.create_task(agent(number)) for number in range(8)]
    await until_calls(50)
    process = setup.processes[f"http://{setup.replicas[0]}:8400"]
    process.send_signal(signal.SIGTERM)
    while await calls_after(30):
        pass
    assert (await http.get(f"http://{setup.replicas[0]}:8400/")).status == 404  # the port is still open
    with pytest.raises(aiohttp.ClientConnectionError):  # connection refused, or closed while idle
        while (await http.get(f"http://{setup.replicas[0]}:8400/")).status:
            await until_calls(10)
    await until_calls(50)
    go_on.set()
    ends = [await response.read() for response in held]
    code = await asyncio.to_thread(process.wait, 20)
    with setup.start(setup.replicas[0]):  # and the request is sent again
        async with asyncio.timeout(60):
            while not (await in_flight(http, setup))[0]:
                await until_calls(1)
        is_over = True
        await asyncio.gather(*agents)

    assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
    assert code == 0
    assert {200: counts.total()} == counts
    assert counts.total() == sum([len(await stored_steps(store, f"r{number}")) for number in range(8)])


async def test_a_replica_reports_that_the_engine_is_unreachable(setup, engine, http):
    """Replicas that are not ready still answer, with a reason, instead of the balancer's own error page."""

    async def respond(request, body):
        request.transport.abort()

    engine.respond, engine.fixed_responses, engine.unknown_status = respond, {}, 503
    async with asyncio.timeout(60):
        while (await http.get(f"{setup.control}/ready")).status != 503:
            await asyncio.sleep(0.1)
    responses = []
    for _ in range(20):  # two seconds, in which the balancer checks each replica four times
        async with http.post(f"{setup.models}{CHAT}", json=BODY) as response:
            responses.append((response.status, (await response.json())["error"]["type"]))
        await asyncio.sleep(0.1)

    assert responses == [(502, "upstream_error")] * 20


async def test_without_replicas_agents_get_503_with_retry_after(setup):
    """OpenAI's clients can read the balancer's own error, wait, and retry."""
    for process in setup.processes.values():
        process.kill()
        process.wait()
    async with aiohttp.ClientSession() as agent, agent.post(f"{setup.models}{CHAT}", json=BODY) as response:
        body = await response.json()

    assert (response.status, response.headers["Retry-After"]) == (503, "2")
    assert body["error"]["type"] == "no_replica"


async def test_the_model_api_and_the_control_api_stay_separate(setup, http):
    """Each balancer forwards only its own API; a rollout that is opened on the one has the URL of the other."""
    async with http.post(f"{setup.control}/rollouts", json={"rollout_id": "r1"}) as response:
        opened = await response.json()
    async with http.get(f"{setup.models}/rollouts/r1") as response:
        at_models = response.status
    async with http.post(f"{setup.control}{CHAT}", json=BODY) as response:
        at_control = response.status

    assert f"{setup.models}/rollouts/r1/v1" == opened["base_url"]
    assert (at_models, at_control) == (404, 404)
