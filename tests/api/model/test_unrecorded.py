"""Requests that are forwarded without a record, token counts in Anthropic's shape, and health probes of clients."""

import asyncio
import re
from types import SimpleNamespace

import aiohttp
import anthropic
import openai
import orjson
import pytest
from aiohttp import web
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.session import session_with
from tests.support.stored import stored_steps
from tests.support.trainers import load_published
from yarl import URL

from proxy.api.model.unrecorded import KNOWN, is_probe, names_a_model
from proxy.config.sections import ProbeSettings
from proxy.protocols.dialects import DIALECTS
from proxy.server.listener import simulating
from proxy.simulator.options import Options

MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 2048}]}


@pytest.fixture(autouse=True)
def echo(engine):
    """The engine lists its models, and otherwise returns the request."""

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response(MODELS)
        return web.json_response({"path": request.raw_path, "body": body, "method": request.method}, status=207)

    engine.respond = respond


@pytest.fixture
async def session(engine, store):
    async with session_with(engine, store) as session:
        yield session


async def test_a_passthrough_path_is_forwarded_unchanged_and_unrecorded(store, session):
    """This covers the method, query, body and status."""
    url = URL(session.url + "/tokenize?a=%2F", encoded=True)
    async with session.http.post(url, json={"prompt": "x"}) as response:
        shown = await response.json()

    assert response.status == 207
    assert shown == {"path": "/tokenize?a=%2F", "body": {"prompt": "x"}, "method": "POST"}
    assert (await store.list()).names == ()


async def test_a_passthrough_path_is_also_forwarded_below_a_rollout(session):
    assert (await session.post("/rollouts/r1/v1/embeddings", {"input": "x"})).json["path"] == "/v1/embeddings"


@pytest.mark.parametrize("path", ["/v1/models", "/rollouts/r1/v1/models", "/v1/models/"])
async def test_models_are_listed_as_the_engine_lists_them(session, path):
    """vLLM redirects the last path to its own address."""
    assert [model["id"] for model in (await session.get(path)).json["data"]] == ["policy"]


async def test_aliases_of_existing_models_are_listed(store, engine):
    """An alias has the fields of its model; aliases of missing models and the catch-all are not listed."""
    aliases = {"gpt-4o": "policy", "*": "policy", "lost": "nothing"}
    async with session_with(engine, store, models=aliases) as session:
        listed = (await session.get("/v1/models")).json["data"]
        model = (await session.get("/v1/models/gpt-4o")).json

    assert [model["id"] for model in listed] == ["policy", "gpt-4o"]
    assert (model["id"], model["max_model_len"]) == ("gpt-4o", 2048)


async def test_an_alias_of_a_missing_model_is_404(store, engine):
    async with session_with(engine, store, models={"lost": "nothing"}) as session:
        assert (await session.get("/v1/models/lost")).status == 404


async def test_without_an_engine_models_are_503(store):
    async with session_with(None, store) as session:
        response = await session.get("/v1/models")

    assert (response.status, response.json["error"]["code"]) == (503, "engine_unreachable")


@pytest.mark.parametrize("eject_after", [1, 99], ids=["ejected", "tried"])
async def test_unrecorded_requests_fail_over_and_skip_ejected_endpoints(store, engine, eject_after):
    endpoints = [{"url": "http://127.0.0.1:9", "name": "dead"}, {"url": engine.url, "name": "live"}]
    paths = [f"/p{n}" for n in range(20)]
    sections = {
        "engines": {"endpoints": endpoints, "passthrough": paths, "eject_after": eject_after, "base_ejection_s": 600}
    }
    async with session_with(None, store, models={"alias": "policy"}, **sections) as session:

        async def faults():
            text = (await session.get("/metrics")).text.decode()
            return sum(map(float, re.findall(r'engine_faults_total\{engine="dead".*\} (.*)', text)))

        await session.get("/engines")
        before = await faults()
        for path in [*paths, "/v1/models", "/v1/models/alias"]:
            response = await session.call("GET" if "models" in path else "POST", path, json={})
            assert response.status in {200, 207}
        new_faults = await faults() - before

    assert new_faults == 0 if eject_after == 1 else new_faults > 0


JUNK = [
    b"", b"no", b"\xff", b"null", b"7", b'"data"', b"[]", b"{}", b'{"data": null}', b'{"data": 5}', b'{"data": {"id": 1}}',
    b'{"data": [null]}', b'{"data": ["policy"]}', b'{"data": [[]]}', b'{"data": [{}]}', b'{"data": [{"id": 7}]}',
    b'{"data": [{"id": []}]}', b'{"data": [{"id": {}}]}', b'{"error": {"message": "no"}}', b"[" * 5000, b'{"data": [NaN]}',
    b'{"data":[' + b'{"id":"x"},' * 20_000 + b"{}]}",
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/alias"])
@pytest.mark.parametrize("version", [None, "2023-06-01"])
async def test_an_invalid_list_of_models_is_502_in_the_dialects_error_shape(store, engine, path, version):
    sent = []

    async def respond(request, body):
        sent.append(JUNK[len(sent)])
        return web.Response(body=sent[-1], content_type="application/json")

    engine.respond = respond
    headers = {} if version is None else {"anthropic-version": version}
    async with session_with(engine, store, models={"alias": "policy"}) as session:
        for number, junk in enumerate(JUNK):
            response = await session.get(path, headers=headers)
            assert (response.status, len(sent)) == (502, number + 1), junk[:50]
            assert "The engine disconnected, or its response is invalid" in response.json["error"]["message"]
            assert (version is not None) == ("code" not in response.json["error"])


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_models_with_odd_fields_are_listed(store, engine, headers):
    odd = b'{"id": "a", "created": "x", "max_model_len": []}, {"id": "b", "created": 1%s, "max_model_len": 1.5}'
    engine.answers(b'{"data": [' + odd % (b"0" * 30) + b"]}")
    async with session_with(engine, store, models={"alias": "a"}) as session:
        listed = (await session.get("/v1/models", headers=headers)).json["data"]

    assert {model["id"] for model in listed} == {"a", "b", "alias"}


async def test_a_client_disconnect_closes_the_engines_connection(store, engine):
    engine.streams([b"a" * 10], then="hang")
    async with session_with(engine, store) as session:
        async with session.http.post(session.url + "/tokenize", json={}) as response:
            await response.content.readexactly(10)
            response.close()
        await engine.aborted.wait()

    assert engine.aborted.is_set()


@pytest.mark.parametrize(
    ("segments", "expected"),
    [("", True), ("policy", True), ("org/name-1.5", True), ("org%2Fname", True), ("a..b", True), ("gr%C3%BC%C3%9F", True),
     ("..", False), ("a/../b", False), ("%2e%2E/x", False), ("a%5c..%5cb", False), ("%252e", False), ("a%0a", False)],
)  # fmt: skip
def test_a_model_name_has_no_dot_segments_control_characters_or_double_encoding(segments, expected):
    assert names_a_model(segments) == expected


async def test_the_models_of_all_endpoints_are_listed(store, engine):
    """Each model is listed once, and only if calls for it are sent to the endpoint. A failing endpoint lists none."""
    async with fake_engine() as other:
        other.fixed_responses["/v1/models"] = {"data": [{"id": name} for name in ("judge", "policy", "hidden")]}
        endpoints = [
            {"url": engine.url},
            {"url": other.url, "name": "two", "models": ["judge", "policy"]},
            {"url": "http://127.0.0.1:9", "name": "away"},
        ]
        async with session_with(None, store, engines={"endpoints": endpoints}) as session:
            listed = (await session.get("/v1/models")).json["data"]
            judge = (await session.get("/v1/models/judge")).json

    assert [model["id"] for model in listed] == ["policy", "judge"]
    assert listed[0]["max_model_len"] == 2048
    assert judge == {"id": "judge"}


BODY = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_the_token_count_equals_the_prompt_tokens_of_the_call(store, http, shape, sdk):
    """The engine applies its chat template, with tools; no step is recorded."""
    body = {**BODY, "system": "Be brief.", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine, proxying(engine, store) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        counted = await client.messages.count_tokens(**body)
        response = await client.messages.create(**body, max_tokens=9)
        async with http.get(f"{served.url}/rollouts/r1") as shown:
            counts = (await shown.json())["counts"]

    assert response.usage.input_tokens == counted.input_tokens
    assert counts["steps"] == 1


async def test_an_engine_without_token_counts_is_400(store, engine, sdk):
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="Counting the tokens of messages is not supported"):
            await client.messages.count_tokens(**BODY)


@pytest.mark.parametrize(
    "junk", [b"", b"no", b"null", b"[]", b'{"count": "1"}', b'{"count": null, "max_model_len": []}']
)
async def test_an_invalid_token_count_of_the_engine_is_400(store, engine, junk):
    engine.answers(junk)
    async with session_with(engine, store) as session:
        response = await session.post("/v1/messages/count_tokens", BODY)

    assert (response.status, b"is not supported" in response.text) == (400, True)


async def test_a_token_count_without_messages_is_400_in_anthropics_error_shape(store, engine, sdk):
    async with proxying(engine.url, store) as served:
        client = sdk(anthropic.AsyncAnthropic, served.url)
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await client.messages.count_tokens(model="m", messages=[])


async def test_models_and_aliases_are_listed_in_anthropics_shape_for_its_clients(store, sdk):
    """An unknown model is 404."""
    aliases = {"claude-opus": "simulated", "claude-*": "absent"}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, models=aliases) as served:
        client = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        listed = [model.id async for model in client.models.list()]
        model = await client.models.retrieve("claude-opus")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("gpt-4o")

    assert listed == ["simulated", "claude-opus"]
    assert (model.id, model.max_input_tokens) == ("claude-opus", 32_768)


WHOLE = load("chat_ids_lp")
CHAT = "/v1/chat/completions"
PING = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
ONE_TOKEN = ProbeSettings(one_token=True)
PATHS = {"chat": CHAT, "completions": "/v1/completions"}
SHAPES = [pytest.param(PATHS[dialect], body, id=repr(body)) for dialect, bodies in KNOWN.items() for body in bodies]
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def probe(probes, body, *, path=CHAT, agent=""):
    headers = {"User-Agent": agent}
    return is_probe(probes, DIALECTS[path], headers, body, body_bytes=len(orjson.dumps(body)))


def test_by_default_a_call_with_max_tokens_1_is_not_a_probe():
    """It may be a judge's or a classifier's call."""
    assert not probe(ProbeSettings(), PING, agent="kube-probe/1.30")


@pytest.mark.parametrize(("path", "body"), SHAPES)
def test_a_known_probe_is_recognised_by_its_complete_body_except_the_model(path, body):
    """With another field, value or dialect it is an ordinary call."""
    settings, other_path = ProbeSettings(), next(candidate for candidate in PATHS.values() if candidate != path)

    assert probe(settings, body | {"model": "m"}, path=path)
    assert not probe(ProbeSettings(known=False), body, path=path)
    assert not probe(settings, body | {"temperature": 0.5}, path=path)
    assert not probe(settings, body | {"max_tokens": 2}, path=path)
    assert not probe(settings, {key: value for key, value in body.items() if key != "max_tokens"}, path=path)
    assert not probe(settings, body, path=other_path)


class ApiServer:
    """The part of the base class that Atropos' servers use: the configuration."""

    def __init__(self, config, reasoning_config=None):
        self.config, self.server_healthy = config, False


def atropos_server(name, url):
    """Return a published server class of atroposlib; its tokenizer is used for prompts only."""
    file = f"atroposlib/envs/server_handling/{name.lower().removesuffix('server')}_server.py"
    tokenizer = SimpleNamespace(from_pretrained=lambda _name: None)
    names_used = {
        "asyncio": asyncio,
        "aiohttp": aiohttp,
        "openai": openai,
        "APIServer": ApiServer,
        "AutoTokenizer": tokenizer,
    }
    config = SimpleNamespace(api_key="x", base_url=f"{url}/v1", timeout=50, model_name="m", tokenizer_name="none")
    return getattr(load_published(file, name, **names_used), name)(config)


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("name", ["OpenAIServer", "SGLangServer", "VLLMServer"])
async def test_at_9_status_checks_of_an_atropos_server_create_no_rollout(store, name, chats):
    """The check succeeds with the default configuration."""
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
    ):
        server = atropos_server(name, served.url)
        checking = asyncio.create_task(server.check_server_status_task(chat_completion=chats))
        async with asyncio.timeout(50):
            while not server.server_healthy:
                await asyncio.sleep(0.005)
        checking.cancel()
        await asyncio.wait([checking])
        await server.openai.close()

    assert (await store.list()).names == ()


async def test_the_logprobs_check_of_verifiers_creates_no_rollout(store):
    file = load_published("verifiers/envs/experimental/rlm_env.py", "RLMEnv._test_logprobs_support")
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        assert await file._test_logprobs_support(None, client, "m")

    assert (await store.list()).names == ()


@pytest.mark.parametrize("unnamed_rollouts", ["new", "pass", "reject"])
async def test_a_probe_succeeds_with_every_setting_of_unnamed_rollouts(store, engine, http, unnamed_rollouts):
    engine.plays(WHOLE)
    async with (
        proxying(engine.url, store, agents={"unnamed_rollouts": unnamed_rollouts}) as served,
        http.post(served.url + CHAT, json=HI) as response,
    ):
        assert response.status == 200

    assert (engine.requests, (await store.list()).names) == ([HI], ())


@pytest.mark.parametrize(
    ("prefix", "headers", "fields"),
    [
        ("/rollouts/r1", {}, {}),
        ("/sessions/r1", {}, {}),
        ("", {"X-Rollout-Id": "r1"}, {}),
        ("", {"Authorization": "Bearer rollout:r1"}, {}),
        ("", {"Authorization": "Bearer minted"}, {}),
        ("", {"X-Api-Key": "minted"}, {}),
        ("", {}, {"rollout_id": "r1"}),
        ("", {}, {"metadata": {"rollout_id": "r1"}}),
    ],
)
async def test_a_call_that_names_a_rollout_is_not_a_probe(store, engine, http, prefix, headers, fields):
    """This holds for known and configured probes."""
    engine.plays(WHOLE)
    probes = {"one_token": True, "user_agents": ["probe"]}
    async with proxying(engine.url, store, agents={"probes": probes}) as served:
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r1"}) as response:
            key = (await response.json())["api_key"]
        sent = {name: value.replace("minted", key) for name, value in headers.items()} | {"User-Agent": "probe/1"}
        async with http.post(served.url + prefix + CHAT, json=HI | fields, headers=sent) as response:
            assert (response.status, response.headers["X-Rollout-Id"]) == (200, "r1")

    assert len(await stored_steps(store, "r1")) == 1


@pytest.mark.parametrize(
    ("body", "path", "expected"),
    [
        (PING, CHAT, True),
        ({**PING, "max_tokens": None, "max_completion_tokens": 1}, CHAT, True),
        ({**PING, "max_completion_tokens": 9}, CHAT, False),
        ({**PING, "max_tokens": 2}, CHAT, False),
        ({**PING, "max_tokens": True}, CHAT, False),
        ({"messages": PING["messages"]}, CHAT, False),
        ({**PING, "messages": [{"role": "user", "content": "long " * 200}]}, CHAT, False),
        ({"prompt": "hi", "max_tokens": 1}, "/v1/completions", True),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 1}}, "/inference/v1/generate", True),
        ({"token_ids": [1], "max_tokens": 1}, "/inference/v1/generate", False),
    ],
)
def test_with_one_token_a_short_call_with_max_tokens_1_is_a_probe(body, path, expected):
    assert probe(ONE_TOKEN, body, path=path) == expected


def test_a_user_agent_matches_by_a_case_insensitive_substring():
    """The body does not matter."""
    probes = ProbeSettings(user_agents=["kube-probe", "GoogleHC"])

    assert probe(probes, {"messages": []}, agent="Kube-Probe/1.30")
    assert probe(probes, PING, agent="googlehc/1.0")
    assert not probe(probes, PING, agent="OpenAI/Python 2.0")


async def test_a_probe_is_forwarded_counted_and_not_recorded(store, engine, http):
    """The engine gets its own name of the model."""
    engine.plays(WHOLE)
    sections = {"agents": {"probes": {"user_agents": ["probe"]}}, "models": {"tiny": "served"}}
    async with proxying(engine.url, store, **sections) as served:
        async with http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response:
            assert (200, WHOLE.response) == (response.status, await response.read())
            assert "X-Step-Id" not in response.headers
        async with http.get(served.url + "/metrics") as response:
            assert 'tokentape_health_probes_total{dialect="chat"} 1.0' in await response.text()

    assert engine.requests == [PING | {"model": "served"}]
    assert (await store.list()).names == ()


async def test_a_probe_requires_an_api_key(store, engine, http):
    sections = {
        "agents": {"probes": {"user_agents": ["probe"]}, "api_keys": ["secret"]},
        "control": {"api_keys": ["boss"]},
    }
    async with (
        proxying(engine.url, store, **sections) as served,
        http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response,
    ):
        assert response.status == 401
    assert engine.requests == []
