"""Liveness, readiness and metrics."""

from fakes import proxying


async def test_health_is_200_while_the_process_runs(proxy):
    """The state of the engines does not matter."""
    assert {"status": "ok"} == (await proxy.get("/health")).json


async def test_ready_requires_the_store(proxy, store):
    """The 503 response names the failing part."""
    ready = await proxy.get("/ready")
    store.failing.add("ping")
    unavailable = await proxy.get("/ready")

    assert (200, "ready", "ok") == (ready.status, ready.json["status"], ready.json["store"])
    assert (503, "the test took the store away") == (unavailable.status, unavailable.json["store"])


async def test_ready_requires_a_reachable_engine(store, proxy):
    async with proxying("http://127.0.0.1:9", store) as served:
        response = await proxy.http.get(served.url + "/ready")
        payload = await response.json()

    assert (503, {"fake": False}) == (response.status, payload["engines"])


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
