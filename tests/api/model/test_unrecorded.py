"""Requests that are forwarded without a record."""

import re

import aiohttp
import pytest
from aiohttp import web
from tests.support.fakes import fake_engine, proxying
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


async def test_a_passthrough_path_is_forwarded_unchanged_and_unrecorded(store, engine):
    """This covers the method, query, body and status."""
    async with (
        proxying(engine.url, store) as served,
        aiohttp.ClientSession() as http,
        http.post(URL(served.url + "/tokenize?a=%2F", encoded=True), json={"prompt": "x"}) as response,
    ):
        shown = await response.json()

    assert 207 == response.status
    assert {"path": "/tokenize?a=%2F", "body": {"prompt": "x"}, "method": "POST"} == shown
    assert () == (await store.list()).names


async def test_a_passthrough_path_is_also_forwarded_below_a_rollout(store, engine):
    async with (
        proxying(engine.url, store) as served,
        aiohttp.ClientSession() as http,
        http.post(served.url + "/rollouts/r1/v1/embeddings", json={"input": "x"}) as response,
    ):
        assert "/v1/embeddings" == (await response.json())["path"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/models", ["policy"]),
        ("/rollouts/r1/v1/models", ["policy"]),
        ("/v1/models/", ["policy"]),  # vLLM redirects it to its own address
    ],
)
async def test_models_are_listed_as_the_engine_lists_them(store, engine, path, expected):
    async with (
        proxying(engine.url, store) as served,
        aiohttp.ClientSession() as http,
        http.get(served.url + path) as response,
    ):
        assert expected == [model["id"] for model in (await response.json())["data"]]


async def test_aliases_of_existing_models_are_listed(store, engine):
    """An alias has the fields of its model; aliases of missing models and the catch-all are not listed."""
    aliases = {"gpt-4o": "policy", "*": "policy", "lost": "nothing"}
    async with proxying(engine.url, store, models=aliases) as served, aiohttp.ClientSession() as http:
        async with http.get(served.url + "/v1/models") as response:
            listed = await response.json()
        async with http.get(served.url + "/v1/models/gpt-4o") as response:
            model = await response.json()

    assert ["policy", "gpt-4o"] == [model["id"] for model in listed["data"]]
    assert ("gpt-4o", 2048) == (model["id"], model["max_model_len"])


async def test_an_alias_of_a_missing_model_is_404(store, engine):
    async with (
        proxying(engine.url, store, models={"lost": "nothing"}) as served,
        aiohttp.ClientSession() as http,
        http.get(served.url + "/v1/models/lost") as response,
    ):
        assert 404 == response.status


async def test_without_an_engine_models_are_503(store):
    async with (
        proxying(None, store) as served,
        aiohttp.ClientSession() as http,
        http.get(served.url + "/v1/models") as response,
    ):
        assert (503, "engine_unreachable") == (response.status, (await response.json())["error"]["code"])


@pytest.mark.parametrize("eject_after", [1, 99], ids=["ejected", "tried"])
async def test_unrecorded_requests_fail_over_and_skip_ejected_endpoints(store, engine, eject_after):
    endpoints = [{"url": "http://127.0.0.1:9", "name": "dead"}, {"url": engine.url, "name": "live"}]
    paths = [f"/p{n}" for n in range(20)]
    sections = {
        "engines": {"endpoints": endpoints, "passthrough": paths, "eject_after": eject_after, "base_ejection_s": 600}
    }
    async with proxying(None, store, models={"alias": "policy"}, **sections) as served, aiohttp.ClientSession() as http:

        async def faults():
            async with http.get(served.url + "/metrics") as response:
                return sum(
                    map(float, re.findall(r'engine_faults_total\{engine="dead".*\} (.*)', await response.text()))
                )

        async with http.get(served.url + "/engines"):
            before = await faults()
        for path in [*paths, "/v1/models", "/v1/models/alias"]:
            method = "GET" if "models" in path else "POST"
            async with http.request(method, served.url + path, json={}) as response:
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
async def test_an_invalid_list_of_models_is_502_in_the_dialects_error_shape(store, engine, http, path, version):
    sent = []

    async def respond(request, body):
        sent.append(JUNK[len(sent)])
        return web.Response(body=sent[-1], content_type="application/json")

    engine.respond = respond
    headers = {} if version is None else {"anthropic-version": version}
    async with proxying(engine.url, store, models={"alias": "policy"}) as served:
        for number, junk in enumerate(JUNK):
            async with http.get(served.url + path, headers=headers) as response:
                payload = await response.json()
            assert (502, number + 1) == (response.status, len(sent)), junk[:50]
            assert "The engine disconnected, or its response is invalid" in payload["error"]["message"]
            assert (version is not None) == ("code" not in payload["error"])


async def test_models_with_odd_fields_are_listed(store, engine, http):
    odd = [{"id": "a", "created": "x", "max_model_len": []}, {"id": "b", "created": 10**30, "max_model_len": 1.5}]

    async def respond(request, body):
        return web.json_response({"data": odd})

    engine.respond = respond
    async with proxying(engine.url, store, models={"alias": "a"}) as served:
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            async with http.get(served.url + "/v1/models", headers=headers) as response:
                assert {"a", "b", "alias"} == {model["id"] for model in (await response.json())["data"]}


async def test_a_client_disconnect_closes_the_engines_connection(store, engine):
    engine.streams([b"a" * 10], then="hang")
    async with proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        async with http.post(served.url + "/tokenize", json={}) as response:
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


async def test_the_models_of_all_endpoints_are_listed(store, engine, http):
    """Each model is listed once, and only if calls for it are sent to the endpoint. A failing endpoint lists none."""
    async with fake_engine() as other:
        other.fixed_responses["/v1/models"] = {"data": [{"id": name} for name in ("judge", "policy", "hidden")]}
        endpoints = [
            {"url": engine.url},
            {"url": other.url, "name": "two", "models": ["judge", "policy"]},
            {"url": "http://127.0.0.1:9", "name": "away"},
        ]
        async with proxying(None, store, engines={"endpoints": endpoints}) as served:
            async with http.get(served.url + "/v1/models") as response:
                listed = (await response.json())["data"]
            async with http.get(served.url + "/v1/models/judge") as response:
                judge = await response.json()

    assert ["policy", "judge"] == [model["id"] for model in listed]
    assert 2048 == listed[0]["max_model_len"]
    assert {"id": "judge"} == judge
