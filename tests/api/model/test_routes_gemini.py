"""Calls of the Gemini API over HTTP: paths, keys, formats of streams, token counts, models and errors."""

import asyncio
import logging
from io import BytesIO

import httpx2
import orjson
import pytest
from aiohttp import web
from google import genai
from google.genai import types
from google.genai.errors import ClientError
from tests.support.fakes import proxying
from tests.support.gemini_responses import events_of, joined, strictly
from tests.support.recorded import load
from tests.support.stored import stored_rollout, stored_steps
from yarl import URL

from proxy.server.listener import simulating
from proxy.simulator.options import Options

BODY = {
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "generationConfig": {"maxOutputTokens": 8, "seed": 1},
}
MODEL = "/v1beta/models/simulated"
GENERATE, STREAM = f"{MODEL}:generateContent", f"{MODEL}:streamGenerateContent"
SECRET = "AIza-secret-0123456789"


@pytest.fixture
async def sdk():
    """A factory of the SDK's asynchronous clients, which are closed after the test."""
    async with httpx2.AsyncClient() as http:
        clients = []

        def make_client(url, key="none"):
            options = types.HttpOptions(base_url=url, httpx_async_client=http)
            clients.append(genai.Client(api_key=key, http_options=options))
            return clients[-1].aio

        yield make_client
        for client in clients:
            client.close()


@pytest.fixture
async def simulated():
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


async def sent(http, url, body=BODY, **headers):
    """Return the status, the content type and the body of a POST."""
    async with http.post(URL(url, encoded=True), json=body, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.read()


async def test_a_call_of_the_sdk_is_one_exact_step(store, simulated, sdk):
    """It is recorded with the fields of its URL, in the client's format and in chat's."""
    async with proxying(simulated, store) as served:
        client = sdk(f"{served.url}/rollouts/r1")
        response = await client.models.generate_content(
            model="simulated", contents="hi", config=types.GenerateContentConfig(max_output_tokens=8)
        )

    (step,) = await stored_steps(store, "r1")
    assert (step.step_id, "simulated") == (response.response_id, response.model_version)
    assert (step.dialect, step.exact, step.problems) == ("gemini", True, ())
    usage = response.usage_metadata
    assert (len(step.prompts[0]), step.sampled) == (usage.prompt_token_count, usage.candidates_token_count)
    assert (
        step.request["model"],
        step.request["contents"],
    ) == ("simulated", [{"parts": [{"text": "hi"}], "role": "user"}])
    assert (step.body["messages"], step.body["max_tokens"]) == ([{"role": "user", "content": "hi"}], 8)


async def test_a_stream_has_the_same_parts_in_each_format(store, simulated, http):
    """Events without a terminal event, an array, and one response; no response has ids of tokens."""
    async with proxying(simulated, store) as served:
        answers = [
            await sent(http, f"{served.url}/rollouts/r1{path}")
            for path in (GENERATE, f"{STREAM}?alt=sse", STREAM, f"{STREAM}?$alt=json;enum-encoding=int")
        ]

    kinds = ["application/json", "text/event-stream; charset=utf-8", *["application/json; charset=UTF-8"] * 2]
    assert kinds == [kind for _, kind, _ in answers]
    whole, events, array, older = (text for _, _, text in answers)
    responses = [[orjson.loads(whole)], events_of(events), orjson.loads(array), orjson.loads(older)]
    texts = ["".join(part["text"] for part in joined(found)[0]) for found in responses]
    assert len(set(texts)) == 1
    assert texts[0]
    for found in responses:
        assert all(strictly(response) for response in found)
    assert not any(name in text for _, _, text in answers for name in (b"token_ids", b"logprob", b"tokenId"))
    steps = await stored_steps(store, "r1")
    assert [step.request.get("alt") for step in steps] == [None, "sse", "json", "json"]
    assert all(step.exact for step in steps)


async def test_a_body_cannot_request_a_stream(store, simulated, http):
    """The method in the URL does."""
    async with proxying(simulated, store) as served:
        _, _, text = await sent(http, f"{served.url}/rollouts/r1{GENERATE}", {**BODY, "stream": True, "alt": "sse"})

    strictly(orjson.loads(text))
    assert (await stored_steps(store, "r1"))[0].exact


@pytest.mark.parametrize(
    "path", ["/v1beta/models/org/name:7b:generateContent", "/v1/models/org%2Fname%3A7b%3AgenerateContent"]
)
async def test_a_model_may_have_slashes_and_colons_in_its_name(store, simulated, http, path):
    """Also encoded, and mapped by an alias."""
    async with proxying(simulated, store, models={"org/*": "simulated"}) as served:
        status, _, text = await sent(http, f"{served.url}/sessions/r1{path}")

    assert (status, orjson.loads(text)["modelVersion"]) == (200, "org/name:7b")
    (step,) = await stored_steps(store, "r1")
    assert (step.model_asked, step.model_served) == ("org/name:7b", "simulated")


KEYS = [
    ("", {"x-goog-api-key": SECRET}, 200),
    (f"?key={SECRET}", {}, 200),
    (f"?alt=json&key={SECRET}", {"x-goog-api-key": SECRET}, 200),
    ("", {"Authorization": f"Bearer {SECRET}"}, 200),
    ("", {}, 401),
    ("?key=wrong", {}, 401),
    ("", {"x-goog-api-key": "wrong"}, 401),
]


async def test_a_key_is_in_a_header_or_in_the_query_and_nowhere_else(store, engine, http, caplog):
    """Not in the log, the record, or a request to the engine."""
    engine.plays(load("chat_ids_lp"))
    caplog.set_level(logging.DEBUG)
    texts = []
    async with proxying(engine.url, store, agents={"api_keys": [SECRET]}, control={"api_keys": ["boss"]}) as served:
        for query, headers, status in KEYS:
            answered, _, text = await sent(http, f"{served.url}/rollouts/r1{GENERATE}{query}", **headers)
            texts.append(text)
            assert status == answered, text
            assert status == 200 or orjson.loads(text)["error"]["status"] == "UNAUTHENTICATED"

    steps = await stored_steps(store, "r1")
    assert [len(steps), len(engine.requests)] == [4, 4]
    for seen in (caplog.text, repr(steps), repr(engine.headers), repr(engine.requests), repr(texts)):
        assert SECRET not in seen
    assert not any("goog" in name for headers in engine.headers for name in headers)


async def test_the_key_of_a_rollout_names_it(store, simulated, http):
    """A minted key and `rollout:<id>`; a key of another rollout is 403."""
    async with proxying(simulated, store) as served:
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r1"}) as response:
            key = (await response.json())["api_key"]
        statuses = [
            (await sent(http, served.url + path))[0]
            for path in (f"{GENERATE}?key={key}", f"{GENERATE}?key=rollout%3Ar1", f"/rollouts/r2{GENERATE}?key={key}")
        ]

    assert statuses == [200, 200, 403]
    assert len(await stored_steps(store, "r1")) == 2


async def test_a_passthrough_path_is_forwarded_without_the_key(store, engine, http):
    """If the engine has a path of the Gemini API, and it is allowed."""

    async def respond(request, body):
        return web.json_response({"path": request.raw_path})

    engine.respond = respond
    path = "/v1beta/models/x:embedContent"
    async with proxying(engine.url, store, engines={"passthrough": [path]}) as served:
        _, _, text = await sent(
            http, f"{served.url}{path}?a=1&k%65y={SECRET}&key={SECRET}", **{"x-goog-api-key": SECRET}
        )

    assert orjson.loads(text) == {"path": f"{path}?a=1"}
    assert SECRET not in repr(engine.headers)


BAD = [
    ("POST", f"{STREAM}?alt=media", BODY, 400, "INVALID_ARGUMENT"),
    ("POST", f"{GENERATE}?alt=sse", BODY, 400, "INVALID_ARGUMENT"),
    ("POST", GENERATE, {"contents": [{"role": "system", "parts": [{"text": "a"}]}]}, 400, "INVALID_ARGUMENT"),
    ("POST", GENERATE, {"contents": [{"parts": [{"functionResponse": {"name": "f"}}]}]}, 400, "INVALID_ARGUMENT"),
    ("POST", GENERATE, {**BODY, "tools": [{"googleSearch": {}}]}, 400, "INVALID_ARGUMENT"),
    ("POST", GENERATE, {**BODY, "generationConfig": {"maxOutputTokens": 1e300}}, 400, "INVALID_ARGUMENT"),
    ("POST", GENERATE, [], 400, "INVALID_ARGUMENT"),
    ("POST", f"{MODEL}:countTokens", {"contents": []}, 400, "INVALID_ARGUMENT"),
    ("POST", f"{MODEL}:embedContent", {}, 404, "NOT_FOUND"),
    ("POST", "/v1beta/cachedContents", {}, 404, "NOT_FOUND"),
    ("PUT", MODEL, {}, 404, "NOT_FOUND"),
    ("GET", "/v1beta/models/unknown", None, 404, "NOT_FOUND"),
]


@pytest.mark.parametrize(("key", "status", "name"), [(SECRET, 404, "NOT_FOUND"), ("wrong", 401, "UNAUTHENTICATED")])
async def test_other_methods_of_googles_clients_are_errors_in_their_format(store, simulated, sdk, key, status, name):
    """Errors of paths that begin with `/v1`, which other APIs use too, also have Google's format."""
    async with proxying(simulated, store, agents={"api_keys": [SECRET]}, control={"api_keys": ["boss"]}) as served:
        client = sdk(f"{served.url}/rollouts/r1", key)
        for method in (
            lambda: client.models.embed_content(model="simulated", contents="x"),
            lambda: client.caches.create(model="simulated", config=types.CreateCachedContentConfig(contents="x")),
            lambda: client.files.upload(file=BytesIO(b"x"), config={"mime_type": "text/plain"}),
            lambda: client.files.get(name="x"),
        ):
            with pytest.raises(ClientError) as raised:
                await method()
            assert (raised.value.code, raised.value.status) == (status, name)


async def test_a_bad_request_is_an_error_in_googles_format_and_nothing_is_recorded(store, simulated, http):
    async with proxying(simulated, store) as served:
        for method, path, body, status, name in BAD:
            async with http.request(method, f"{served.url}/rollouts/r1{path}", json=body) as response:
                error = await response.json()
            error = error[0] if isinstance(error, list) else error
            found = (response.status, error["error"]["code"], error["error"]["status"])
            assert found == (status, status, name), (path, body)

    assert (await store.list()).names == ()


@pytest.mark.parametrize(("query", "is_array"), [("", True), ("?alt=sse", False)])
async def test_an_error_of_a_stream_has_the_format_of_the_stream(store, engine, http, query, is_array):
    """The engine's message and status; a stream as an array has it in an array."""
    engine.plays(load("err_temp"))
    async with proxying(engine.url, store) as served:
        status, kind, text = await sent(http, f"{served.url}/rollouts/r1{STREAM}{query}")

    error = orjson.loads(text)[0] if is_array else orjson.loads(text)
    assert (status, kind.partition(";")[0]) == (400, "application/json")
    assert (error["error"]["code"], error["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert "temperature" in error["error"]["message"]
    assert (await stored_steps(store, "r1"))[0].status == "error"


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_the_token_count_equals_the_prompt_tokens_of_the_call(store, http, shape, sdk):
    """The engine applies its chat template; no step is recorded for it."""
    tools = [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}]
    whole = {**BODY, "tools": tools, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine, proxying(engine, store) as served:
        url = f"{served.url}/rollouts/r1"
        counted = await sdk(url).models.count_tokens(model="simulated", contents="hi")
        _, _, one = await sent(http, url + GENERATE)
        _, _, many = await sent(http, f"{url}{MODEL}:countTokens", {"generateContentRequest": whole})
        _, _, other = await sent(http, url + GENERATE, whole)

    assert counted.total_tokens == orjson.loads(one)["usageMetadata"]["promptTokenCount"]
    assert {"totalTokens": orjson.loads(other)["usageMetadata"]["promptTokenCount"]} == orjson.loads(many)
    assert (await stored_rollout(store, "r1")).counts["steps"] == 2


async def test_a_token_count_of_two_requests_or_without_a_tokenizer_is_400(store, engine, simulated, http, sdk):
    async with proxying(simulated, store) as served:
        status, _, text = await sent(http, f"{served.url}{MODEL}:countTokens", {**BODY, "generateContentRequest": BODY})
    async with proxying(engine.url, store) as served:
        with pytest.raises(ClientError, match="Counting the tokens of messages is not supported"):
            await sdk(served.url).models.count_tokens(model="m", contents="hi")

    assert (status, b"must not be present together with contents" in text) == (400, True)


async def test_models_and_aliases_are_listed_for_the_sdk(store, simulated, sdk, http):
    """An unknown model is 404; the list of OpenAI's clients is unchanged."""
    aliases = {"gemini-pro": "simulated", "gemini-lost": "absent", "gemini-*": "absent"}
    async with proxying(simulated, store, models=aliases) as served:
        client = sdk(f"{served.url}/rollouts/r1")
        listed = [model.name async for model in await client.models.list()]
        model = await client.models.get(model="gemini-pro")
        for name in ("gpt-4o", "gemini-lost", "gemini-*"):
            with pytest.raises(ClientError) as raised:
                await client.models.get(model=name)
            assert (raised.value.code, raised.value.status) == (404, "NOT_FOUND")
        async with http.get(f"{served.url}/v1/models") as response:
            openai = await response.json()

    assert listed == ["models/simulated", "models/gemini-pro"]
    assert (model.name, model.input_token_limit) == ("models/gemini-pro", 32_768)
    assert openai["object"] == "list"


async def test_an_error_of_the_engines_list_of_models_is_in_googles_format(store, engine, http):
    engine.answers({"error": {"message": "loading"}}, 418)
    async with proxying(engine.url, store) as served, http.get(f"{served.url}/v1beta/models") as response:
        assert (await response.json())["error"] == {"code": 418, "message": "loading", "status": "INVALID_ARGUMENT"}


@pytest.mark.parametrize(("mode", "status"), [("new", 200), ("reject", 400), ("pass", 400)])
async def test_a_call_that_names_no_rollout(store, simulated, http, mode, status):
    """Engines have no Gemini API, to which a call could be forwarded."""
    async with proxying(simulated, store, agents={"unnamed_rollouts": mode}) as served:
        answered, _, text = await sent(http, served.url + GENERATE)

    assert status == answered, text
    assert (status == 200) is bool((await store.list()).names)


async def test_several_candidates_are_the_choices_of_one_step(store, simulated, http):
    """With logprobs if the client requests them."""
    config = {"candidateCount": 2, "maxOutputTokens": 8, "responseLogprobs": True, "logprobs": 2}
    async with proxying(simulated, store) as served:
        _, _, whole = await sent(http, f"{served.url}/rollouts/r1{GENERATE}", {**BODY, "generationConfig": config})
        _, _, events = await sent(
            http, f"{served.url}/rollouts/r1{STREAM}?alt=sse", {**BODY, "generationConfig": config}
        )

    for response in (orjson.loads(whole), events_of(events)[-1]):
        strictly(response)
        assert [candidate["index"] for candidate in response["candidates"]] == [0, 1]
        for candidate in response["candidates"]:
            chosen = candidate["logprobsResult"]["chosenCandidates"]
            assert len(chosen) == len(candidate["logprobsResult"]["topCandidates"])
            assert chosen[0].keys() == {"token", "logProbability"}
    assert [len(step.choices) for step in await stored_steps(store, "r1")] == [2, 2]


@pytest.mark.parametrize("path", [GENERATE, STREAM, f"{STREAM}?alt=sse"])
async def test_a_retry_gets_the_stored_response_in_its_format(store, simulated, http, path):
    """Its key belongs to the URL as well: another model or format is another request."""
    async with proxying(simulated, store) as served:
        url = f"{served.url}/rollouts/r1"
        first, again = [await sent(http, url + path, **{"Idempotency-Key": "k"}) for _ in range(2)]
        other, _, _ = await sent(http, url + path.replace("simulated", "other"), **{"Idempotency-Key": "k"})

    assert (first[0], again[0], other) == (200, 200, 422)
    assert first[1].partition(";")[0] == again[1].partition(";")[0]
    read = {GENERATE: lambda text: [orjson.loads(text)], STREAM: orjson.loads}.get(path, events_of)
    assert joined(read(first[2])) == joined(read(again[2]))
    assert len(await stored_steps(store, "r1")) == 1


@pytest.mark.parametrize(("query", "waiting"), [("", b"\n"), ("?alt=sse", b"\r\n\r\n")])
@pytest.mark.parametrize("is_error", [False, True], ids=["response", "error"])
async def test_a_client_that_waits_gets_bytes_without_meaning(store, engine, http, query, waiting, is_error):
    """Official SDKs read a comment as JSON; white space is allowed in both formats. An error is then a part of the stream."""
    done = asyncio.Event()
    cassette = load("err_temp" if is_error else "chat_ids_lp")

    async def respond(request, body):
        await done.wait()
        return web.Response(body=cassette.response, status=cassette.status, content_type="application/json")

    engine.respond = respond
    replay = {"streaming": "replay", "keep_alive_interval_s": 0.01}
    async with (
        proxying(engine.url, store, record=replay) as served,
        http.post(f"{served.url}/rollouts/r1{STREAM}{query}", json=BODY) as response,
    ):
        first = await response.content.readexactly(2 * len(waiting))
        done.set()
        text = await response.content.read()

    assert first == 2 * waiting
    responses = orjson.loads(text) if not query else events_of(text.lstrip())
    assert is_error is ("error" in responses[-1])
    assert response.status == 200


async def test_an_engine_that_breaks_off_ends_the_stream_with_an_error(store, engine, http):
    """After the text that arrived; the step is partial."""
    event = {"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1}
    chunk = {**event, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": None}]}
    engine.streams([b"data: " + orjson.dumps(chunk) + b"\n\n"], then="die")
    async with proxying(engine.url, store, record={"streaming": "live"}) as served:
        _, _, text = await sent(http, f"{served.url}/rollouts/r1{STREAM}")

    first, last = orjson.loads(text)
    assert first["candidates"][0]["content"]["parts"][0]["text"] == "Hi"
    assert (last["error"]["code"], last["error"]["status"]) == (500, "INTERNAL")
    assert (await stored_steps(store, "r1"))[0].status == "partial"
