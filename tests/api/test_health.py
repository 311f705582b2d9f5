"""The system: alive, ready, its metrics."""

from fakes import proxying


async def test_a_live_process_is_healthy(proxy):
    """Whatever its engines do."""
    assert {"status": "ok"} == (await proxy.get("/health")).json


async def test_ready_means_store_and_an_engine(proxy, store):
    """503 names which is missing."""
    ready = await proxy.get("/ready")
    store.failing.add("ping")
    away = await proxy.get("/ready")

    assert (200, "ready", "ok") == (ready.status, ready.json["status"], ready.json["store"])
    assert (503, "the test took the store away") == (away.status, away.json["store"])


async def test_without_an_engine_it_is_not_ready(store, proxy):
    """An engine that cannot be reached is not there."""
    async with proxying("http://127.0.0.1:9", store) as served:
        response = await proxy.http.get(served.url + "/ready")
        told = await response.json()

    assert (503, {"fake": False}) == (response.status, told["engines"])


async def test_metrics_count_calls_tokens_and_steps(proxy):
    """As Prometheus reads them."""
    await proxy.chat("r1")
    await proxy.post("/rollouts/r1/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    text = (await proxy.get("/metrics")).text.decode()

    assert 'tokentape_calls_total{dialect="chat",engine="fake",status="200"} 1.0' in text
    assert 'tokentape_steps_total{fidelity="exact",status="complete"} 1.0' in text
    assert 'tokentape_fidelity_problems_total{code="echo"} 1.0' in text
    assert "tokentape_in_flight_calls 0.0" in text
    assert 'tokentape_store_operation_duration_seconds_count{operation="append"} 2.0' in text


async def test_errors_of_ours_are_counted_by_code(proxy):
    """On either API; what an engine answers is not ours."""
    await proxy.get("/rollouts/nobody")
    await proxy.post("/rollouts", [])
    text = (await proxy.get("/metrics")).text.decode()

    assert 'tokentape_errors_total{code="not_found"} 1.0' in text
    assert 'tokentape_errors_total{code="bad_request"} 1.0' in text


async def test_the_process_tells_of_itself(proxy):
    """When it started, and what it takes."""
    text = (await proxy.get("/metrics")).text.decode()
    told = dict(line.split(" ") for line in text.splitlines() if line.startswith("process_"))

    assert 1 < float(told["process_start_time_seconds"]) < 1e11
    assert float(told["process_resident_memory_bytes"]) > 1e6
