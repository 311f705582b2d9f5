"""The acceptance of calls: naming, keys, guards, and everything that is refused before anything is sent."""

import asyncio
import gzip
import zlib

import orjson
import pytest
from aiohttp import web
from fakes import fake_engine, proxying
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded import load
from stored import stored_rollout, stored_steps

from proxy.rollouts.rollout import write_fields

WHOLE = load("chat_ids_lp")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def answered(engine):
    """The engine has an answer to everything."""
    engine.plays(WHOLE)


async def post(http, url, **named):
    async with http.post(url, **named) as response:
        return response, orjson.loads(await response.read())


NAMINGS = {
    "path": ("/rollouts/r%2F1/v1/chat/completions", {}, {}),
    "sessions path": ("/sessions/r%2F1/v1/chat/completions", {}, {}),
    "header": ("/v1/chat/completions", {"X-Rollout-Id": "r/1"}, {}),
    "key": ("/v1/chat/completions", {"Authorization": "Bearer rollout:r/1"}, {}),
    "x-api-key": ("/v1/chat/completions", {"X-Api-Key": "rollout:r/1"}, {}),
    "body": ("/v1/chat/completions", {}, {"rollout_id": "r/1"}),
    "metadata": ("/v1/chat/completions", {}, {"metadata": {"rollout_id": "r/1", "mine": 1}}),
}


@pytest.mark.parametrize("naming", NAMINGS)
async def test_a_call_names_its_rollout_in_any_of_the_ways(store, engine, http, naming):
    """Path, header, key or body: the step is of that rollout, and the engine sees no rollout_id of ours."""
    path, headers, fields = NAMINGS[naming]
    async with proxying(engine.url, store) as served:
        response, _ = await post(http, served.url + path, json=BODY | fields, headers=headers)

    assert (200, "r/1") == (response.status, response.headers["X-Rollout-Id"])
    assert 1 == len(await stored_steps(store, "r/1"))
    assert "rollout_id" not in engine.requests[0]
    assert fields.get("metadata") == engine.requests[0].get("metadata")


async def test_the_first_naming_wins(store, engine, http):
    """Path before header before key before body before metadata."""
    body = BODY | {"rollout_id": "body", "metadata": {"rollout_id": "meta"}}
    headers = {"X-Rollout-Id": "header", "Authorization": "Bearer rollout:key"}
    async with proxying(engine.url, store) as served:
        url = served.url + "/v1/chat/completions"
        by_path, _ = await post(http, served.url + "/rollouts/path/v1/chat/completions", json=body, headers=headers)
        by_header, _ = await post(http, url, json=body, headers=headers)
        by_key, _ = await post(http, url, json=body, headers={"Authorization": "Bearer rollout:key"})
        by_body, _ = await post(http, url, json=body)

    assert ["path", "header", "key", "body"] == [
        response.headers["X-Rollout-Id"] for response in (by_path, by_header, by_key, by_body)
    ]


async def test_a_call_without_a_rollout_gets_a_new_one(store, engine, http):
    """By default; each call its own."""
    async with proxying(engine.url, store) as served:
        one, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)
        two, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert one.headers["X-Rollout-Id"] != two.headers["X-Rollout-Id"]
    assert 1 == len(await stored_steps(store, one.headers["X-Rollout-Id"]))


async def test_calls_without_a_rollout_go_where_the_fewest_are(store, http):
    """However many come at once; a rollout's own calls stay together."""
    all_here = asyncio.Event()
    held = []

    async def respond(request, body):
        held.append(body)
        if len(held) == 30:
            all_here.set()
        await all_here.wait()
        return web.Response(body=WHOLE.response, content_type="application/json")

    async with fake_engine() as one, fake_engine() as other, fake_engine() as third:
        for engine in (one, other, third):
            engine.respond = respond
        endpoints = [{"url": engine.url, "kind": "vllm"} for engine in (one, other, third)]
        async with proxying(None, store, engines={"endpoints": endpoints}) as served:
            url = served.url + "/v1/chat/completions"
            answers = await asyncio.gather(*(post(http, url, json=BODY) for _ in range(30)))
            assert [10, 10, 10] == [len(engine.requests) for engine in (one, other, third)]
            await asyncio.gather(*(post(http, url, json=BODY, headers={"X-Rollout-Id": "r"}) for _ in range(30)))

    assert {200} == {response.status for response, _ in answers}
    assert [10, 10, 40] == sorted(len(engine.requests) for engine in (one, other, third))


async def test_a_call_without_a_rollout_is_refused_where_that_is_set(store, engine, http):
    """agents.unnamed_rollouts: reject says how to name one."""
    async with proxying(engine.url, store, agents={"unnamed_rollouts": "reject"}) as served:
        response, error = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert (400, "rollout_id") == (response.status, error["error"]["param"])
    assert [] == engine.requests


async def test_a_call_without_a_rollout_passes_untouched_where_that_is_set(store, engine, http):
    """agents.unnamed_rollouts: pass records nothing and injects nothing."""
    async with proxying(engine.url, store, agents={"unnamed_rollouts": "pass"}) as served:
        response, _ = await post(http, served.url + "/v1/chat/completions", json=BODY)

    assert "X-Rollout-Id" not in response.headers
    assert [BODY] == engine.requests


HOSTILE = ["%7B%7D", "{}", "..%2F..%2Fetc", "a%3Ab%3A*", "%F0%9F%A6%8A", "x" * 256, "%20", "a%25b", "%22%5C"]


@pytest.mark.parametrize("segment", HOSTILE)
async def test_any_printable_id_is_a_rollout_of_its_own(store, engine, http, segment):
    """Braces, dots, colons, blanks, emoji, 256 characters: kept apart, and told back as they are."""
    from urllib.parse import unquote

    from yarl import URL

    async with proxying(engine.url, store) as served:
        url = URL(f"{served.url}/rollouts/{segment}/v1/chat/completions", encoded=True)
        response, _ = await post(http, url, json=BODY)

    assert 200 == response.status
    assert 1 == len(await stored_steps(store, unquote(segment)))


@pytest.mark.parametrize("segment", ["x" * 257, "%0A", "%00", "a%0D%0AX-Evil:1", "%FF", "%ED%A0%80", ""])
async def test_what_cannot_be_an_id_is_400_in_the_dialects_shape(store, engine, http, segment):
    """Nothing is sent, and nothing is stored."""
    from yarl import URL

    async with proxying(engine.url, store) as served:
        url = URL(f"{served.url}/rollouts/{segment}/v1/chat/completions", encoded=True)
        response, error = await post(http, url, json=BODY)

    assert (400, "invalid_request_error") == (response.status, error["error"]["type"])
    assert ((), []) == ((await store.list()).names, engine.requests)


class TestGuards:
    """What a rollout takes no more."""

    async def test_a_finished_rollout_takes_no_calls(self, store, engine, http):
        """409 of type rollout_closed."""
        await store.open("r1", write_fields({"status": "completed"}), now_ms=1)
        async with proxying(engine.url, store) as served:
            response, error = await post(http, served.url + "/rollouts/r1/v1/chat/completions", json=BODY)

        assert (409, "rollout_closed", []) == (response.status, error["error"]["type"], engine.requests)

    @pytest.mark.parametrize("limits", [{"max_steps": 2}, {"max_tokens": 30}])
    async def test_a_rollout_past_its_limit_gets_429_and_is_marked(self, store, engine, http, limits):
        """OpenAI's clients are told not to try again."""
        await store.open("r1", write_fields({"limits": limits}), now_ms=1)
        async with proxying(engine.url, store) as served:
            answers = [
                (await post(http, served.url + "/rollouts/r1/v1/chat/completions", json=BODY))[0] for _ in range(4)
            ]

        assert [200, 200, 429, 429] == [response.status for response in answers]
        assert "false" == answers[2].headers["X-Should-Retry"]
        assert "limited" == (await stored_rollout(store, "r1")).status


class TestTerms:
    """What is sent in place of what the client sent."""

    async def test_the_engine_gets_its_own_model_name_and_the_client_sees_its_own(self, store, engine, http):
        """A model alias shows in neither direction."""
        async with proxying(engine.url, store, models={"gpt-4o": "tiny"}) as served:
            _, shown = await post(http, served.url + "/v1/chat/completions", json=BODY | {"model": "gpt-4o"})

        assert ("tiny", "gpt-4o") == (engine.requests[0]["model"], shown["model"])

    async def test_sampling_rules_of_configuration_and_rollout_are_sent_and_recorded(self, store, engine, http):
        """Override wins, default yields, the rollout's rules go on top; the step says what was sent."""
        await store.open("r1", write_fields({"sampling": {"override": {"temperature": 1.0}}}), now_ms=1)
        rules = {"override": {"temperature": 0.5, "seed": 3}, "default": {"top_p": 0.9}, "cap": {"max_tokens": 10}}
        async with proxying(engine.url, store, sampling=rules) as served:
            await post(
                http,
                served.url + "/rollouts/r1/v1/chat/completions",
                json=BODY | {"temperature": 0.1, "max_tokens": 99},
            )

        (step,) = await stored_steps(store, "r1")
        expected = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "max_tokens": 10}
        assert expected == {name: engine.requests[0][name] for name in expected}
        assert expected.items() <= step.sampling.items()
        assert 0.1 == step.request["temperature"]


class TestBadInput:
    """Each gets a clear error of the right status and shape, and leaves nothing behind."""

    BAD = {
        "malformed": b'{"messages": [',
        "empty": b"",
        "a list": b"[1]",
        "null": b"null",
        "invalid UTF-8": b'{"a": "\xff"}',
        "deep": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        "less deep": b'{"a":' + b"[" * 250 + b"]" * 250 + b"}",
        "NaN": b'{"temperature": NaN}',
        "a huge integer": b'{"seed": 123456789012345678901234567890}',
        "a lone surrogate": b'{"a": "\\ud800"}',
        "a rollout id that is none": b'{"rollout_id": 7}',
    }

    @pytest.mark.parametrize("bad", BAD)
    async def test_a_body_that_is_none_is_400(self, store, engine, http, bad):
        """The error has OpenAI's shape, and names what is wrong."""
        async with proxying(engine.url, store) as served:
            response, error = await post(http, served.url + "/v1/chat/completions", data=self.BAD[bad])

        assert (400, "invalid_request_error") == (response.status, error["error"]["type"])
        assert {"message", "type", "param", "code"} == error["error"].keys()
        assert ((), []) == ((await store.list()).names, engine.requests)

    async def test_duplicate_keys_mean_the_last(self, store, engine, http):
        """As to the engines."""
        text = b'{"model":"a","messages":[],"model":"b"}'
        async with proxying(engine.url, store) as served:
            await post(http, served.url + "/v1/chat/completions", data=text)

        assert "b" == engine.requests[0]["model"]

    @pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    async def test_packed_bodies_are_read(self, store, engine, http, coding, pack):
        """gzip and deflate, as agents send them."""
        async with proxying(engine.url, store) as served:
            response, _ = await post(
                http,
                served.url + "/v1/chat/completions",
                data=pack(orjson.dumps(BODY)),
                headers={"Content-Encoding": coding},
            )

        assert (200, "hi") == (response.status, engine.requests[0]["messages"][0]["content"])

    async def test_a_body_that_claims_gzip_and_is_not_is_400(self, store, engine, http):
        """It is told apart from bad JSON."""
        async with proxying(engine.url, store) as served:
            response, error = await post(
                http, served.url + "/v1/chat/completions", data=b"not gzip", headers={"Content-Encoding": "gzip"}
            )

        assert 400 == response.status
        assert "gzip" in error["error"]["message"]

    @pytest.mark.parametrize("packed", [False, True])
    async def test_a_body_over_the_limit_is_413(self, store, engine, http, packed):
        """The limit is on the inflated body, so that a bomb does not pass."""
        text = orjson.dumps(BODY | {"pad": "x" * 200_000})
        headers = {"Content-Encoding": "gzip"} if packed else {}
        async with proxying(engine.url, store, agents={"max_body_bytes": 100_000}) as served:
            response, error = await post(
                http, served.url + "/v1/chat/completions", data=gzip.compress(text) if packed else text, headers=headers
            )

        assert (413, "request_too_large") == (response.status, error["error"]["type"])

    @pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/realtime", "/nothing", "/rollouts/r1/v1/images"])
    async def test_an_unknown_route_is_404_and_nothing_is_passed_on(self, store, engine, http, path):
        """Nothing that samples is passed on unrecorded by accident."""
        async with proxying(engine.url, store) as served:
            response, error = await post(http, served.url + path, json=BODY)

        assert (404, "not_found_error", []) == (response.status, error["error"]["type"], engine.requests)

    async def test_a_wrong_method_is_refused(self, store, engine, http):
        """The sentence says which one it takes."""
        async with proxying(engine.url, store) as served, http.get(served.url + "/v1/chat/completions") as response:
            assert 404 == response.status
            assert "POST" in (await response.json())["error"]["message"]

    async def test_no_body_and_no_path_brings_the_proxy_down(self, store, engine, http):
        """Thousands of random bodies and ids: 200, or a named refusal (422: Osmosis' flat form); the store stays whole."""
        async with proxying(engine.url, store) as served:
            await _many(served.url, engine, http)
            assert 200 == (await post(http, served.url + "/v1/chat/completions", json=BODY))[0].status
        for name in (await store.list(limit=1000)).names:
            await stored_steps(store, name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "n", "stream", "logprobs", "top_logprobs", "return_token_ids", "rollout_id", "metadata",
     "stream_options", "echo", "max_tokens", "include_reasoning", "stop", "x"]
)  # fmt: skip


async def _many(url, engine, http):
    """Send what hypothesis draws, in batches: examples are drawn by a sync function, so they are drawn first."""
    import json

    drawn: list[tuple[str, bytes]] = []

    @settings(database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
        st.dictionaries(FIELDS, JSON, max_size=6).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60),
    )
    def draw(path, text):
        drawn.append((path, text))

    draw()
    for path, text in drawn:
        async with http.post(url + path, data=text) as response:
            shown = await response.read()
            assert response.status in (200, 400, 422), (path, text, shown)
