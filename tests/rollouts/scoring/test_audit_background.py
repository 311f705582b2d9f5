"""The background audit of a share of the steps."""

import asyncio
import re
from array import array

import pytest
from tests.support.fakes import proxying
from tests.support.forests import make_choice, make_step

from proxy.rollouts.scoring.audit import is_scorable
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.trajectory.step import EngineFacts

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


async def metric(http, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as response:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
    return float(found[0]) if found else 0.0


@pytest.mark.parametrize(("rate", "audited"), [(1, True), (0, False)])
async def test_the_configured_share_of_steps_is_audited(store, http, rate, audited):
    async with (
        simulating("127.0.0.1:0", Options(seed=1)) as engine,
        proxying(engine, store, audit={"sample_rate": rate}) as served,
    ):
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
            assert 200 == response.status
            sampled = (await response.json())["usage"]["completion_tokens"]
        if not audited:
            assert 0 == await metric(http, served.url, 'tokentape_audits_total{engine="fake",verdict="aligned"}')
            return
        async with asyncio.timeout(50):
            while sampled != await metric(http, served.url, 'tokentape_audit_logprob_difference_count{engine="fake"}'):
                await asyncio.sleep(0.01)
        assert 1 == await metric(http, served.url, 'tokentape_audits_total{engine="fake",verdict="aligned"}')
        low = await metric(http, served.url, 'tokentape_audit_logprob_difference_bucket{engine="fake",le="0.001"}')
        assert sampled == low


async def test_audits_delay_neither_calls_nor_the_shutdown(engine, store, http):
    """The engine does not respond to the scoring request."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as real:

        async def respond(request, body):
            if request.path == "/v1/models" or "prompt_logprobs" in body:
                await asyncio.Event().wait()
            from aiohttp import ClientSession, web

            async with ClientSession() as session, session.post(real + request.path, json=body) as response:
                return web.Response(body=await response.read(), content_type="application/json")

        engine.respond = respond
        async with asyncio.timeout(50), proxying(engine.url, store, audit={"sample_rate": 1}) as served:
            for _ in range(5):
                async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                    assert 200 == response.status


async def test_a_failed_audit_is_counted_and_the_next_step_is_audited(engine, store, http):
    async with simulating("127.0.0.1:0", Options(seed=1)) as real:

        async def respond(request, body):
            from aiohttp import ClientSession, web

            if "prompt_logprobs" in body or request.path == "/v1/models":
                return web.json_response({"error": "no"}, status=500)
            async with ClientSession() as session, session.post(real + request.path, json=body) as response:
                return web.Response(body=await response.read(), content_type="application/json")

        engine.respond = respond
        async with proxying(engine.url, store, audit={"sample_rate": 1}) as served:
            for count in (1, 2):
                async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                    assert 200 == response.status
                async with asyncio.timeout(50):
                    name = 'tokentape_audits_total{engine="fake",verdict="not scored"}'
                    while count != await metric(http, served.url, name):
                        await asyncio.sleep(0.01)


def test_a_step_is_scorable_if_its_logprobs_can_be_computed_again():
    """It has to be exact, complete and unconstrained, with raw logprobs or temperature 1, of an engine with scoring."""
    honest = make_step("S1", (1, 2), (3, 4))
    after = {"temperature": 0.7, "logprobs_mode": "after_temperature_logprobs"}

    assert is_scorable(honest)
    assert is_scorable(make_step("S1", (1, 2), (3, 4), sampling={**after, "temperature": 1}))
    assert is_scorable(make_step("S1", (1, 2), (3, 4), request={"tool_choice": "auto", "tools": []}))
    assert not is_scorable(make_step("S1", (1, 2), (3, 4), sampling=after))
    assert not is_scorable(
        make_step("S1", (1, 2), make_choice(0, (3, 4), logprobs=array("f")))
    )  # logprobs were not requested
    assert is_scorable(make_step("S1", (1, 2), (3, 4), sampling={"constrained": False}))
    assert not is_scorable(make_step("S1", (1, 2), (3, 4), extra={"images": {"ids": ["0f" * 16], "token": None}}))
    for changes in (
        {"sampling": {"constrained": True}},
        {"problems": ("no_token_ids",)},
        {"status": "partial"},
        {"engine": EngineFacts("e", "llamacpp", None, "http://e")},
    ):
        assert not is_scorable(make_step("S1", (1, 2), make_choice(0, (3, 4)), **changes))
