"""Checks of engines: detection, token ids, logprobs, options, clocks, models, tokenizers and scorers."""

from email.utils import formatdate

import pytest
from aiohttp import web
from tests.support.fakes import settings_for
from tests.support.findings import all_findings, engine_findings, graded
from tests.support.listening import listening
from tests.support.recorded import load
from tests.support.rescored import Teacher

from proxy.cli.check import check_aliases, check_clock, check_tokenizer, read_date
from proxy.clock import SystemClock
from proxy.config import settings as config
from proxy.config.engines import EndpointSettings
from proxy.errors import UnprocessableRequest
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.server import make_engine


def play_by_path(engine, cassettes: dict[str, str], **headers: str) -> None:
    """Let an engine respond to each path with a cassette, otherwise with 404."""

    async def respond(request, body):
        cassette = load(cassettes.get(request.path, "err_404"))
        sent = {"Content-Type": cassette.content_type, **headers}
        return web.Response(status=cassette.status, body=cassette.response, headers=sent)

    engine.respond = respond


IDS = {"/v1/models": "get_v1_models", "/v1/completions": "cmpl_ids_lp1", "/inference/v1/generate": "scale_out/generate"}


async def test_a_store_and_an_engine_with_token_ids_are_ok(tmp_path):
    async with simulating("127.0.0.1:0", Options()) as engine:
        found = await all_findings(settings_for(engine, store={"url": f"embedded:{tmp_path / 'store'}"}))

    assert {finding.grade for finding in found} == {"ok"}
    assert {finding.fix for finding in found} == {""}
    assert "'simulated' returns token IDs and logprobs" in found[-1].seen


async def test_no_engine_is_ok(tmp_path):
    """`serve` starts the simulator then."""
    found = await all_findings(settings_for(None, store={"url": f"embedded:{tmp_path / 'store'}"}))

    assert "simulator" in found[-1].seen
    assert found[-1].grade == "ok"


@pytest.mark.parametrize(
    ("models", "response", "seen", "fix"),
    [
        ("get_v1_models", "cmpl_plain", "returns no token IDs", "return_token_ids"),
        ("get_v1_models", "err_badmodel", "returned 404", "curl"),
        ("err_404", "cmpl_plain", "lists no models", "base URL"),
    ],
)
async def test_an_unusable_engine_is_a_fault_with_a_specific_fix(engine, models, response, seen, fix):
    """It returns no ids, returns an error, or is not an engine."""
    play_by_path(engine, {**IDS, "/v1/models": models, "/v1/completions": response})
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert seen in fault
    assert fix in fault


async def test_an_engine_that_only_chats_is_checked_by_a_chat(engine):
    """With token IDs it is ok; the finding has the status of completions."""
    play_by_path(engine, {**IDS, "/v1/completions": "err_404", "/v1/chat/completions": "chat_ids_lp"})
    found = graded(await engine_findings(engine.url))

    assert found["fault"] == []
    assert any("returns token IDs and logprobs (chat only: a completion returned 404)" in line for line in found["ok"])


@pytest.mark.parametrize("completions", ["cmpl_plain", "err_404"])
async def test_a_fault_reports_that_no_engine_returns_token_ids(engine, tmp_path, completions):
    """Each engine of an unknown type is a note, also if it only chats; beside one with token IDs there is no fault."""
    plays = {"/v1/completions": completions, "/v1/chat/completions": "chat_plain"}

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        cassette = load(plays.get(request.path, "err_404"))
        return web.Response(status=cassette.status, body=cassette.response, content_type=cassette.content_type)

    engine.fixed_responses, engine.respond = {}, respond
    store = {"url": f"embedded:{tmp_path / 'store'}"}
    alone = graded(await all_findings(settings_for(engine.url, store=store)))
    async with simulating("127.0.0.1:0", Options()) as other:
        both = {"endpoints": [{"url": engine.url}, {"url": other}]}
        beside = graded(await all_findings(settings_for(None, engines=both, store=store)))

    (fault,) = alone["fault"]
    assert fault.startswith("training: no engine returns token IDs")
    assert [any("text without token IDs" in note for note in found["note"]) for found in (alone, beside)] == [
        True,
        True,
    ]
    assert beside["fault"] == []


async def test_an_engine_with_ids_and_without_logprobs_is_a_fault(engine):
    """The fix names the setting for training without logprobs."""
    play_by_path(engine, {**IDS, "/v1/completions": "cmpl_ids"})
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert "returns token IDs but no logprobs" in fault
    assert "record.logprobs: off" in fault


async def test_missing_options_of_vllm_are_notes(engine):
    async def respond(request, body):
        name = IDS.get(request.path)
        if body.get("logprobs") == 20:
            name = "err_toplp"
        if request.path == "/inference/v1/generate":
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        cassette = load(name)
        return web.Response(status=cassette.status, body=cassette.response, content_type="application/json")

    engine.respond = respond
    findings = graded(await engine_findings(engine.url))

    assert len(findings["ok"]) == 1
    assert findings["fault"] == []
    assert [flag for note in findings["note"] for flag in ("--max-logprobs", "--enable-scale-out") if flag in note] == [
        "--max-logprobs",
        "--enable-scale-out",
    ]


RATIOS = [
    ({}, {}, {}, []),
    ({}, {"temperature": 0.6, "top_k": 20}, {}, ["temperature 0.6", "top_k 20"]),
    ({}, {"temperature": 0.6}, {"sampling": {"override": {"temperature": 1}}}, []),
    ({}, {}, {"sampling": {"default": {"temperature": 0.6}}}, ["temperature 0.6"]),
    ({"logprobs_mode": "processed_logprobs"}, {"temperature": 0.6}, {}, []),
    ({}, {"temperature": 0.6}, {"record": {"logprobs": "off"}}, []),
]


@pytest.mark.parametrize(("endpoint", "defaults", "sections", "seen"), RATIOS)
async def test_defaults_with_which_importance_ratios_are_wrong_are_notes(endpoint, defaults, sections, seen):
    """Those of the configuration and, where they are known, of the engine."""
    async with simulating("127.0.0.1:0", Options()) as engine:
        endpoints = [{"url": engine, "sampling_defaults": defaults, **endpoint}]
        notes = graded(await engine_findings(engine, engines={"endpoints": endpoints}, **sections))["note"]

    assert seen == [words for note in notes for words in seen if f"{words}," in note]
    assert len(seen) == len(notes)


@pytest.mark.parametrize(("kind", "top_k", "count"), [("sglang", 20, 0), ("sglang", None, 1), ("vllm", 20, 1)])
async def test_sampling_masks_of_sglang_need_a_top_k(kind, top_k, count):
    async with simulating("127.0.0.1:0", Options(shape=kind)) as engine:
        defaults = {"top_p": 0.9} | ({} if top_k is None else {"top_k": top_k})
        endpoints = [{"url": engine, "sampling_defaults": defaults}]
        sections = {"engines": {"endpoints": endpoints}, "record": {"sampling_masks": True}}
        notes = graded(await engine_findings(engine, **sections))["note"]

    assert count == len(notes)


async def test_an_unknown_engine_type_is_a_note(engine):
    engine.fixed_responses = {}

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        return web.json_response({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})

    engine.respond = respond
    (note,) = graded(await engine_findings(engine.url))["note"]

    assert "unknown engine type" in note


async def test_an_engine_that_requires_an_api_key_is_a_fault(engine):
    async def respond(request, body):
        return web.json_response({"error": "Unauthorized"}, status=401)

    engine.respond = respond
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert "requires an API key (401)" in fault
    assert "api_key" in fault


async def test_an_engine_with_a_wrong_clock_is_a_note(engine):
    """The clock is read from the Date header."""
    hour_ago = formatdate(SystemClock().now() - 3600, usegmt=True)
    play_by_path(engine, IDS, Date=hour_ago)
    notes = graded(await engine_findings(engine.url))["note"]

    assert any("s behind ours" in note and "NTP" in note for note in notes)


async def test_an_untrusted_certificate_is_a_fault_that_names_engines_ca_file(certificate):
    async with listening(make_engine(Options()), certificate) as url:
        (fault,) = graded(await engine_findings(url))["fault"]

    assert "certificate" in fault.lower()
    assert "engines.ca_file" in fault


def test_a_clock_difference_is_a_note_with_its_size():
    """Differences within a round trip and a second are ignored."""
    assert list(check_clock("x", 1000.0, 1003.0)) == []
    (behind,) = check_clock("x", 1000.0, 1060.0)
    (ahead,) = check_clock("x", 1060.0, 1000.0)

    assert "60 s behind ours" in behind.seen
    assert "60 s ahead of ours" in ahead.seen
    assert ahead.grade == "note"


def test_an_invalid_date_header_is_none():
    assert read_date("Sun, 06 Nov 1994 08:49:37 GMT") == 784111777.0
    assert None is read_date("yesterday")
    assert None is read_date(None)


async def test_an_alias_of_a_missing_model_is_a_fault_with_the_listed_models(tmp_path):
    aliases = {"gpt-4o": "simulated", "policy": "polcy"}
    async with simulating("127.0.0.1:0", Options()) as url:
        found = await all_findings(settings_for(url, models=aliases, store={"url": f"embedded:{tmp_path / 'store'}"}))

    (fault,) = graded(found)["fault"]
    assert (
        "models 'policy': refers to 'polcy', which no engine lists -> use a model that the engines list (simulated)"
        in fault
    )
    assert "models 'gpt-4o': refers to 'simulated'" in graded(found)["ok"][-1]


def test_an_alias_that_some_engines_do_not_list_is_a_note():
    """Calls go to any of them."""
    (note,) = graded(list(check_aliases({"*": "m"}, {"a": ["m"], "b": ["x"]})))["note"]

    assert "which b does not list" in note


def test_aliases_are_not_checked_without_lists_of_models():
    """An unreachable engine is another finding."""
    assert list(check_aliases({"*": "m"}, {})) == []


@pytest.mark.parametrize(
    ("refusal", "fix"),
    [
        ("it cannot be loaded: no such folder", "a folder that contains tokenizer.json"),
        ("pip install transformers", ""),
    ],
)
async def test_a_tokenizer_that_cannot_be_loaded_is_a_fault(monkeypatch, refusal, fix):
    """The fix is omitted if the error contains it; tests/upstream/test_tokenizers.py tests the errors."""

    def load(path):
        assert path == "none/here"
        raise UnprocessableRequest(refusal)

    monkeypatch.setattr("proxy.cli.check.load", load)
    finding = await check_tokenizer(EndpointSettings(url="http://127.0.0.1:9", tokenizer="none/here"))

    assert (finding.grade, finding.seen) == ("fault", refusal)
    assert fix in finding.fix


async def test_the_tokenizer_of_each_endpoint_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.cli.check.load", lambda _: None)
    async with simulating("127.0.0.1:0", Options()) as url:
        engines = {"endpoints": [{"url": url, "tokenizer": "good/one"}]}
        settings = {"listen": "127.0.0.1:0", "engines": engines, "store": {"url": f"embedded:{tmp_path / 'store'}"}}
        found = graded(await all_findings(config.load(**settings)))

    assert any("tokenizer good/one: loads" in finding for finding in found["ok"])


@pytest.mark.parametrize(
    ("endpoint", "grade", "words"),
    [
        ({}, "ok", "scores token ids with 'big'"),
        ({"kind": "plain"}, "fault", "engine kind 'plain' cannot score token ids"),
        ({"url": "http://127.0.0.1:9", "kind": "vllm"}, "fault", "unreachable"),
    ],
)
async def test_a_scorer_is_checked(engine, tmp_path, endpoint, grade, words):
    """The fix names its setting."""
    engine.respond = Teacher()
    scorers = {"teacher": {"endpoints": [{"url": engine.url, **endpoint}]}}
    async with simulating("127.0.0.1:0", Options()) as policy:
        settings = settings_for(policy, store={"url": f"embedded:{tmp_path / 'store'}"}, rescore={"scorers": scorers})
        (found,) = [finding for finding in await all_findings(settings) if finding.subject == "scorer teacher"]

    assert grade == found.grade
    assert words in found.seen
    assert (grade == "fault") == ("rescore.scorers.teacher" in found.fix)


@pytest.mark.parametrize("models", [[], {"data": 5}, {"data": {"id": "m"}}, {"data": [1, {}, {"id": 2}]}])
async def test_a_list_of_models_of_any_type_is_a_fault(engine, models):
    engine.fixed_responses = {}

    async def respond(request, body):
        return web.json_response(models)

    engine.respond = respond
    (fault,) = graded(await engine_findings(engine.url))["fault"]

    assert "lists no models" in fault
