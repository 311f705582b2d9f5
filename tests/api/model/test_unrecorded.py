"""Requests that are forwarded without a record."""

import re

import pytest
from aiohttp import web
from tests.support.fakes import fake_engine
from tests.support.session import session_with
from yarl import URL

from proxy.api.model.unrecorded import names_a_model

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

    assert 207 == response.status
    assert {"path": "/tokenize?a=%2F", "body": {"prompt": "x"}, "method": "POST"} == shown
    assert () == (await store.list()).names


async def test_a_passthrough_path_is_also_forwarded_below_a_rollout(session):
    assert "/v1/embeddings" == (await session.post("/rollouts/r1/v1/embeddings", {"input": "x"})).json["path"]


@pytest.mark.parametrize("path", ["/v1/models", "/rollouts/r1/v1/models", "/v1/models/"])
async def test_models_are_listed_as_the_engine_lists_them(session, path):
    """vLLM redirects the last path to its own address."""
    assert ["policy"] == [model["id"] for model in (await session.get(path)).json["data"]]


async def test_aliases_of_existing_models_are_listed(store, engine):
    """An alias has the fields of its model; aliases of missing models and the catch-all are not listed."""
    aliases = {"gpt-4o": "policy", "*": "policy", "lost": "nothing"}
    async with session_with(engine, store, models=aliases) as session:
        listed = (await session.get("/v1/models")).json["data"]
        model = (await session.get("/v1/models/gpt-4o")).json

    assert ["policy", "gpt-4o"] == [model["id"] for model in listed]
    assert ("gpt-4o", 2048) == (model["id"], model["max_model_len"])


async def test_an_alias_of_a_missing_model_is_404(store, engine):
    async with session_with(engine, store, models={"lost": "nothing"}) as session:
        assert 404 == (await session.get("/v1/models/lost")).status


async def test_without_an_engine_models_are_503(store):
    async with session_with(None, store) as session:
        response = await session.get("/v1/models")

    assert (503, "engine_unreachable") == (response.status, response.json["error"]["code"])


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
            assert (502, number + 1) == (response.status, len(sent)), junk[:50]
            assert "The engine disconnected, or its response is invalid" in response.json["error"]["message"]
            assert (version is not None) == ("code" not in response.json["error"])


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_models_with_odd_fields_are_listed(store, engine, headers):
    odd = b'{"id": "a", "created": "x", "max_model_len": []}, {"id": "b", "created": 1%s, "max_model_len": 1.5}'
    engine.answers(b'{"data": [' + odd % (b"0" * 30) + b"]}")
    async with session_with(engine, store, models={"alias": "a"}) as session:
        listed = (await session.get("/v1/models", headers=headers)).json["data"]

    assert {"a", "b", "alias"} == {model["id"] for model in listed}


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
    assert expected == names_a_model(segments)


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

    assert ["policy", "judge"] == [model["id"] for model in listed]
    assert 2048 == listed[0]["max_model_len"]
    assert {"id": "judge"} == judge
