"""Liveness, readiness and metrics, of versions and of the store too."""

import asyncio
import re
from importlib.metadata import version

import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.recorded import load

from proxy.api import health


async def test_health_is_200_while_the_process_runs(proxy):
    """The state of the engines does not matter."""
    assert (await proxy.get("/health")).json == (await proxy.get("/healthz")).json == {"status": "ok"}


async def test_ready_requires_the_store(proxy, store):
    """The 503 response names the failing part; /readyz is the same."""
    ready = await proxy.get("/ready")
    store.failing.add("ping")
    unavailable = await proxy.get("/ready")
    assert (503, unavailable.json) == ((again := await proxy.get("/readyz")).status, again.json)

    assert (ready.status, ready.json["status"], ready.json["store"]) == (200, "ready", "ok")
    assert (unavailable.status, unavailable.json["store"]) == (503, "the test took the store away")


async def test_ready_names_the_servers_that_are_gone(proxy, store):
    """One server that responds is enough: calls of its rollouts succeed, and another replica has no other store."""
    states = {"db1:1": None, "db2:1": "it is frozen"}

    async def ping(_timeout_s):
        return states

    store._store.ping = ping
    partly = await proxy.get("/ready")
    states["db1:1"] = "it is full"
    gone = await proxy.get("/ready")

    assert (partly.status, partly.json["status"], partly.json["store"]) == (200, "ready", "it is frozen")
    assert partly.json["servers"] == {"db1:1": "ok", "db2:1": "it is frozen"}
    assert (gone.status, gone.json["store"]) == (503, "it is full; it is frozen")


@pytest.mark.parametrize(("is_strict", "status", "word"), [(False, 200, "ready"), (True, 503, "not ready")])
async def test_ready_requires_an_engine_only_with_ready_requires_engine(store, http, is_strict, status, word):
    """A load balancer keeps the replica while the only engine reloads; calls then get 503 with Retry-After."""
    engines = {"eject_after": 1, "health_interval_s": 0.01}
    sections = {"ready_requires_engine": is_strict, "engines": engines}
    async with proxying("http://127.0.0.1:9", store, **sections) as served:
        while (
            b'tokentape_engine_healthy{engine="fake"} 0.0' not in await (await http.get(f"{served.url}/metrics")).read()
        ):
            pass
        response = await http.get(served.url + "/ready")
        payload = await response.json()
        async with http.get(f"{served.url}/engines") as listed:
            (engine,) = (await listed.json())["engines"]

    assert (response.status, payload["status"], payload["engines"]) == (status, word, {"fake": False})
    assert (engine["healthy"], "unreachable" in engine["last_fault"]) == (False, True)


async def test_an_engine_behind_a_gateway_is_used_once_it_is_loaded(store, engine, http):
    """Until then its steps are text, `/ready` and a metric name it, and calls pass as to a plain server."""
    loaded = engine.fixed_responses | {"/health": {}}
    engine.fixed_responses, engine.unknown_status = {"/health": {}}, 502
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with proxying(engine.url, store) as served:

        async def step():
            async with http.post(f"{served.url}/rollouts/r/v1/chat/completions", json=body) as response:
                assert response.status == 200
                step_id = response.headers["X-Step-Id"]
            async with http.get(f"{served.url}/rollouts/r/steps/{step_id}") as response:
                kept = await response.json()
            async with http.get(f"{served.url}/ready") as ready, http.get(f"{served.url}/metrics") as metrics:
                without = (await ready.json()).get("without_token_ids")
                shown = b'tokentape_engine_token_ids{engine="fake"} 1.0' in await metrics.read()
            return kept["engine"]["kind"], kept["fidelity"]["exact"], without, shown

        engine.plays(load("chat_plain"))
        assert await step() == ("plain", False, ["fake"], False)
        engine.fixed_responses = loaded
        engine.plays(load("chat_ids_lp"))
        while (seen := await step())[0] == "plain":
            pass

    assert seen == ("vllm", True, None, True)


async def test_an_engine_that_does_not_respond_does_not_delay_ready(store, http, engine):
    """Kubernetes' probe has a timeout of its own, so a slow response would remove the replica."""
    responds = asyncio.Event()

    async def respond(request, body):
        await responds.wait()
        return web.Response()

    engine.respond = respond
    async with proxying(engine.url, store) as served, http.get(served.url + "/ready") as response:
        payload = await response.json()
        assert not responds.is_set()
        responds.set()

    assert (response.status, payload["status"], payload["engines"]) == (200, "ready", {"fake": True})


async def test_metrics_count_calls_steps_and_fidelity_problems(proxy):
    await proxy.chat("r1")
    await proxy.post("/rollouts/r1/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    text = (await proxy.get("/metrics")).text.decode()

    assert 'tokentape_calls_total{dialect="chat",engine="fake",status="200"} 1.0' in text
    assert 'tokentape_steps_total{fidelity="exact",status="complete"} 1.0' in text
    assert 'tokentape_fidelity_problems_total{code="echo"} 1.0' in text
    assert "tokentape_in_flight_calls 0.0" in text
    assert 'tokentape_store_operation_duration_seconds_count{operation="append"} 2.0' in text


async def test_errors_of_the_proxy_are_counted_by_code(proxy):
    """This holds for both APIs; errors of engines are not counted here."""
    await proxy.get("/rollouts/absent")
    await proxy.post("/rollouts", [])
    text = (await proxy.get("/metrics")).text.decode()

    assert 'tokentape_errors_total{code="not_found"} 1.0' in text
    assert 'tokentape_errors_total{code="bad_request"} 1.0' in text


async def test_metrics_have_the_start_time_and_memory_of_the_process(proxy):
    text = (await proxy.get("/metrics")).text.decode()
    payload = dict(line.split(" ") for line in text.splitlines() if line.startswith("process_"))

    assert 1 < float(payload["process_start_time_seconds"]) < 1e11
    assert float(payload["process_resident_memory_bytes"]) > 1e6


async def metric_lines(proxy, name):
    """Return the lines of a metric, as label text and value."""
    text = (await proxy.get("/metrics")).text.decode()
    return re.findall(rf"^tokentape_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)


async def test_metrics_have_the_versions_of_tokentape_and_of_the_engines(proxy):
    await proxy.chat("r1")

    assert [(f'{{version="{version("tokentape")}"}}', "1.0")] == await metric_lines(proxy, "build_info")
    assert await metric_lines(proxy, "engine_info") == [('{engine="fake",kind="vllm",version="simulator-0.1"}', "1.0")]


async def test_an_engine_that_was_never_reached_has_version_unknown(store, proxy):
    """The label is not empty, which Prometheus treats as a missing label."""
    async with (
        proxying("http://127.0.0.1:9", store) as served,
        proxy.http.get(served.url + "/metrics") as response,
    ):
        assert 'tokentape_engine_info{engine="fake",kind="auto",version="unknown"} 1.0' in await response.text()


async def test_metrics_have_the_stores_memory_and_whether_its_aof_is_written(proxy):
    """The embedded store has an append-only file and no memory limit."""
    ((_, memory),) = await metric_lines(proxy, "store_memory_bytes")

    assert float(memory) > 100_000
    ((labels, _),) = await metric_lines(proxy, "store_info")
    assert re.fullmatch(r'\{durability="acknowledged",version="valkey [\d.]+"\}', labels)
    assert await metric_lines(proxy, "store_memory_limit_bytes") == [("", "0.0")]
    assert await metric_lines(proxy, "store_aof_ok") == [("", "1.0")]


async def test_metrics_of_a_failing_or_slow_store_are_omitted(proxy, store, monkeypatch):
    """The other metrics are returned in time."""
    store.failing.add("info")
    failing = await metric_lines(proxy, "store_memory_bytes")
    store.failing.clear()
    store.waiting["info"] = asyncio.Event()
    with monkeypatch.context() as hurried:
        hurried.setattr(health, "_STORE_TIMEOUT_S", 0.05)
        slow = await metric_lines(proxy, "store_memory_bytes")
        version_meanwhile = await metric_lines(proxy, "build_info")
    store.waiting["info"].set()

    assert failing == slow == []
    assert len(version_meanwhile) == 1
    assert len(await metric_lines(proxy, "store_memory_bytes")) == 1


async def test_metrics_have_the_number_and_the_age_of_groups_in_the_queue(proxy):
    await proxy.group("g1", 1, 0)
    empty = [await metric_lines(proxy, name) for name in ("complete_groups", "claimed_groups")]
    await proxy.group("g2", 1, 0)
    await proxy.claim()
    full = [await metric_lines(proxy, name) for name in ("complete_groups", "claimed_groups")]
    ((_, age),) = await metric_lines(proxy, "oldest_complete_group_age_seconds")

    policy = '{policy="default"}'
    assert empty == [[(policy, "1.0")], [(policy, "0.0")]]
    assert full == [[(policy, "1.0")], [(policy, "1.0")]]
    assert 0 < float(age) < 60
