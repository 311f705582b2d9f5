"""What an engine is found to be, and what it was started without."""

import ssl
from email.utils import formatdate

import pytest
from aiohttp import web
from fakes import settings_for
from findings import all_findings, engine_findings, graded
from recorded import load

from proxy.clock import SystemClock
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.server import make_engine


def playing(engine, answers: dict[str, str], **headers: str) -> None:
    """Have an engine answer each path with a recorded answer; any other with a 404."""

    async def respond(request, body):
        cassette = load(answers.get(request.path, "err_404"))
        sent = {"Content-Type": cassette.content_type, **headers}
        return web.Response(status=cassette.status, body=cassette.response, headers=sent)

    engine.respond = respond


IDS = {"/v1/models": "get_v1_models", "/v1/completions": "cmpl_ids_lp1", "/inference/v1/generate": "scale_out/generate"}


async def test_all_is_well_with_a_store_and_an_engine_that_gives_ids(tmp_path):
    """A finding for each, and nothing to fix."""
    async with simulating("127.0.0.1:0", Options()) as engine:
        found = await all_findings(settings_for(engine, store={"url": f"embedded:{tmp_path / 'store'}"}))

    assert {"ok"} == {finding.grade for finding in found}
    assert {""} == {finding.fix for finding in found}
    assert "'simulated' returns token IDs and logprobs" in found[-1].seen


async def test_no_engine_is_no_fault(tmp_path):
    """serve starts the simulator then."""
    found = await all_findings(settings_for(None, store={"url": f"embedded:{tmp_path / 'store'}"}))

    assert "simulator" in found[-1].seen
    assert "ok" == found[-1].grade


@pytest.mark.parametrize(
    ("models", "response", "seen", "fix"),
    [
        ("get_v1_models", "cmpl_plain", "returns no token IDs", "return_token_ids"),
        ("get_v1_models", "err_badmodel", "returned 404", "curl"),
        ("err_404", "cmpl_plain", "lists no models", "base URL"),
    ],
)
async def test_an_engine_that_is_no_use_is_told_apart(engine, models, response, seen, fix):
    """Too old to give ids, refusing, or no engine at all."""
    playing(engine, {**IDS, "/v1/models": models, "/v1/completions": response})
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert seen in fault
    assert fix in fault


async def test_an_engine_that_gives_ids_without_logprobs_is_a_fault(engine):
    """What a trainer needs beside ids is said, and what to set where it does not."""
    playing(engine, {**IDS, "/v1/completions": "cmpl_ids"})
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert "returns token IDs but no logprobs" in fault
    assert "record.logprobs: off" in fault


async def test_what_vllm_was_started_without_is_a_note(engine):
    """Fewer logprobs than agents may ask for, and no tokens in, tokens out; it is of use all the same."""

    async def respond(request, body):
        name = IDS.get(request.path)
        if body.get("logprobs") == 20:
            name = "err_toplp"
        if request.path == "/inference/v1/generate":
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        cassette = load(name)
        return web.Response(status=cassette.status, body=cassette.response, content_type="application/json")

    engine.respond = respond
    told = graded(await engine_findings(engine.url))

    assert 1 == len(told["ok"])
    assert [] == told["fault"]
    assert ["--max-logprobs", "--enable-scale-out"] == [
        flag for note in told["note"] for flag in ("--max-logprobs", "--enable-scale-out") if flag in note
    ]


async def test_an_engine_that_no_engine_file_knows_is_a_note(engine):
    """Answered with text alone, nothing can be trained."""
    engine.fixed_responses = {}

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})

    engine.respond = respond
    (note,) = graded(await engine_findings(engine.url))["note"]

    assert "unknown engine type" in note


async def test_a_key_that_the_engine_wants_is_asked_for(engine):
    """401 is no wrong address."""

    async def respond(request, body):
        return web.json_response({"error": "Unauthorized"}, status=401)

    engine.respond = respond
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert "requires an API key (401)" in fault
    assert "api_key" in fault


async def test_an_engine_whose_clock_is_off_is_a_note(engine):
    """Its Date header says what time it thinks it is."""
    hour_ago = formatdate(SystemClock().now() - 3600, usegmt=True)
    playing(engine, IDS, Date=hour_ago)
    notes = graded(await engine_findings(engine.url))["note"]

    assert any("s behind ours" in note and "NTP" in note for note in notes)


async def test_a_certificate_that_nobody_here_trusts_is_told(certificate):
    """https to an engine with a certificate of its own: the setting that names its authority is told."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    runner = web.AppRunner(make_engine(Options()), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        (fault,) = graded(await engine_findings(f"https://127.0.0.1:{runner.addresses[0][1]}"))["fault"]
    finally:
        await runner.cleanup()

    assert "certificate" in fault.lower()
    assert "engines.ca_file" in fault
