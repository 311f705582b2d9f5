"""The system: alive, ready, its engines, its metrics."""

from fakes import fake_engine, proxying


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
        answer = await proxy.http.get(served.url + "/ready")
        told = await answer.json()

    assert (503, {"fake": False}) == (answer.status, told["engines"])


async def test_engines_are_shown_with_version_and_faults(store, proxy):
    """What an operator wants to know first; keys are not shown."""
    async with fake_engine() as engine, proxying(engine.url, store) as served:
        answer = await proxy.http.get(served.url + "/engines")
        (shown,) = (await answer.json())["engines"]

    assert ("fake", engine.url, "vllm", "0.32.0", True, 0) == tuple(
        shown[name] for name in ("name", "url", "kind", "version", "healthy", "faults")
    )
    assert "api_key" not in shown
    assert {"chat": "live", "completions": "live"} == shown["streams"]
    assert any("include_reasoning" in loss for loss in shown["loses"])


async def test_metrics_count_calls_tokens_and_steps(proxy):
    """As Prometheus reads them."""
    await proxy.chat("r1")
    await proxy.post("/rollouts/r1/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    text = (await proxy.get("/metrics")).text.decode()

    assert 'tokentape_calls_total{dialect="chat",engine="fake",status="200"} 1.0' in text
    assert 'tokentape_steps_total{fidelity="exact",status="complete"} 1.0' in text
    assert 'tokentape_fidelity_problems_total{code="echo"} 1.0' in text
    assert "tokentape_calls_in_flight 0.0" in text
    assert 'tokentape_store_seconds_count{verb="append"} 2.0' in text
